"""The layer of PyTorch."""

from os import PathLike
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from ..errors import ConfigError
from ..spec.parameters import Heads, Parameters
from ..spec.policy import Norm, Policy, Rotation
from ..step import is_compiling
from . import torch_kernel
from .base import DEFAULT, NAMES, Layer, settle, shapes_of_new

_ALL = frozenset(NAMES)


class MultiHeadAttention(Layer[Tensor], nn.Module):
    """Multi-head attention, checked, and as fast as a kernel lets it be.

    Each head has its own `w_q`, `w_k` and `w_v`, as in `attnspec.Parameters`, whose names are those of the parameters.

    Attributes:
        heads: the sizes.
        policy: the conventions.
        training: whether weights are dropped.
    """

    _kernel: ClassVar[Any] = torch_kernel
    _framework: ClassVar[str] = "pt"
    w_q: Tensor
    w_k: Tensor

    def __init__(
        self,
        d_model: int,
        h: int,
        *,
        h_kv: int | None = None,
        d_k: int | None = None,
        d_v: int | None = None,
        d_key_in: int | None = None,
        d_value_in: int | None = None,
        bias: bool = True,
        rope: Rotation | bool = False,
        window: tuple[int | None, int | None] | None = None,
        dropout: float = 0.0,
        qk_norm: Norm | None = None,
        policy: Policy = DEFAULT,
        seed: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Make a layer with new parameters.

        Args:
            d_model: width of the residual stream.
            h: how many query heads.
            h_kv: how many key/value heads; None for `h`.
            d_k: width of one head's queries and keys; None for `d_model / h`.
            d_v: width of one head's values; None for `d_k`.
            d_key_in: width of the source of keys; None for `d_model`.
            d_value_in: width of the source of values; None for `d_key_in`.
            bias: whether there are biases.
            rope: rotary positions: True for those of Llama, or a `Rotation`; short for `policy.rotation`.
            window: how many keys a query sees to the left and to the right of its own position; short for `policy.window`.
            dropout: the share of weights that is dropped in training.
            qk_norm: how queries and keys are normalised, with gains that are learnt; short for `policy.normalise`.
            policy: the conventions.
            seed: which draw of the parameters, the same in every library; None for PyTorch's own chance.
            device: where the parameters lie; None for PyTorch's default.
            dtype: the dtype of the parameters; None for PyTorch's default.

        Raises:
            ConfigError: a setting is impossible, or two of them exclude each other.
        """
        super().__init__()
        heads = Heads(d_model=d_model, h=h, h_kv=h_kv, d_k=d_k, d_v=d_v, d_key_in=d_key_in, d_value_in=d_value_in)
        policy = settle(policy, rope=rope, window=window, qk_norm=qk_norm)
        shapes = shapes_of_new(heads, policy, bias=bias)
        self._settle(heads, policy, dropout, None, shapes)
        self._own({name: torch.empty(shape, device=device, dtype=dtype) for name, shape in shapes.items()})
        if not self.w_q.is_meta:
            self.reset_parameters(seed)

    def _own(self, tensors: dict[str, Tensor]) -> None:
        for name in NAMES:
            self.register_parameter(name, nn.Parameter(tensors[name]) if name in tensors else None)

    def reset_parameters(self, seed: int | None = None) -> None:
        """Draw the projections anew: normal numbers of variance 1 / (width of the input); biases are 0, gains are 1.

        Args:
            seed: which draw, the same in every library; None for PyTorch's own chance.
        """
        seed = _agreed(torch.randint(2**62, ()), self.w_q) if seed is None else seed
        drawn = vars(Parameters.random(self.heads, seed=seed, bias=False))
        with torch.no_grad():
            for name, parameter in self.named_parameters(recurse=False):
                if drawn.get(name) is None:
                    parameter.fill_(1.0 if name.startswith("gain") else 0.0)
                else:
                    parameter.copy_(_laid_out(torch.from_numpy(drawn[name]), parameter))

    def _become(self, arrays: dict[str, Any], heads: Heads, policy: Policy, dropout: float) -> None:
        nn.Module.__init__(self)
        self._settle(heads, policy, dropout, None, arrays)
        self._own({name: torch.as_tensor(array).detach().clone(memory_format=torch.contiguous_format) for name, array in arrays.items()})

    def _save(self, arrays: dict[str, Any], path: str | PathLike[str], metadata: dict[str, str]) -> None:
        whole = {name: array.full_tensor() if hasattr(array, "full_tensor") else array for name, array in arrays.items()}
        save_file({name: array.detach().contiguous() for name, array in whole.items()}, path, metadata)

    def to_layer(self) -> nn.MultiheadAttention:
        """Make the `torch.nn.MultiheadAttention` that computes what this layer does, batch first.

        Returns:
            The layer, with copies of the parameters.

        Raises:
            ConfigError: there is none, since it has no place for a setting or a parameter of this layer.
        """
        sizes, given = self.heads, {name: tensor for name in NAMES if (tensor := getattr(self._view(), name)) is not None}
        wanted = {"h_kv": sizes.h, "d_k": sizes.d_model // sizes.h, "d_v": sizes.d_model // sizes.h}
        odd = [f"{name}={getattr(sizes, name)}" for name, size in wanted.items() if getattr(sizes, name) != size]
        odd += [f"policy.{name}={value!r}" for name, value in vars(self.policy).items() if value != getattr(DEFAULT, name)]
        biases = [name for name in given if name.startswith("b_")]
        odd += [f"{' and '.join(biases)} without the other biases"] if len(biases) not in {0, 4} else []
        extra = given["extra_k"].shape[1] if "extra_k" in given else 0
        if odd or extra > 1:
            raise ConfigError(f"to_layer: torch.nn.MultiheadAttention has no place for {', '.join(odd) or f'extra={extra} extra keys'}.")
        layer = nn.MultiheadAttention(
            sizes.d_model, sizes.h, dropout=self.dropout, bias=bool(biases), add_bias_kv=extra > 0, kdim=sizes.d_key_in,
            vdim=sizes.d_value_in, batch_first=True, device=self.w_q.device, dtype=self.w_q.dtype,
        )  # fmt: skip
        layer.load_state_dict(self.to_layout("torch" if layer.in_proj_weight is not None else "torch_separate"))
        return layer.train(self.training)

    def _view(self) -> Any:
        named = self._parameters
        if named.keys() != _ALL:  # under parametrize or prune
            named = {name: getattr(self, name) for name in NAMES}
        return Parameters(**named) if is_compiling() else SimpleNamespace(**named)

    def _key(self, x: Any, parameters: Any) -> tuple[Any, ...]:
        if not isinstance(x, Tensor):
            return type(x), getattr(x, "shape", None), getattr(x, "dtype", None)
        device, w_q = x.device, parameters.w_q
        autocast = torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)
        return type(x), x.shape, x.dtype, device, w_q.dtype, w_q.device, autocast

    def _blank(self, shape: tuple[int, ...]) -> Tensor:
        return self.w_k.new_empty(shape)

    def extra_repr(self) -> str:
        """Describe the settings, for `print`."""
        sizes = ", ".join(f"{name}={size}" for name, size in vars(self.heads).items())
        shown = ", ".join(f"{name}={value!r}" for name, value in vars(self.policy).items() if value != getattr(DEFAULT, name))
        return f"{sizes}, dropout={self.dropout}, policy=Policy({shown})"


def _agreed(seed: Tensor, like: Any) -> int:
    """The seed of the first rank, where there are several."""
    if not hasattr(like, "device_mesh"):
        return int(seed)
    from torch.distributed.tensor import Replicate, distribute_tensor

    mesh = like.device_mesh
    return int(distribute_tensor(seed, mesh, [Replicate()] * mesh.ndim).to_local())


def _laid_out(whole: Tensor, like: Any) -> Tensor:
    """Take the part of a tensor that this rank has of another one, where there are several ranks."""
    if not hasattr(like, "device_mesh"):
        return whole
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)
