"""Layers of other projects that are known by their class."""

import sys
from typing import Any

from ..arrays import backend_of
from ..errors import ConfigError
from ..layouts import read
from ..spec.parameters import Heads, Parameters


def is_torch_layer(layer: Any, /) -> bool:
    """Tell whether a layer is a `torch.nn.MultiheadAttention`; PyTorch is not imported for that."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(layer, torch.nn.MultiheadAttention)


def parameters_of(layer: Any, /) -> Parameters[Any]:
    """Read the parameters of a `torch.nn.MultiheadAttention`; its `add_zero_attn` becomes an extra key and value of zeros.

    Args:
        layer: the layer.

    Returns:
        The parameters, which share memory with it where they can.

    Raises:
        ConfigError: it is no such layer.
    """
    if not is_torch_layer(layer):
        known = "torch.nn.MultiheadAttention and the layers of attnspec"
        raise ConfigError(f"from_layer: a {type(layer).__name__} is not known, {known} are; from_layout reads any state dict.")
    heads = Heads(d_model=layer.embed_dim, h=layer.num_heads, d_k=layer.head_dim, d_key_in=layer.kdim, d_value_in=layer.vdim)
    layout = "torch" if layer.in_proj_weight is not None else "torch_separate"
    stored = {name: tensor.detach() for name, tensor in layer.state_dict().items()}
    parameters = read(stored, layout, heads)
    if not layer.add_zero_attn:
        return parameters
    named = {name: array for name, array in vars(parameters).items() if array is not None}
    for name, like in (("extra_k", parameters.w_k), ("extra_v", parameters.w_v)):
        zeros = like[:, :1, :] * 0
        named[name] = backend_of(zeros).concat((named[name], zeros), axis=1) if name in named else zeros
    return Parameters(**named)
