"""Where models of transformers keep the parameters of their attention, as einops patterns."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from einops import rearrange

from ..spec.parameters import Parameters
from ..spec.policy import Rotation

if TYPE_CHECKING:
    from torch import nn

_SEPARATE = (("query", "key", "value"), ("q_proj", "k_proj", "v_proj"), ("q_lin", "k_lin", "v_lin"))
_FUSED = "c_attn"
_OUTPUT = ("o_proj", "out_proj", "out_lin", "c_proj", "dense")
_HARMLESS = ("LayerNorm", "dropout", "attention_dropout", "output_dropout", "attn_dropout", "resid_dropout")  # after the heads


def output_of(module: "nn.Module", parent: "nn.Module", /) -> "nn.Module | None":
    """Find the output projection of an attention module.

    Args:
        module: the attention module.
        parent: the module that holds it; BERT keeps the output projection there.

    Returns:
        The output projection; None if it is in no known place.
    """
    children = dict(module.named_children())
    beside = dict(dict(parent.named_children()).get("output", module).named_children())
    return next((place[name] for place in (children, beside) for name in _OUTPUT if name in place), None)


def parameters_of(module: "nn.Module", output: "nn.Module | None", /, *, h: int, h_kv: int) -> Parameters[npt.NDArray[Any]] | str:
    """Read the parameters of an attention module whose fan out is a projection and nothing else.

    Args:
        module: the attention module.
        output: its output projection.
        h: how many query heads it has.
        h_kv: how many key/value heads it has.

    Returns:
        The parameters, or why they cannot be read.
    """
    children = {name: child for name, child in module.named_children() if name not in _HARMLESS}
    names = next((names for names in _SEPARATE if children.keys() >= set(names)), (_FUSED,))
    if output is None or not all(name in children and _is_linear(children[name]) for name in names) or not _is_linear(output):
        return f"keeps the projections of its {type(module).__name__} in a way that is not known here"
    if between := sorted(children.keys() - {*names, *_OUTPUT}):
        return f"does more than project: its {type(module).__name__} has {' and '.join(between)}"
    arrays = {"w_o": _weight(output), "b_o": _bias(output)}
    heads = {"q": h, "k": h_kv, "v": h_kv}
    if names == (_FUSED,):
        parts = _split(children[_FUSED])
    else:
        parts = {role: (_weight(children[name]), _bias(children[name])) for role, name in zip("qkv", names, strict=True)}
    for role, (weight, bias) in parts.items():
        arrays[f"w_{role}"] = rearrange(weight, "d_in (h d_head) -> h d_in d_head", h=heads[role])
        arrays[f"b_{role}"] = None if bias is None else rearrange(bias, "(h d_head) -> h d_head", h=heads[role])
    return Parameters(**_present(arrays))


def rotation_of(cos: npt.NDArray[Any], sin: npt.NDArray[Any], /) -> Rotation | str:
    """Read how a model turns its queries and keys from the cosines and sines that it multiplies them by.

    Args:
        cos: the cosine of the angle of each channel, token by token.
        sin: its sine.

    Returns:
        The rotation, or why it is none that the specification has.
    """
    other = "rotates its queries and keys in a way of its own"
    if cos.shape[-2] < 2:  # noqa: PLR2004  # the token at position 1 shows the rates
        return "rotates its queries and keys, and one token cannot show how"
    width, angles = cos.shape[-1], np.arctan2(sin, cos)[0].astype(np.float64)
    rates, steps = angles[1, : width // 2], np.arange(width // 2)
    if width < 4 or not rates[-1] > 0:  # noqa: PLR2004  # one rate, that of 1, leaves the base open
        return other
    base = float(f"{rates[-1] ** (-width / (width - 2)):.5g}")
    turned = np.exp(1j * np.arange(len(angles))[:, None] * base ** (-2 * steps / width))
    given = cos[0] + 1j * sin[0]
    if np.abs(given - np.concatenate((turned, turned), axis=-1)).max() > 1e-4 * len(angles):  # their rounding
        return other
    return Rotation(width=width, base=base)


def _present(arrays: Mapping[str, npt.NDArray[Any] | None]) -> dict[str, Any]:
    return {name: np.ascontiguousarray(array) for name, array in arrays.items() if array is not None}


def _split(fused: "nn.Module") -> dict[str, tuple[npt.NDArray[Any], npt.NDArray[Any] | None]]:
    """Take GPT-2's fused projection apart: the queries of all heads, then the keys, then the values."""
    weights = rearrange(_weight(fused), "d_in (three d_out) -> three d_in d_out", three=3)
    bias = _bias(fused)
    biases = [None] * 3 if bias is None else rearrange(bias, "(three d_out) -> three d_out", three=3)
    return dict(zip("qkv", zip(weights, biases, strict=True), strict=True))


def _is_linear(module: "nn.Module") -> bool:
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    return type(module) in (nn.Linear, Conv1D)


def _weight(module: Any) -> npt.NDArray[Any]:
    """Read a projection as what multiplies from the right; a Linear keeps it transposed, a Conv1D does not."""
    from torch import nn

    weight = module.weight.detach().numpy().copy()
    return rearrange(weight, "d_out d_in -> d_in d_out") if isinstance(module, nn.Linear) else weight


def _bias(module: Any) -> npt.NDArray[Any] | None:
    return None if module.bias is None else module.bias.detach().numpy().copy()
