"""What the layers of both libraries share: settings, the call, its checks, hooks, and conversion."""

from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from functools import partial
from os import PathLike
from typing import Any, ClassVar, Generic, Literal, Self

from ..arrays import A
from ..axes import evaluate, shapes_of
from ..errors import ConfigError
from ..layouts import read, write
from ..layouts.table import Layout
from ..spec.attend import Dropout
from ..spec.cache import Cache
from ..spec.chain import STEPS, Found, Stages, compute
from ..spec.parameters import Heads, Parameters
from ..spec.policy import Norm, Policy, Rotation
from ..spec.positions import Positions
from ..spec.rules import Mask
from ..step import function_of, is_compiling, is_watched, key_of, substitute
from . import files
from .foreign import parameters_of
from .fused import OPEN, Kernel, attend, factor_of
from .growing import GrowingCache, kind_of
from .promises import CACHED, CROSS, SELF

NAMES = tuple(field.name for field in fields(Parameters))
DEFAULT = Policy()

_EXTRAS = {name for name in NAMES if not name.startswith(("w_", "b_"))}
_WHERE = ("context", "context_v", "offset", "positions")

Hook = Callable[[Any], Any]
"""What to do with the result of a step: nothing is returned, or what takes its place."""


def settle(policy: Policy, *, rope: Rotation | bool, window: tuple[int | None, int | None] | None, qk_norm: Norm | None) -> Policy:
    """Bring the layer's shorthands into its policy.

    Args:
        policy: the policy.
        rope: rotary positions.
        window: how many keys a query sees to the left and to the right.
        qk_norm: how queries and keys are normalised.

    Returns:
        The policy that says it all.

    Raises:
        ConfigError: a shorthand and the policy both say something.
    """
    rotation = Rotation() if rope is True else rope or None
    for option, field, value in (("rope", "rotation", rotation), ("window", "window", window), ("qk_norm", "normalise", qk_norm)):
        if value is None:
            continue
        if (said := getattr(policy, field)) != getattr(DEFAULT, field):
            raise ConfigError(f"MultiHeadAttention: {option}={value!r} and policy.{field}={said!r} both say the same thing; give one.")
        changed: dict[str, Any] = {field: value}
        policy = replace(policy, **changed)
    return policy


def shapes_of_new(heads: Heads, policy: Policy, *, bias: bool) -> dict[str, tuple[int, ...]]:
    """Work out the shape of each parameter that a new layer has.

    Args:
        heads: the sizes.
        policy: the conventions; gains belong to a normalisation.
        bias: whether there are biases.

    Returns:
        The shapes by name.
    """
    names = [name for name in NAMES if name.startswith("w_") or (bias and name.startswith("b_"))]
    names += ["gain_q", "gain_k"] if policy.normalise else []
    axes = {name: shape.axes for name, (shape,) in shapes_of(Parameters).items()}
    return {name: tuple(1 if axis.broadcast else evaluate(axis.text, vars(heads)) for axis in axes[name]) for name in names}


@dataclass(frozen=True)
class Handle:
    """A hook on a step, which can be taken off again."""

    layer: "Layer[Any]"
    step: str
    hook: Hook

    def remove(self) -> None:
        """Take the hook off."""
        hooks = self.layer._hooks_on_steps  # looked up now: torch.export puts back a copy
        hooks[self.step].remove(self.hook)
        if not hooks[self.step]:
            del hooks[self.step]


class _Assignable:
    """Stands before `Generic`, behind which Python refuses the assignment to `__class__` by which `fully_shard` works."""


