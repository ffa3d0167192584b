"""One name for the layers of all libraries."""

from typing import TYPE_CHECKING, Any, Literal, overload

from ..errors import ConfigError

if TYPE_CHECKING:
    from .numpy_layer import MultiHeadAttention as NumpyLayer
    from .torch_layer import MultiHeadAttention as TorchLayer


@overload
def MultiHeadAttention(d_model: int, h: int, *, backend: Literal["numpy"], **settings: Any) -> "NumpyLayer": ...
@overload
def MultiHeadAttention(d_model: int, h: int, *, backend: Literal["torch"], **settings: Any) -> "TorchLayer": ...
def MultiHeadAttention(d_model: int, h: int, *, backend: Literal["numpy", "torch"], **settings: Any) -> Any:
    """Make a layer of multi-head attention, of the library of your choice.

    Args:
        d_model: width of the residual stream.
        h: how many query heads.
        backend: the library.
        **settings: the others of `attnspec.torch.MultiHeadAttention` and `attnspec.numpy.MultiHeadAttention`, which have
            the same.

    Returns:
        The layer.

    Raises:
        ConfigError: there is no layer of this library, or a setting is impossible.
    """
    if backend == "numpy":
        from .numpy_layer import MultiHeadAttention as Numpy

        return Numpy(d_model, h, **settings)
    if backend == "torch":
        from .torch_layer import MultiHeadAttention as Torch

        return Torch(d_model, h, **settings)
    raise ConfigError(f"MultiHeadAttention: backend={backend!r} must be 'numpy' or 'torch'.")
