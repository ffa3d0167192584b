"""What is called: one function for each way in which attention is implemented."""

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from ..errors import ConfigError
from ..layouts import LAYOUTS
from ..spec.parameters import Heads, Parameters
from ..spec.policy import Policy
from .caching import examine_decoder
from .decoder import Decoder
from .design import TOKENS, Profile, draw
from .gradients import check_gradients
from .known import known
from .libraries import Library, guess_library, library_named
from .options import OPTIONS
from .problem import Crash
from .report import Report
from .run import Effort, Examination, Progress, examine, examine_properties
from .stores import Loader, cast, set_stored, set_training, stored
from .subject import MaskKind, Order, Signature, Subject, read_signature

CORE_SIZES = ({"h": 3, "d_k": 10, "d_v": 13}, {"h": 4, "d_k": 6, "d_v": 9})
"""Sizes of heads where they are free: all different, and none a power of two or divided by another."""


def check(
    layer: Any,
    /,
    *,
    heads: Heads | None = None,
    call: Callable[..., Any] | None = None,
    mask: MaskKind | None = None,
    mask_axes: str | Sequence[str] | None = None,
    causal: bool = False,
    layout: Any = None,
    policy: Policy | None = None,
    options: Sequence[str] | None = None,
    library: str | None = None,
    strict: Collection[str] = (),
    effort: Effort = "default",
    seed: int = 0,
    progress: Progress | None = None,
) -> Report:
    """Tell whether a layer is multi-head attention, and if not, what is wrong with it.

    Its parameters are drawn anew and put in; nothing is said about the numbers that it came with.

    Args:
        layer: the layer: a module, or any object that holds its parameters.
        heads: its sizes; None for those of a known class.
        call: how to call it: a function of the layer and of what it is given, by the names of inputs (`x`, or `q`, `k`
            and `v`) and of options; None to call the layer itself, by the names of its arguments.
        mask: how its mask is meant; None for `keep`, where True means that the query may attend to the key.
        mask_axes: the axes of its mask, of batch, h, seq_q and seq_k; several patterns where it takes several.
        causal: whether it is always causal.
        layout: which of its tensors holds which parameters: the name of a layout, or lines of one's own.
        policy: the conventions that it keeps to; None for the default ones.
        options: the options that it takes; None for those that the call has arguments for.
        library: whose arrays it takes; None to find out.
        strict: names of properties that make the verdict, where they would only be a warning, since implementations differ.
        effort: how many problems to put.
        seed: what they are drawn from.
        progress: is told what is being done, how much of it is done, and how much there is.

    Returns:
        The report.

    Raises:
        ConfigError: it is not said how to call it, or what its tensors hold.
        ShapeError: a tensor does not have the size that the layout demands.
    """
    said = {"heads": heads, "call": call, "mask": mask, "mask_axes": mask_axes, "layout": layout, "policy": policy, "library": library}
    found = (known(layer) or {}) | {name: value for name, value in said.items() if value is not None}
    examination = _layer_examination("check", layer, found, causal=causal or bool(found.get("causal")), options=options)
    examination = replace(examination, effort=effort, seed=seed, progress=progress, strict=strict)
    return examine(examination, gradients=_gradients)


def _layer_examination(owner: str, layer: Any, said: Mapping[str, Any], *, causal: bool, options: Sequence[str] | None) -> Examination:
    missing = [name for name in ("heads", "layout") if said.get(name) is None]
    if missing:
        raise ConfigError(
            f"{owner}: a {type(layer).__name__} is not known; say its {' and '.join(missing)}, or use check_properties, which needs no layout."
        )
    subject = _subject(owner, layer, said, heads_first=False, default_axes="batch seq_q seq_k")
    sources = said.get("sources") or _sources(subject)
    subject.target = _built(subject, said["heads"], sources)
    lines, extra = _with_biases(subject.target, said["layout"])
    loader = Loader(subject.target, said["heads"], lines, subject.library)
    subject.load = partial(_load, loader=loader, extra=extra, library=subject.library)
    sizes = said["heads"]
    alike = sizes.d_model == sizes.d_key_in == sizes.d_value_in
    tokens = said.get("tokens") or (("self",) if sources == 1 else TOKENS if alike else TOKENS[:-1])
    profile = Profile(
        policy=said.get("policy") or Policy(), options=_options(owner, subject, options), causal=causal, template=loader.template,
        tokens=tokens, sources=sources, draws=_draws(subject), fixed=loader.fixed,
    )  # fmt: skip
    return Examination(subject, profile)