class Layer(_Assignable, Generic[A]):
    """A layer of multi-head attention, whatever the library; see the classes of `attnspec.torch` and `attnspec.numpy`.

    Attributes:
        heads: the sizes.
        policy: the conventions.
        training: whether weights are dropped.
    """

    heads: Heads
    policy: Policy
    training: bool
    _kernel: ClassVar[Kernel]
    _framework: ClassVar[str]
    _hooks_on_steps: dict[str, list[Hook]]

    def _settle(self, heads: Heads, policy: Policy, dropout: float, generator: Any, present: Collection[str]) -> None:
        self.heads, self.policy, self._hooks_on_steps = heads, policy, {}
        self._sizes = tuple(vars(heads).values())
        self._dropout = Dropout(dropout, generator) if dropout else None
        self._scale = factor_of(policy, heads.d_k)
        fused = policy.product_precision is None
        self._stages = Stages(self._kernel.project, partial(attend, self._kernel.attend), self._kernel.mix) if fused else STEPS
        self._is_plain = replace(policy, scale=None, empty_row="zero") == DEFAULT and _EXTRAS.isdisjoint(present)

    @property
    def dropout(self) -> float:
        """The share of weights that is dropped in training."""
        return self._dropout.rate if self._dropout else 0.0

    # What differs between the libraries.

    def _view(self) -> Any:
        """The parameters as attributes of one object, unchecked."""
        raise NotImplementedError

    def _key(self, x: Any, parameters: Any) -> tuple[Any, ...]:
        """What the verdict on a call depends on, but for its options."""
        raise NotImplementedError

    def _blank(self, shape: tuple[int, ...]) -> A:
        """An array with room, of the dtype and on the device of the parameters."""
        raise NotImplementedError

    def _whole(self, options: dict[str, Any]) -> dict[str, Any]:
        """The options as the judge is to see them, with the arrays of all heads."""
        return options

    def _become(self, arrays: dict[str, Any], heads: Heads, policy: Policy, dropout: float) -> None:
        """Take over the settings, and copies of the parameters."""
        raise NotImplementedError

    @classmethod
    def from_parameters(cls, parameters: Parameters[Any], /, *, policy: Policy = DEFAULT, dropout: float = 0.0) -> Self:
        """Make a layer of parameters, which are copied.

        Args:
            parameters: the parameters, of NumPy or PyTorch.
            policy: the conventions.
            dropout: the share of weights that is dropped in training.

        Returns:
            The layer.
        """
        layer = cls.__new__(cls)
        given = {name: array for name, array in vars(parameters).items() if array is not None}
        layer._become(given, parameters.heads, policy, dropout)
        return layer

    @classmethod
    def load(cls, path: str | PathLike[str], /) -> Self:
        """Read a layer that was saved, by a layer of any library.

        Args:
            path: the file.

        Returns:
            The layer.

        Raises:
            ConfigError: it is no file of a layer.
        """
        parameters, policy, dropout = files.load(path, cls._framework)
        return cls.from_parameters(parameters, policy=policy, dropout=dropout)

    def save(self, path: str | PathLike[str], /) -> None:
        """Save the parameters and the settings in the format of safetensors, for a layer of any library.

        Args:
            path: the file.
        """
        view = self._view()
        arrays = {name: array for name in NAMES if (array := getattr(view, name)) is not None}
        self._save(arrays, path, files.describe(self.policy, self.dropout))

    def _save(self, arrays: dict[str, Any], path: str | PathLike[str], metadata: dict[str, str]) -> None:
        raise NotImplementedError

    @classmethod
    def from_layer(cls, layer: Any, /, *, policy: Policy = DEFAULT) -> Self:
        """Make a layer that computes what another one does.

        Args:
            layer: a layer of this package, of any library, or a `torch.nn.MultiheadAttention`; of the latter also its
                subclasses. Whatever its order of axes, the new layer takes the batch first.
            policy: the conventions, for a layer that does not have its own.

        Returns:
            The layer, with copies of the parameters.

        Raises:
            ConfigError: the class of the layer is not known.
        """
        if isinstance(layer, Layer):
            return cls.from_parameters(layer.to_parameters(), policy=layer.policy, dropout=layer.dropout)
        return cls.from_parameters(parameters_of(layer), policy=policy, dropout=layer.dropout)

    # What they share.

    def to_parameters(self) -> Parameters[A]:
        """Give the parameters as the specification takes them; they share memory with the layer.

        Returns:
            The parameters.
        """
        view = self._view()
        return Parameters(**{name: getattr(view, name) for name in NAMES})

    @classmethod
    def from_layout(
        cls, stored: Mapping[str, Any], layout: Layout | str, heads: Heads, /, *, policy: Policy = DEFAULT, dropout: float = 0.0
    ) -> Self:
        """Make a layer of the tensors that another project stores.

        Args:
            stored: the tensors by name.
            layout: how they are laid out; the name of a project in `attnspec.layouts.LAYOUTS`, or lines of one's own.
            heads: the sizes.
            policy: the conventions.
            dropout: the share of weights that is dropped in training.

        Returns:
            The layer.

        Raises:
            ShapeError: a tensor does not have the size that its pattern and the sizes demand.
            ConfigError: a weight is not stored, or the layout has no place for a tensor.
        """
        return cls.from_parameters(read(stored, layout, heads), policy=policy, dropout=dropout)

    def to_layout(self, layout: Layout | str, /) -> dict[str, A]:
        """Lay the parameters out as another project stores them.

        Args:
            layout: how they shall be laid out; the name of a project in `attnspec.layouts.LAYOUTS`, or lines of one's own.

        Returns:
            The tensors by name.

        Raises:
            ConfigError: the layout has no place for a parameter.
        """
        return write(self.to_parameters(), layout)

    def new_cache(self, *, batch: int = 1, room: int = 0) -> Cache[A]:
        """Make an empty cache for decoding.

        Args:
            batch: how many sequences there are.
            room: how many tokens are expected; when there are more, the room is doubled.

        Returns:
            The cache, to be given to the call, which returns the next one.
        """
        sizes = self.heads
        return GrowingCache.empty(self._blank((batch, sizes.h_kv, room, sizes.d_k)), self._blank((batch, sizes.h_kv, room, sizes.d_v)))

    def on(self, step: str, hook: Hook, /) -> Handle:
        """Call a function with the result of a step, whenever the layer runs; what it returns, if anything, takes its place.

        While there are hooks, the layer runs the steps of the specification one by one.

        Args:
            step: the name of the step: `softmax`, `blend`, ...
            hook: what to call.

        Returns:
            A handle, to `remove` the hook.

        Raises:
            ConfigError: there is no such step.
        """
        function_of(step, "on")
        self._hooks_on_steps.setdefault(step, []).append(hook)
        return Handle(self, step, hook)

    def forward(
        self,
        x: A,  # not positional-only, which torch.export cannot take
        *,
        context: A | None = None,
        context_v: A | None = None,
        keep: A | Mask | None = None,
        bias: A | None = None,
        causal: bool | None = None,
        offset: int | None = None,
        positions: Positions[A] | None = None,
        cache: Cache[A] | None = None,
        need: Literal["weights"] | None = None,
    ) -> Any:
        """Compute multi-head attention as `attnspec.multi_head_attention` does, or `attnspec.decode` with a cache.

        Args:
            x: the positions that ask, of several sequences or of one.
            context: the positions that can be looked at; None for `x` (self-attention).
            context_v: the positions whose content is blended; None for the context.
            keep: True where the query may attend to the key, an axis of size 1 stands for all; or a `Mask`. None keeps all.
            bias: what to add to the scaled scores; None for nothing.
            causal: whether a query sees only keys up to its own position; None for True with a cache, else False.
            offset: the position of the first query, where the first key is at 0; None for what the policy's anchor says.
            positions: where each query and key stands; None for one after the other, from the offset and from 0.
            cache: the tokens before, of `new_cache` or of the last call; None for no cache.
            need: `weights` to return the weights too.

        Returns:
            The output for each position of `x`. With `need="weights"` a tuple of the output and each head's weights before
            dropout. With a cache a tuple that ends in the next cache.

        Raises:
            AttnspecError: the arguments do not fit together, or do not fit the layer.
        """
        parameters: Any = self._view()
        options: dict[str, Any] = {}
        if not (context is context_v is keep is bias is offset is positions is cache is None):
            options = {
                "context": context, "context_v": context_v, "keep": keep, "bias": bias, "offset": offset, "positions": positions,
                "cache": cache,
            }  # fmt: skip
            options = {name: option for name, option in options.items() if option is not None}
        elif self._is_plain and not (self.training and self._dropout) and not is_compiling():
            known = (
                SELF.holds_for((self._sizes, *self._key(x, parameters), type(causal), causal, need))
                and not self._hooks_on_steps
                and not is_watched()
            )
            if known and (plain := self._plain(x, parameters, causal=causal is True, need_weights=need is not None)) is not None:
                return plain if need else plain[0]
        single = hasattr(x, "shape") and len(x.shape) == 2  # noqa: PLR2004  # one sequence
        if single:
            x, options = _batched(x, options)
        found = self._found(x, parameters, options, causal, need)
        answer: tuple[Any, ...] = (found.y,) if need is None else (found.y, found.weights)
        if single:
            answer = tuple(array[0] for array in answer)
        if cache is not None:
            return (*answer, found.cache)
        return answer if need else answer[0]

    def _plain(self, x: Any, parameters: Any, *, causal: bool, need_weights: bool) -> tuple[Any, Any] | None:
        """The chain where nothing is asked for that a kernel could not do by itself."""
        queries, keys, values = self._kernel.project(x, x, x, parameters, self.policy)
        found = self._kernel.attend(
            queries, keys, values, keep=None, bias=None, band=(None, 0) if causal else OPEN, scale=self._scale, dropout=None,
            need_weights=need_weights,
        )  # fmt: skip
        return None if found is None else (self._kernel.mix(found[0], parameters, self.policy), found[1])

    def _found(self, x: Any, parameters: Any, options: dict[str, Any], causal: bool | None, need: str | None) -> Found[Any]:  # noqa: FBT001
        """Run the chain, after the judge if the call is of a new signature."""
        run = partial(self._run, x, parameters, options, causal, need)
        if is_compiling():
            return run()
        promise = CACHED if "cache" in options else CROSS if "context" in options else SELF
        key = (self._sizes, *self._key(x, parameters), type(causal), causal, need, *(_options_key(options) if options else ()))
        if promise.holds_for(key):
            return run()
        found: list[Found[Any]] = []

        def once() -> Any:
            found.append(run())
            return found[0].y

        arguments = {"layer": self.heads, "parameters": Parameters(**vars(parameters)), "x": x, "causal": causal, "need": need}
        arguments |= self._whole(options)
        if "cache" not in options:
            arguments.setdefault("context", x)
            arguments.setdefault("context_v", arguments["context"])
        promise.judge(key, arguments, once)
        return found[0]

    def _run(self, x: Any, parameters: Any, options: dict[str, Any], causal: bool | None, need: str | None) -> Found[Any]:  # noqa: FBT001
        if (caching := "cache" in options) and (wrong := [name for name in _WHERE if name in options]):
            raise ConfigError(f"MultiHeadAttention: {wrong[0]} and cache exclude each other; the cache says which tokens came before.")
        with substitute(**self._substitutes()) if self._hooks_on_steps else nullcontext():
            return compute(
                x, parameters, self.policy, causal=caching if causal is None else causal, caching=caching,
                dropout=self._dropout if self.training else None, need_weights=need is not None,
                stages=STEPS if is_watched() else self._stages, **options,
            )  # fmt: skip

    def _substitutes(self) -> dict[str, Callable[..., Any]]:
        """The steps with hooks on them."""
        if is_compiling():
            raise ConfigError(f"on: hooks do not run under torch.compile; remove those on {', '.join(self._hooks_on_steps)}.")
        return {name: partial(_hooked, function_of(name, "on"), hooks) for name, hooks in self._hooks_on_steps.items()}


def _hooked(step: Callable[..., Any], hooks: list[Hook], /, *args: Any, **kwargs: Any) -> Any:
    result = step(*args, **kwargs)
    for hook in hooks:
        changed = hook(result)
        result = result if changed is None else changed
    return result


def _batched(x: Any, given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Make one sequence a batch of one."""
    sources = {name: given[name][None] for name in ("context", "context_v") if hasattr(given.get(name), "shape")}
    return x[None], given | sources


def _options_key(options: dict[str, Any]) -> tuple[Any, ...]:
    """What the verdict on the options depends on; not how many tokens are in the cache."""
    cache = options.get("cache")
    if not isinstance(cache, Cache):
        return key_of((), options)
    kind = cache.kind if isinstance(cache, GrowingCache) else kind_of(cache.keys, cache.values)
    if len(options) == 1:
        return kind
    rest = {name: option for name, option in options.items() if name != "cache"}
    for name in ("keep", "bias"):
        if (shape := getattr(rest.get(name), "shape", None)) is not None:
            rest[name] = (type(rest[name]), rest[name].dtype, shape[:-1], shape[-1] - cache.keys.shape[2])
    return (*kind, *key_of((), rest))
