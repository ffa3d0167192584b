"""The layer of NumPy."""

from os import PathLike
from types import SimpleNamespace
from typing import Any, ClassVar, Literal, Self

import numpy as np
import numpy.typing as npt

from ..errors import ConfigError
from ..spec.parameters import Heads, Parameters
from ..spec.policy import Norm, Policy, Rotation
from . import numpy_kernel
from .base import DEFAULT, NAMES, Layer, settle, shapes_of_new
from .fused import Band

Array = npt.NDArray[Any]


class _Kernel:
    """The kernel of NumPy, on the parameters of a layer."""

    @staticmethod
    def project(x: Array, context: Array, context_v: Array, parameters: Any, policy: Policy, /) -> tuple[Array, Array, Array]:
        del policy
        return (
            numpy_kernel.project(x, parameters.w_q, parameters.b_q),
            numpy_kernel.project(context, parameters.w_k, parameters.b_k),
            numpy_kernel.project(context_v, parameters.w_v, parameters.b_v),
        )

    @staticmethod
    def attend(
        queries: Array, keys: Array, values: Array, /, *, band: Band, scale: float, need_weights: bool, **options: Any
    ) -> tuple[Array, None] | None:
        if need_weights:
            return None
        return numpy_kernel.attend(queries, keys, values, band=band, scale=scale, **options), None

    @staticmethod
    def mix(blended: Array, parameters: Any, policy: Policy, /) -> Array:
        del policy
        return numpy_kernel.mix(blended, parameters.w_o, parameters.b_o)


class MultiHeadAttention(Layer[Array]):
    """Multi-head attention, checked, in memory that grows with the sequence and not with its square.

    Each head has its own `w_q`, `w_k` and `w_v`, as in `attnspec.Parameters`, whose names are those of the parameters.

    Attributes:
        heads: the sizes.
        policy: the conventions.
        training: whether weights are dropped.
    """

    _kernel: ClassVar[Any] = _Kernel
    _framework: ClassVar[str] = "np"
    w_q: Array
    w_k: Array

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
        device: Literal["cpu"] | None = None,
        dtype: npt.DTypeLike | None = None,
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
            seed: which draw of the parameters, the same in every library, and of dropout; None for chance.
            device: where the parameters lie: NumPy has only `cpu`.
            dtype: the dtype of the parameters; None for float32.

        Raises:
            ConfigError: a setting is impossible, or two of them exclude each other.
        """
        if device not in {None, "cpu"}:
            raise ConfigError(f"MultiHeadAttention: device={device!r} must be 'cpu' with NumPy.")
        heads = Heads(d_model=d_model, h=h, h_kv=h_kv, d_k=d_k, d_v=d_v, d_key_in=d_key_in, d_value_in=d_value_in)
        policy = settle(policy, rope=rope, window=window, qk_norm=qk_norm)
        seed = int(np.random.default_rng().integers(2**62)) if seed is None else seed
        drawn = vars(Parameters.random(heads, seed=seed, bias=False))
        arrays = {
            name: np.full(shape, 1.0 if name.startswith("gain") else 0.0) if drawn[name] is None else drawn[name]
            for name, shape in shapes_of_new(heads, policy, bias=bias).items()
        }
        self._own(arrays, heads, policy, dropout, seed=seed, dtype=np.dtype(np.float32 if dtype is None else dtype))

    def _own(self, arrays: dict[str, Any], heads: Heads, policy: Policy, dropout: float, *, seed: int | None, dtype: Any) -> None:
        self.training = True
        self._settle(heads, policy, dropout, np.random.default_rng(seed), arrays)
        for name in NAMES:
            array = arrays.get(name)
            setattr(self, name, None if array is None else np.array(array, dtype, order="C"))

    def _become(self, arrays: dict[str, Any], heads: Heads, policy: Policy, dropout: float) -> None:
        arrays = {name: array if isinstance(array, np.ndarray) else array.detach().cpu().numpy() for name, array in arrays.items()}
        self._own(arrays, heads, policy, dropout, seed=None, dtype=arrays["w_q"].dtype)

    def train(self, mode: bool = True) -> Self:  # noqa: FBT001, FBT002  # PyTorch's signature
        """Drop weights from now on, or no longer.

        Args:
            mode: whether to drop them.

        Returns:
            The layer itself.
        """
        self.training = mode
        return self

    def eval(self) -> Self:
        """Drop no weights from now on.

        Returns:
            The layer itself.
        """
        return self.train(mode=False)

    __call__ = Layer.forward

    def _view(self) -> Any:
        return SimpleNamespace(**{name: getattr(self, name) for name in NAMES})

    def _key(self, x: Any, parameters: Any) -> tuple[Any, ...]:
        return type(x), getattr(x, "shape", None), getattr(x, "dtype", None), getattr(x, "device", None), parameters.w_q.dtype

    def _blank(self, shape: tuple[int, ...]) -> Array:
        return np.empty(shape, self.w_k.dtype)

    def _save(self, arrays: dict[str, Any], path: str | PathLike[str], metadata: dict[str, str]) -> None:
        from safetensors.numpy import save_file

        save_file(arrays, path, metadata)