def _with_biases(target: Any, layout: Any) -> tuple[Any, dict[str, Any]]:
    """Leave biases that the layout does not mention to be drawn: if they have influence, they should not be there."""
    lines = LAYOUTS.get(layout, layout) if isinstance(layout, str) else layout
    if not isinstance(lines, Mapping):
        return layout, {}
    mentioned = {str(line[0]).replace("/", ".") for line in lines.values()}
    tensors = stored(target)
    extra = {n: a for n, a in tensors.items() if a.ndim == 1 and _is_bias(n) and n.replace("/", ".") not in mentioned}
    if isinstance(layout, str) or not extra or not mentioned & {name.replace("/", ".") for name in tensors}:
        return layout, {}
    rng = np.random.default_rng(1)
    left = {f"unmentioned_{index}": (name, None) for index, name in enumerate(extra)}
    return {**lines, **left}, {name: rng.normal(size=array.shape) for name, array in extra.items()}


def _is_bias(name: str) -> bool:
    return name.rpartition(".")[2] in ("bias", "b") or name.rpartition("/")[2] in ("bias", "b")


def _load(target: Any, parameters: Any, precision: str, *, loader: Loader, extra: Mapping[str, Any], library: Library) -> Any:
    loaded = loader(target, parameters, precision)
    return set_stored(loaded, extra, library, precision) if extra else loaded


def _role(role: str) -> str:
    return "queries" if role == "x" else role


def _built(subject: Subject, heads: Heads, sources: int) -> Any:
    """Call a layer once, so that tensors that are made in the first call are there."""
    profile = Profile(heads=(heads,), tokens=("self",) if sources == 1 else ("square",))
    problem = draw(profile, {"tokens": profile.tokens[0]}, seed=0)
    x = problem.queries[:, 0, :, :1].repeat(heads.d_model, -1)
    keys = x[..., :1].repeat(heads.d_key_in, -1)
    values = x[..., :1].repeat(heads.d_value_in, -1)
    first = replace(problem, queries=x, keys=x if sources == 1 else keys, values=x if sources == 1 else values, policy=Policy())
    for precision in ("float64", "float32"):
        target = subject.target
        try:
            with subject.library.working():
                target = subject.in_precision(target, precision)
                subject.call(target, **subject.arguments(_Shaped(first), precision))
                return target
        except Exception:  # noqa: BLE001, S112  # a layer that needs no first call need not stand it
            continue
    return subject.target


class _Shaped:
    """A problem of a layer whose parameters are not known yet."""

    def __init__(self, problem: Any) -> None:
        self.queries, self.keys, self.values, self.options = problem.queries, problem.keys, problem.values, problem.options
        self.is_layer, self.sizes, self.seed = True, {"h": 1, "h_kv": 1, "seq_q": 1}, 0


def _subject(owner: str, target: Any, said: Mapping[str, Any], *, heads_first: bool, default_axes: str) -> Subject:
    call, library = said.get("call"), said.get("library")
    shelf: Library = guess_library(target) if library is None else library_named(library)
    if call is None and library is None and shelf.name == "numpy":
        shelf = guess_library(target)
    if call is not None and library is None and shelf.name == "numpy":
        shelf = guess_library(call)
    signature = _signature(owner, target, call, heads_first=heads_first)
    axes = said.get("mask_axes") or default_axes
    mask = said.get("mask") or "keep"
    if mask == "lengths":
        signature = Signature(tuple((name, "lengths" if role == "keep" else role) for name, role in signature.places), signature.explicit)
    return Subject(
        name=getattr(target, "__name__", type(target).__name__), target=target, call=call or _call_itself, signature=signature, library=shelf,
        order=said.get("order") or "bhsd", mask=mask, mask_axes=(axes,) if isinstance(axes, str) else tuple(axes),
        in_precision=partial(_in_precision, library=shelf), training=set_training,
    )  # fmt: skip


