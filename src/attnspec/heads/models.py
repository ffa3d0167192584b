"""Any local model of transformers, watched while it runs its own attention."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt
from einops import rearrange

from ..errors import ConfigError
from ..spec.fan_out import project_queries
from .projections import output_of, parameters_of, rotation_of
from .run import Layer, Projected, Run

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_OTHER_OPERATORS = {
    "softcap": "caps its scores",
    "s_aux": "has attention sinks",
    "sinks": "has attention sinks",
    "position_bias": "adds a bias to its scores",
    "indices": "chooses the keys that a query sees",
    "block_indices": "chooses the keys that a query sees",
}
_recorder: ContextVar["_Recorder"] = ContextVar("recorder")


def observe(directory: Path, text: str, /) -> Run:
    """Run a model on a text and record what its attention layers are given and make of it.

    The model runs in float32 whatever dtype it is stored in, since in float16 and bfloat16 rounding hides real
    differences; and on PyTorch's fused attention, as it does by default.

    Args:
        directory: a local model with its tokenizer, as `save_pretrained` leaves them; nothing is downloaded.
        text: any text.

    Returns:
        All attention layers, in the order in which they ran.

    Raises:
        ConfigError: the model cannot be loaded, its attention is another operator than the specification's, or the
            text is empty or too long for it.
    """
    if not (directory / "config.json").is_file():
        raise ConfigError(f"heads: {directory} holds no model: there is no config.json in it.")
    tokenizer, model = _load(directory)
    encoded = tokenizer(text, return_tensors="pt")
    tokens = _words(tokenizer, encoded["input_ids"][0].tolist())
    limit = min(tokenizer.model_max_length, getattr(model.config, "max_position_embeddings", tokenizer.model_max_length))
    if not 0 < len(tokens) <= limit:
        raise ConfigError(f"heads: the text has {len(tokens)} tokens, but the model takes from 1 to {limit}.")
    layers = _watch(model, **{name: encoded[name] for name in ("input_ids", "attention_mask") if name in encoded})
    return Run(directory.resolve().name, text, tokens, layers)


def _load(directory: Path) -> tuple["PreTrainedTokenizerBase", "PreTrainedModel"]:
    try:
        import torch
        import transformers
        from transformers.masking_utils import sdpa_mask
    except ImportError as error:
        raise ConfigError(f"heads: --model needs {error.name}; pip install 'attnspec[models]'.") from None

    transformers.AttentionInterface.register("attnspec", _attend)
    transformers.AttentionMaskInterface.register("attnspec", sdpa_mask)
    with _loading(directory):
        config = transformers.AutoConfig.from_pretrained(directory, local_files_only=True)
        tokenizer = transformers.AutoTokenizer.from_pretrained(directory, local_files_only=True)
    if config.is_encoder_decoder:
        raise ConfigError(f"heads: {config.model_type} is an encoder with a decoder; only one or the other alone can be watched.")
    options = {"dtype": torch.float32, "attn_implementation": "attnspec", "local_files_only": True}
    try:
        with _loading(directory):
            model = transformers.AutoModel.from_pretrained(directory, **options)
    except KeyError:  # the model looks its attention up in a table of its own
        raise _past_interface(config.model_type) from None
    if not (model.is_backend_compatible() or model._supports_sdpa):  # noqa: SLF001  # documented for authors of models
        raise _past_interface(config.model_type)
    return tokenizer, model.eval()


@contextmanager
def _loading(directory: Path) -> Iterator[None]:
    """Let transformers load in silence, and make its refusals ours."""
    from safetensors import SafetensorError
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    except (ImportError, OSError, RuntimeError, ValueError, SafetensorError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(f"heads: transformers cannot load {directory}: {reason}") from error
    finally:
        logging.set_verbosity(verbosity)
        logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def _past_interface(kind: str) -> ConfigError:
    return ConfigError(f"heads: {kind} runs attention of its own, past the attention interface of transformers, so it cannot be watched.")


def _words(tokenizer: "PreTrainedTokenizerBase", ids: list[int]) -> tuple[str, ...]:
    """Make tokens legible: `##ing` stays as it is, byte-level pieces are decoded where they are whole characters."""
    raw = tokenizer.convert_ids_to_tokens(ids)
    decoded = [str(tokenizer.decode([index])).strip() for index in ids]
    return tuple(
        token if token.startswith("##") or not word or "\N{REPLACEMENT CHARACTER}" in word else word
        for token, word in zip(raw, decoded, strict=True)
    )


def _watch(model: "PreTrainedModel", /, **inputs: "torch.Tensor") -> tuple[Layer, ...]:
    import torch

    recorder = _Recorder(model)
    token = _recorder.set(recorder)
    try:
        with torch.no_grad():
            model(**inputs)
    finally:
        _recorder.reset(token)
    kind = model.config.model_type
    if not recorder.layers:
        raise _past_interface(kind)
    if not model._supports_sdpa:  # noqa: SLF001  # as above
        raise ConfigError(f"heads: {kind} does not run on PyTorch's scaled_dot_product_attention, so its attention is another operator.")
    return tuple(recorder.layers)


def _attend(
    module: "nn.Module", query: "torch.Tensor", key: "torch.Tensor", value: "torch.Tensor", mask: "torch.Tensor | None", **options: Any
) -> tuple["torch.Tensor", None]:
    """Do what transformers does by default, under the eyes of the recorder."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    for name in _OTHER_OPERATORS.keys() & {name for name, option in options.items() if option is not None}:
        msg = f"heads: {type(module).__name__} {_OTHER_OPERATORS[name]} ({name}), which PyTorch's fused attention does not do."
        raise ConfigError(msg)
    found, _ = sdpa_attention_forward(module, query, key, value, mask, **options)
    blended = rearrange(_array(found), "batch seq_q h d_v -> batch h seq_q d_v")
    _recorder.get().record(module, Projected(_array(query), _array(key), _array(value)), blended, mask, options)
    return found, None


