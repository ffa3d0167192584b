"""What is called: one function for each way in which attention is implemented."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

from ..errors import ConfigError
from ..spec.parameters import Heads, Parameters
from ..spec.policy import Policy
from .asking import (
    built,
    core_heads,
    count_sources,
    draws_of,
    is_grouped,
    layer_of,
    options_of,
    subject_of,
    tokens_of,
    what_is_known,
    with_masks,
)
from .caching import examine_decoder
from .decoder import Decoder
from .design import TOKENS, Profile
from .examination import Effort, Examination, Progress
from .gradients import check_gradients
from .libraries import guess_library
from .report import Report
from .run import examine, examine_properties
from .subject import MaskKind, Order


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

    It is examined in this process. What may crash, hang or take too much memory is better named than handed over, so that a
    process of its own can import it, with limits: `run_isolated(Job("module:attribute", arguments="24, 4"), seconds=60)`, or
    `attnspec check`.

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
    subject, profile = layer_of("check", layer, what_is_known(layer, {**said, "causal": causal or None}), options=options)
    examination = Examination(subject, profile, effort=effort, seed=seed, progress=progress, strict=strict)
    return examine(examination, gradients=_gradients)


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
    subject = subject_of("check_attention", function, said, heads_first=True, axes="batch h seq_q seq_k")
    policy = policy or Policy()
    profile = Profile(
        policy=policy, options=options_of("check_attention", subject, options), causal=causal, draws=draws_of(subject),
        heads=core_heads(subject, heads, policy, grouped=is_grouped(subject, options)), tokens=TOKENS[:-1],
    )  # fmt: skip
    profile = with_masks(subject, profile)
    examination = Examination(subject, profile, effort=effort, seed=seed, progress=progress, strict=strict)
    return examine(examination, gradients=_gradients)


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
    found = what_is_known(layer, {**said, "causal": causal or None})
    sizes = found.get("heads") or (Heads(d_model=d_model, h=1) if d_model is not None else None)
    if sizes is None:
        raise ConfigError(f"check_properties: a {type(layer).__name__} is not known; say how wide its input is, with d_model= or heads=.")
    subject = subject_of("check_properties", layer, found, heads_first=False, axes="batch seq_q seq_k")
    sources = found.get("sources") or count_sources(subject)
    subject.target = built(subject, sizes, sources)
    profile = Profile(
        policy=found.get("policy") or Policy(), options=options_of("check_properties", subject, options), causal=bool(found.get("causal")),
        template=Parameters.random(sizes, bias=False), tokens=found.get("tokens") or tokens_of(sizes, sources), sources=sources,
        draws=draws_of(subject),
    )  # fmt: skip
    return examine_properties(Examination(subject, with_masks(subject, profile), seed=seed, progress=progress, strict=strict))


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
    subject = subject_of("check_cache", step, said, heads_first=True, axes="batch h seq_q seq_k")
    policy = policy or Policy()
    allowed = tuple(name for name in options_of("check_cache", subject, options) if name in ("keep", "padding", "bias", "scale"))
    fresh = replace(subject, target=make_decoder, call=lambda make, **arguments: subject.call(make(), **arguments))
    profile = Profile(
        policy=policy, options=allowed, causal=True, tokens=("square",), draws=draws_of(subject),
        heads=core_heads(fresh, heads, policy, grouped=is_grouped(subject, options)),
    )  # fmt: skip
    subject.name = getattr(make_decoder, "__name__", type(step).__name__)
    return examine_decoder(
        Examination(subject, with_masks(fresh, profile), effort=effort, seed=seed, progress=progress), Decoder(subject, make_decoder)
    )


def _gradients(examination: Examination) -> list[Any]:
    found = check_gradients(examination.subject, examination.profile, seed=examination.seed, rounding=examination.rounding)
    absent = [outcome for outcome in found if "NotImplementedError" in outcome.sentence]  # said to be missing, so not wrong
    return [replace(outcome, passed=None, level="note") if outcome in absent else outcome for outcome in found]


def assert_conforms(target: Any, /, *, entry: str = "check", **settings: Any) -> None:
    """Raise an error unless an implementation conforms; for a test.

    Args:
        target: the implementation.
        entry: which function examines it: `check`, `check_attention`, `check_properties` or `check_cache`.
        **settings: what else that function takes.

    Raises:
        ConformanceError: it does not conform; the message is the report.
    """
    entries: dict[str, Callable[..., Report]] = {
        "check": check,
        "check_attention": check_attention,
        "check_properties": check_properties,
        "check_cache": check_cache,
    }
    if entry not in entries:
        raise ConfigError(f"assert_conforms: entry={entry!r} is not known; the entries are {', '.join(entries)}.")
    entries[entry](target, **settings).raise_if_wrong()