def _call_itself(target: Any, /, **arguments: Any) -> Any:
    return target(**arguments)


def _in_precision(target: Any, precision: str, *, library: Library) -> Any:
    return target if inspect.isroutine(target) or isinstance(target, partial) else cast(target, precision, library)


def _signature(owner: str, target: Any, call: Callable[..., Any] | None, *, heads_first: bool) -> Signature:
    if call is not None:
        return read_signature(call, subject_first=True, heads_first=heads_first, explicit=True, owner=owner)
    function = getattr(target, "forward", target)
    return read_signature(function, subject_first=False, heads_first=heads_first, explicit=False, owner=owner)


def _options(owner: str, subject: Subject, options: Sequence[str] | None) -> tuple[str, ...]:
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


def _draws(subject: Subject) -> dict[str, tuple[str, ...]]:
    """The masks that have only axes that the implementation takes."""
    from .subject import fits

    found = {}
    for name in ("keep", "bias"):
        shapes = {"drawn": "batch h seq_q seq_k", "shared by the heads": "batch seq_q seq_k", "shared by the queries": "batch seq_k"}
        shapes |= {"shared by the samples": "seq_q seq_k", "all kept": "batch seq_q seq_k", "with an empty row": "batch seq_q seq_k"}
        if name == "keep":
            def example(axes: str) -> Any:
                return np.empty(tuple(2 if axis in axes.split() else 1 for axis in ("batch", "h", "seq_q", "seq_k")))

            found[name] = tuple(
                word for word, axes in shapes.items() if any(fits(example(axes), pattern) for pattern in subject.mask_axes)
            )
    return found


def check_attention(
    function: Callable[..., Any],
    /,
    *,
    order: Order = "bhsd",
    call: Callable[..., Any] | None = None,
    mask: MaskKind | None = None,
    mask_axes: str | Sequence[str] | None = None,
    causal: bool = False,
    policy: Policy | None = None,
    options: Sequence[str] | None = None,
    heads: Heads | None = None,
    library: str | None = None,
    strict: Collection[str] = (),
    effort: Effort = "default",
    seed: int = 0,
    progress: Progress | None = None,
) -> Report:
    """Tell whether a function is scaled dot-product attention in every head, and if not, what is wrong with it.

    Args:
        function: takes queries, keys and values, and options by name.
        order: the order of the axes of heads and tokens.
        call: how to call it: a function of the function and of what it is given, by the names of options; None to call it
            itself, by the names of its arguments.
        mask: how its mask is meant; None for `keep`, where True means that the query may attend to the key.
        mask_axes: the axes of its mask, of batch, h, seq_q and seq_k; several patterns where it takes several.
        causal: whether it is always causal.
        policy: the conventions that it keeps to; None for the default ones.
        options: the options that it takes; None for those that the call has arguments for. `grouped` says that keys and
            values may have fewer heads.
        heads: the sizes that it takes; None for any.
        library: whose arrays it takes; None to find out.
        strict: names of properties that make the verdict, where they would only be a warning, since implementations differ.
        effort: how many problems to put.
        seed: what they are drawn from.
        progress: is told what is being done, how much of it is done, and how much there is.

    Returns:
        The report.

    Raises:
        ConfigError: it is not said how to call it.
    """
    said = {"call": call, "mask": mask, "mask_axes": mask_axes, "library": library, "order": order}
    subject = _subject("check_attention", function, said, heads_first=True, default_axes="batch h seq_q seq_k")
    grouped = "grouped" in (options or ()) or bool({"h_kv", "enable_gqa", "grouped"} & set(subject.signature.roles))
    profile = Profile(
        policy=policy or Policy(), options=_options("check_attention", subject, options), causal=causal,
        heads=_core_heads(subject, heads, policy, grouped=grouped), draws=_draws(subject),
        tokens=tuple(tokens for tokens in TOKENS if tokens != "self"),
    )  # fmt: skip
    examination = Examination(subject, profile, effort=effort, seed=seed, progress=progress, strict=strict)
    return examine(examination, gradients=_gradients)