class _Recorder:
    """Notes what goes into and comes out of the attention modules of a model."""

    def __init__(self, model: "nn.Module", /) -> None:
        self.layers: list[Layer] = []
        self._parents = {child: parent for parent in model.modules() for child in parent.children()}
        self._given: dict[nn.Module, tuple[Any, Any]] = {}
        self._output: nn.Module | None = None  # of the attention that ran last: its output projection, which runs next
        for module in model.modules():
            module.register_forward_pre_hook(self._enter, with_kwargs=True)
            module.register_forward_hook(self._leave)

    def record(
        self, module: "nn.Module", own: Projected, blended: npt.NDArray[Any], mask: "torch.Tensor | None", options: Mapping[str, Any]
    ) -> None:
        """Note one call of attention."""
        x, turning = self._given[module]
        self._output = output_of(module, self._parents[module])
        keep = None if mask is None else _keep(mask)
        causal = mask is None and own.queries.shape[2] > 1 and _is_causal(module, options)
        rotation = None if turning is None else rotation_of(*map(_array, turning))
        layer = Layer(len(self.layers), None, None, own, blended, None, keep, causal, options.get("scaling"))
        if isinstance(rotation, str):
            self.layers.append(replace(layer, why=rotation))
        else:
            self.layers.append(_with_fan_out(replace(layer, rotation=rotation), module, self._output, x))

    def _enter(self, module: "nn.Module", args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = args[0] if args else next(iter(kwargs.values()), None)
        self._given[module] = (given, kwargs.get("position_embeddings"))

    def _leave(self, module: "nn.Module", _: Any, output: Any) -> None:
        if module is self._output:
            self.layers[-1] = replace(self.layers[-1], y=_array(output))
            self._output = None


def _array(tensor: "torch.Tensor") -> npt.NDArray[Any]:
    array: npt.NDArray[Any] = tensor.detach().numpy().copy()
    return array


def _keep(mask: "torch.Tensor") -> npt.NDArray[np.bool_]:
    """Read a mask as what it keeps; one that is added to the scores must leave each as it is or shut it out."""
    added = _array(mask)
    if added.dtype == np.bool_:
        return added
    shut: npt.NDArray[np.bool_] = added <= np.finfo(added.dtype).min / 2
    if not np.all(shut | (added == 0)):
        raise ConfigError("heads: the mask of this model also adds a bias to the scores, which is not computed again here.")
    return ~shut


def _is_causal(module: "nn.Module", options: Mapping[str, Any]) -> bool:
    """Tell what sdpa_attention_forward makes of its options."""
    given = options.get("is_causal")
    return bool(getattr(module, "is_causal", True) if given is None else given)


def _with_fan_out(layer: Layer, module: "nn.Module", output: "nn.Module | None", given: "torch.Tensor") -> Layer:
    """Add the parameters and the input of a layer, or say why the fan out cannot be computed from them.

    OPT and ESM scale their queries instead of their scores, and then pass a scaling of 1; that is undone here.
    """
    own, scale = cast("Projected", layer.projected), layer.scale
    parameters = parameters_of(module, output, h=own.queries.shape[1], h_kv=own.keys.shape[1])
    if isinstance(parameters, str):
        return replace(layer, why=parameters)
    x, factor = _array(given), own.queries.shape[-1] ** -0.5
    if scale == 1:
        queries = project_queries(x, parameters.w_q, parameters.b_q)
        off, off_scaled = (np.abs(own.queries - queries * times).max() for times in (1.0, factor))
        if off_scaled < off:
            own, scale = replace(own, queries=own.queries / factor), factor
    return replace(layer, x=x, parameters=parameters, projected=own, scale=scale, why="")
