"""How an implementation is asked: made out from what is said about it, from its class and from its signature."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from ..errors import ConfigError
from ..spec.parameters import Heads, Parameters
from ..spec.policy import Policy
from .design import NEUTRAL, TOKENS, Profile, draw
from .known import known
from .libraries import Library, guess_library, library_named
from .options import OPTIONS
from .problem import Crash
from .stores import Loader, cast, set_training, stored
from .subject import Signature, Subject, fits, read_signature

CORE_SIZES = ({"h": 3, "d_k": 10, "d_v": 13}, {"h": 4, "d_k": 6, "d_v": 9})
"""Sizes of heads where they are free: all different, and no width a power of two."""

GROUPED_SIZES = ({"h": 6, "h_kv": 2, "d_k": 10, "d_v": 13}, {"h": 4, "h_kv": 4, "d_k": 6, "d_v": 9})
"""The same where heads may share keys and values."""

WIDE = 97
"""The width of the stream of such heads, which attention alone never sees."""


def what_is_known(layer: Any, said: Mapping[str, Any], /) -> dict[str, Any]:
    """Put together what is said about a layer and what its class says.

    Args:
        layer: the layer.
        said: what is said, by the names of arguments; None for what is not.

    Returns:
        What is known; where it is said how to call it, nothing about calls comes from the class.
    """
    given = {name: value for name, value in said.items() if value is not None}
    found = known(layer)
    if found is None:
        return given
    if "call" not in given:
        return {"mask_axes": "batch h seq_q seq_k", **found, **given}
    return {name: value for name, value in found.items() if name in ("heads", "layout", "policy", "library", "causal")} | given


def layer_of(owner: str, layer: Any, said: Mapping[str, Any], /, *, options: Sequence[str] | None) -> tuple[Subject, Profile]:
    """Make out how a layer is asked, whose parameters are put in.

    Args:
        owner: who asks, for errors.
        layer: the layer.
        said: what is known about it.
        options: the options that it takes; None for those that the call has arguments for.

    Returns:
        The subject, and what can be asked of it.

    Raises:
        ConfigError: its sizes or what its tensors hold are not known.
    """
    if missing := [name for name in ("heads", "layout") if said.get(name) is None]:
        kind = type(layer).__name__
        raise ConfigError(
            f"{owner}: a {kind} is not known; say its {' and '.join(missing)}, or use check_properties, which needs no layout."
        )
    subject = subject_of(owner, layer, said, heads_first=False, axes="batch seq_q seq_k")
    sources, heads = said.get("sources") or count_sources(subject), said["heads"]
    subject.target = built(subject, heads, sources)
    lines, extra = _with_biases(subject.target, said["layout"])
    loader = Loader(subject.target, heads, lines, subject.library)
    loader.extra, subject.load = extra, loader
    profile = Profile(
        policy=said.get("policy") or Policy(), options=options_of(owner, subject, options), causal=bool(said.get("causal")),
        template=loader.template, tokens=said.get("tokens") or tokens_of(heads, sources), sources=sources, draws=draws_of(subject),
        fixed=loader.fixed,
    )  # fmt: skip
    return subject, with_masks(subject, profile)


def tokens_of(heads: Heads, sources: int, /) -> tuple[str, ...]:
    """In which ways queries and keys of a layer may differ in number: as its inputs allow."""
    if sources == 1:
        return ("self",)
    return TOKENS if heads.d_model == heads.d_key_in == heads.d_value_in else tuple(word for word in TOKENS if word != "self")


def count_sources(subject: Subject, /) -> int:
    """Count the different inputs that it takes."""
    return len({"queries" if role == "x" else role for role in subject.signature.roles} & {"queries", "keys", "values"})


def _with_biases(target: Any, layout: Any) -> tuple[Any, dict[str, Any]]:
    """Leave biases that the layout does not mention to be drawn: if they have influence, they should not be there."""
    if isinstance(layout, str) or not isinstance(layout, Mapping):
        return layout, {}
    mentioned, tensors = {_dotted(line[0]) for line in layout.values()}, stored(target)
    extra = {name: array for name, array in tensors.items() if array.ndim == 1 and _is_bias(name) and _dotted(name) not in mentioned}
    if not extra or any("*" in name for name in mentioned) or not mentioned & set(map(_dotted, tensors)):
        return layout, {}
    rng = np.random.default_rng(1)
    left = {f"unmentioned_{index}": (name, None) for index, name in enumerate(extra)}
    return {**layout, **left}, {name: rng.normal(size=array.shape) for name, array in extra.items()}


def _dotted(name: str) -> str:
    return name.replace("/", ".")


def _is_bias(name: str) -> bool:
    return _dotted(name).rpartition(".")[2] in ("bias", "b")


def built(subject: Subject, heads: Heads, sources: int, /) -> Any:
    """Call a layer once, so that tensors that are made in the first call are there.

    Args:
        subject: how it is asked.
        heads: its sizes.
        sources: how many different inputs it takes.

    Returns:
        The layer; as it was if it cannot be called like that, which is found out later.
    """
    profile = Profile(template=Parameters.random(heads), sources=sources, tokens=("self",) if sources == 1 else ("square",))
    for precision, always in product(("float64", "float32"), ((), always_of(subject))):
        problem = draw(replace(profile, always=always), {"tokens": profile.tokens[0]}, seed=0)
        target = subject.in_precision(subject.target, precision)
        try:
            with subject.library.working(watched=False):
                subject.call(target, **subject.arguments(problem, precision))
        except Exception:  # noqa: S112  # a layer that needs no first call need not stand it
            continue
        return target
    return subject.target


def always_of(subject: Subject, /) -> tuple[str, ...]:
    """The masks that an implementation might be unable to do without."""
    fitting = any(fits(np.empty((2, 1, 2, 2)), pattern) for pattern in subject.mask_axes)
    return tuple(name for name in NEUTRAL if name in subject.signature.roles and (name != "keep" or fitting))


def subject_of(owner: str, target: Any, said: Mapping[str, Any], /, *, heads_first: bool, axes: str) -> Subject:
    """Make out how an implementation is called.

    Args:
        owner: who asks, for errors.
        target: the implementation.
        said: what is known about it.
        heads_first: whether queries, keys and values come first, whatever they are called.
        axes: the axes of its mask, where they are not said.

    Returns:
        The subject.

    Raises:
        ConfigError: it is not said what an argument stands for, or how a mask is meant.
    """
    mask: Any
    call, mask, patterns = said.get("call"), said.get("mask") or "keep", said.get("mask_axes") or axes
    if mask not in (kinds := ("keep", "drop", "additive", "lengths", "none")):
        raise ConfigError(f"{owner}: mask={mask!r} is not known; a mask is meant as {', '.join(kinds)}.")
    if (order := said.get("order") or "bhsd") not in ("bhsd", "bshd"):
        raise ConfigError(f"{owner}: order={order!r} is not known; it is bhsd or bshd.")
    signature = _signature(owner, target, call, heads_first=heads_first)
    if mask == "lengths":
        places = tuple((name, "lengths" if role == "keep" else role) for name, role in signature.places)
        signature = replace(signature, places=places)
    shelf = _library(target, call, said.get("library"))
    return Subject(
        name=name_of(target), target=target, call=call or _call_itself, signature=signature, library=shelf,
        order=order, mask=mask, mask_axes=(patterns,) if isinstance(patterns, str) else tuple(patterns),
        in_precision=partial(_in_precision, library=shelf), training=set_training,
    )  # fmt: skip


def name_of(target: Any, /) -> str:
    """Say what an implementation is called."""
    return str(getattr(target, "__name__", type(target).__name__))


def _library(target: Any, call: Callable[..., Any] | None, said: Any) -> Library:
    if said is not None:
        return library_named(said) if isinstance(said, str) else said
    found = guess_library(target)
    return found if found.name != "numpy" or call is None else guess_library(call)


def _call_itself(target: Any, /, **arguments: Any) -> Any:
    return target(**arguments)


def _in_precision(target: Any, precision: str, *, library: Library) -> Any:
    return target if inspect.isroutine(target) or isinstance(target, partial) else cast(target, precision, library)


def _signature(owner: str, target: Any, call: Callable[..., Any] | None, *, heads_first: bool) -> Signature:
    if call is not None:
        return read_signature(call, subject_first=True, heads_first=heads_first, explicit=True, owner=owner)
    function = getattr(target, "forward", target)
    return read_signature(function, subject_first=False, heads_first=heads_first, explicit=False, owner=owner)


def options_of(owner: str, subject: Subject, options: Sequence[str] | None, /) -> tuple[str, ...]:
    """Make out which options it takes.

    Args:
        owner: who asks, for errors.
        subject: the implementation.
        options: those that are said; None for all that the call has arguments for.

    Returns:
        Their names.

    Raises:
        ConfigError: one is not known, or the call has no argument for it.
    """
    has = [name for name in OPTIONS if name in subject.signature.roles]
    if subject.mask == "none":
        has = [name for name in has if name not in ("keep", "padding", "lengths")]
    if options is not None:
        if strange := [name for name in options if name not in (*OPTIONS, "grouped")]:
            raise ConfigError(f"{owner}: options={strange} are not known; the options are {', '.join(OPTIONS)} and grouped.")
        if missing := [name for name in options if name in OPTIONS and name not in has]:
            raise ConfigError(f"{owner}: options={missing} have no argument; pass them on with call=.")
        has = [name for name in has if name in options]
    return tuple(name for name in has if name != "survivors" or "dropout" in subject.signature.roles)


_MASK_DRAWS = {
    "drawn": ("batch", "h", "seq_q"), "shared by the heads": ("batch", "seq_q"), "shared by the queries": ("batch",),
    "shared by the samples": ("seq_q",), "all kept": ("batch", "seq_q"), "with an empty row": ("batch", "seq_q"),
}  # fmt: skip
"""The axes that each way to draw a mask has, besides that of the keys."""


def draws_of(subject: Subject, /) -> dict[str, tuple[str, ...]]:
    """Leave out masks that have axes which the implementation does not take."""

    def example(axes: tuple[str, ...]) -> Any:
        return np.empty(tuple(2 if axis in axes else 1 for axis in ("batch", "h", "seq_q", "seq_k")))

    fitting = [word for word, axes in _MASK_DRAWS.items() if any(fits(example(axes), pattern) for pattern in subject.mask_axes)]
    return {"keep": tuple(fitting)}


def with_masks(subject: Subject, profile: Profile, /) -> Profile:
    """Find out whether an implementation can do without masks; if not, have one drawn that drops nothing wherever none is asked for."""
    masked = replace(profile, always=always_of(subject))

    def answers(asked: Profile) -> bool:
        drawn = (draw(asked, {"tokens": tokens}, seed=0) for tokens in asked.tokens)
        return any(not isinstance(subject.answer(problem), Crash) for problem in drawn)

    return masked if masked.always and not answers(profile) and answers(masked) else profile


def is_grouped(subject: Subject, options: Sequence[str] | None, /) -> bool:
    """Tell whether keys and values may have fewer heads than queries."""
    return "grouped" in (options or ()) or bool({"h_kv", "enable_gqa", "grouped"} & set(subject.signature.roles))


def core_heads(subject: Subject, heads: Heads | None, policy: Policy, /, *, grouped: bool) -> tuple[Heads, ...]:
    """Choose sizes of heads for attention alone: as different from each other as the function allows.

    Args:
        subject: the implementation.
        heads: the sizes that are said; None for any.
        policy: the conventions that it keeps to.
        grouped: whether keys and values may have fewer heads.

    Returns:
        Sizes to use one after the other.
    """
    if heads is not None:
        return (heads,)
    wanted = tuple(Heads(d_model=WIDE, **sizes) for sizes in (GROUPED_SIZES if grouped else CORE_SIZES))
    unequal = Profile(policy=policy, heads=wanted, tokens=("square",))
    answers = [subject.answer(draw(replace(unequal, always=a), {"tokens": "square"}, seed=0)) for a in ((), always_of(subject))]
    answer = next((answer for answer in answers if not isinstance(answer, Crash)), answers[0])
    if not isinstance(answer, Crash) and answer.y.shape[-1] == wanted[0].d_v:
        return wanted
    return tuple(Heads(d_model=WIDE, h=size.h, h_kv=size.h_kv, d_k=size.d_k) for size in wanted)
