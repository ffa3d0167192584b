"""The layers of a real model that come with this package."""

import json
from importlib import resources
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import ConfigError
from ..spec.parameters import Parameters
from .run import Layer, Run

TEXT = "the cat sat on the mat"
FILE = "all-MiniLM-L6-v2.safetensors"


def shipped(text: str = TEXT, /) -> Run:
    """Load three attention layers of all-MiniLM-L6-v2, on the one sentence that their inputs are kept for.

    Args:
        text: that sentence.

    Returns:
        The layers, in float32; their parameters are stored in float16.

    Raises:
        ConfigError: it is another text.
    """
    about, arrays = _read()
    if text != about["text"]:
        msg = f"heads: the layers that come with attnspec are kept for {about['text']!r} only, not for {text!r}; --model DIR runs any text."
        raise ConfigError(msg)
    layers = tuple(_layer(index, arrays) for index in about["layers"])
    note = f"{about['note']} The model, too, ran on the stored ones."
    return Run(about["model"], text, tuple(about["tokens"]), layers, note, ((0, 2), (1, 8), (5, 11)))


def _read() -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
    from safetensors import safe_open

    with resources.as_file(resources.files(__package__) / "data" / FILE) as path, safe_open(path, framework="numpy") as file:
        arrays = {name: file.get_tensor(name).astype(np.float32) for name in file.keys()}  # noqa: SIM118  # it is no dict
        return json.loads(file.metadata()["about"]), arrays


def _layer(index: int, arrays: dict[str, npt.NDArray[Any]]) -> Layer:
    own = {name.rpartition(".")[2]: array for name, array in arrays.items() if name.startswith(f"layers.{index}.")}
    x, blended, y = own.pop("x"), own.pop("blended"), own.pop("y")
    return Layer(index, x, Parameters(**own), None, blended, y)