def _core_heads(subject: Subject, heads: Heads | None, policy: Policy | None, *, grouped: bool) -> tuple[Heads, ...]:
    """Choose sizes of heads: as different from each other as the function allows."""
    if heads is not None:
        return (heads,)
    wanted = []
    for index, sizes in enumerate(CORE_SIZES):
        for h_kv in dict.fromkeys((2 if grouped and not index else sizes["h"],)):
            h = {3: 6, 4: 4}[sizes["h"]] if grouped else sizes["h"]
            wanted.append(Heads(d_model=97, h=h, h_kv=h_kv, d_k=sizes["d_k"], d_v=sizes["d_v"]))
    plain = policy or Policy()
    unequal = Profile(policy=plain, heads=tuple(wanted), tokens=("square",))
    answer = subject.answer(draw(unequal, {"tokens": "square"}, seed=0))
    if not isinstance(answer, Crash) and answer.y.shape[-1] == wanted[0].d_v:
        return tuple(wanted)
    return tuple(Heads(d_model=97, h=size.h, h_kv=size.h_kv, d_k=size.d_k) for size in wanted)


def check_properties(
    layer: Any,
    /,
    *,
    heads: Heads | None = None,
    d_model: int | None = None,
    call: Callable[..., Any] | None = None,
    mask: MaskKind | None = None,
    mask_axes: str | Sequence[str] | None = None,
    causal: bool = False,
    policy: Policy | None = None,
    options: Sequence[str] | None = None,
    library: str | None = None,
    strict: Collection[str] = (),
    seed: int = 0,
    progress: Progress | None = None,
) -> Report:
    """Tell whether a layer keeps to what must hold for any weights; nothing need be known of what its tensors hold.

    Args:
        layer: the layer.
        heads: its sizes; None for `d_model` and what a known class says.
        d_model: the width of its input, where nothing else is known.
        call: how to call it; see `check`.
        mask: how its mask is meant; see `check`.
        mask_axes: the axes of its mask; see `check`.
        causal: whether it is always causal.
        policy: the conventions that it keeps to; None for the default ones.
        options: the options that it takes; None for those that the call has arguments for.
        library: whose arrays it takes; None to find out.
        strict: names of properties that make the verdict, where they would only be a warning, since implementations differ.
        seed: what the problems are drawn from.
        progress: is told what is being done, how much of it is done, and how much there is.

    Returns:
        The report; that it conforms means that no property fails, not that its values are right.

    Raises:
        ConfigError: it is not said how to call it, or how wide its input is.
    """
    said = {"heads": heads, "call": call, "mask": mask, "mask_axes": mask_axes, "policy": policy, "library": library}
    found = (known(layer) or {}) | {name: value for name, value in said.items() if value is not None}
    sizes = found.get("heads") or (Heads(d_model=d_model, h=1) if d_model is not None else None)
    if sizes is None:
        raise ConfigError(f"check_properties: a {type(layer).__name__} is not known; say how wide its input is, with d_model= or heads=.")
    subject = _subject("check_properties", layer, found, heads_first=False, default_axes="batch seq_q seq_k")
    sources = found.get("sources") or _sources(subject)
    subject.target = _built(subject, sizes, sources)
    template = Parameters.random(sizes, bias=False)
    alike = sizes.d_model == sizes.d_key_in == sizes.d_value_in
    profile = Profile(
        policy=found.get("policy") or Policy(), options=_options("check_properties", subject, options), causal=causal or bool(found.get("causal")),
        template=template, tokens=found.get("tokens") or (("self",) if sources == 1 else TOKENS if alike else TOKENS[:-1]), sources=sources,
        draws=_draws(subject),
    )  # fmt: skip
    return examine_properties(Examination(subject, profile, seed=seed, progress=progress, strict=strict))


