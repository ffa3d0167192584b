"""Where models of transformers keep the parameters of their attention, as einops patterns."""

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..layouts import read
from ..spec.parameters import Heads, Parameters
from ..spec.policy import Rotation

if TYPE_CHECKING:
    from torch import nn

_SEPARATE = (("query", "key", "value"), ("q_proj", "k_proj", "v_proj"), ("q_lin", "k_lin", "v_lin"))
_FUSED = "c_attn"
_LAYOUT = {
    "w_q": "d_model (h d_k)", "w_k": "d_model (h_kv d_k)", "w_v": "d_model (h_kv d_v)", "w_qkv": "d_model (part d_k)",
    "w_o": "(h d_v) d_model",
    "b_q": "(h d_k)", "b_k": "(h_kv d_k)", "b_v": "(h_kv d_v)", "b_qkv": "(part d_k)", "b_o": "d_model",
}  # fmt: skip
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
    held = ("qkv",) if names == (_FUSED,) else ("q", "k", "v")
    projections = {**{role: children[name] for role, name in zip(held, names, strict=True)}, "o": output}
    stored = {f"w_{role}": _weight(each) for role, each in projections.items()}
    biases = {role: getattr(each, "bias", None) for role, each in projections.items()}
    stored |= {f"b_{role}": bias.detach().numpy().copy() for role, bias in biases.items() if bias is not None}
    (found, d_model), fanned = stored["w_o"].shape, stored[f"w_{held[0]}"].shape[1]
    heads = Heads(d_model=d_model, h=h, h_kv=h_kv, d_k=fanned // (h if len(held) > 1 else h + 2 * h_kv), d_v=found // h)
    return read(stored, {name: (name, pattern) for name, pattern in _LAYOUT.items() if name in stored}, heads)


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


def _is_linear(module: "nn.Module") -> bool:
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    return type(module) in (nn.Linear, Conv1D)


def _weight(module: Any) -> npt.NDArray[Any]:
    """Read a projection as what multiplies from the right; a Linear keeps it transposed, a Conv1D does not."""
    from torch import nn

    weight: npt.NDArray[Any] = module.weight.detach().numpy().copy()
    return weight.T if isinstance(module, nn.Linear) else weight