def check_cache(
    make_decoder: Callable[[], Any],
    /,
    *,
    order: Order = "bhsd",
    call: Callable[..., Any] | None = None,
    mask: MaskKind | None = None,
    mask_axes: str | Sequence[str] | None = None,
    policy: Policy | None = None,
    options: Sequence[str] | None = None,
    heads: Heads | None = None,
    library: str | None = None,
    effort: Effort = "default",
    seed: int = 0,
    progress: Progress | None = None,
) -> Report:
    """Tell whether a decoder that keeps a cache gives what causal attention over all tokens so far does.

    Args:
        make_decoder: makes a fresh decoder: a function of the queries, keys and values of the new tokens, which is called
            again and again. If it has a method `reorder`, its sequences are picked anew by that.
        order: the order of the axes of heads and tokens.
        call: how to call it; see `check_attention`.
        mask: how its mask, over all tokens so far, is meant; see `check_attention`.
        mask_axes: the axes of its mask; see `check_attention`.
        policy: the conventions that it keeps to; with a rotation, it turns queries and keys by their position itself.
        options: the options that it takes; None for those that the call has arguments for.
        heads: the sizes that it takes; None for any.
        library: whose arrays it takes; None to find out.
        effort: how many problems to put.
        seed: what they are drawn from.
        progress: is told what is being done, how much of it is done, and how much there is.

    Returns:
        The report.

    Raises:
        ConfigError: it is not said how to call it.
    """
    step = make_decoder()
    said = {"call": call, "mask": mask, "mask_axes": mask_axes, "library": library or guess_library(step).name, "order": order}
    if said["library"] == "numpy" and library is None:
        said["library"] = guess_library(make_decoder).name
    subject = _subject("check_cache", step, said, heads_first=True, default_axes="batch h seq_q seq_k")
    grouped = "grouped" in (options or ()) or bool({"h_kv", "enable_gqa", "grouped"} & set(subject.signature.roles))
    allowed = tuple(name for name in _options("check_cache", subject, options) if name in ("keep", "padding", "bias", "scale"))
    decoder = Decoder(subject, make_decoder)
    fresh = replace(subject, target=make_decoder, call=lambda make, **arguments: subject.call(make(), **arguments))
    profile = Profile(
        policy=policy or Policy(), options=allowed, causal=True, tokens=("square",), draws=_draws(subject),
        heads=_core_heads(fresh, heads, policy, grouped=grouped),
    )  # fmt: skip
    subject.name = getattr(make_decoder, "__name__", type(step).__name__)
    return examine_decoder(Examination(subject, profile, effort=effort, seed=seed, progress=progress), decoder)


def _sources(subject: Subject) -> int:
    return len({"queries", "keys", "values"} & {_role(role) for role in subject.signature.roles})


def _gradients(examination: Examination) -> list[Any]:
    return check_gradients(examination.subject, examination.profile, seed=examination.seed)


def assert_conforms(target: Any, /, *, entry: str = "check", **settings: Any) -> None:
    """Raise an error unless an implementation conforms; for a test.

    Args:
        target: the implementation.
        entry: which function examines it: `check`, `check_attention`, `check_properties` or `check_cache`.
        **settings: what else that function takes.

    Raises:
        ConformanceError: it does not conform; the message is the report.
    """
    entries = {"check": check, "check_attention": check_attention, "check_properties": check_properties, "check_cache": check_cache}
    if entry not in entries:
        raise ConfigError(f"assert_conforms: entry={entry!r} is not known; the entries are {', '.join(entries)}.")
    entries[entry](target, **settings).raise_if_wrong()


