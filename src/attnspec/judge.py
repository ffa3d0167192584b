"""The judge of a call: jaxtyping and beartype decide; a refusal says who set what should have been."""

import functools
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxtyping import Shaped, jaxtyped

from . import slips
from .arrays import Outline, backend_of, dtype_name, is_autocast, library_of
from .axes import alternatives, is_array, is_optional, shape_of
from .errors import AttnspecError, BackendError, ConfigError, DtypeError, ShapeError
from .signature import Conflict, Entry, Signature, Sizes

_KINDS = {"Float": "floating-point", "Bool": "boolean", "Int": "whole numbers"}
DTYPES = {"Bool": "bool", "Int": "int64"}
"""The dtype of an outline, where its kind of number has just one."""


def judge(signature: Signature, arguments: Mapping[str, Any], run: Callable[[], Any], /, *, derive: bool) -> tuple[Any, bool]:
    """Run a function whose arguments fit its annotations, and see that its result fits too.

    Args:
        signature: what the annotations promise.
        arguments: the arguments by name.
        run: the function, or another in its place, with these arguments.
        derive: whether the result for outlines follows from the annotations; else the function runs on them.

    Returns:
        The result, and whether the next call of this signature may skip the judge.

    Raises:
        AttnspecError: what is wrong, and who set what it should be.
    """
    _require_given(signature, arguments)
    entries, settled = signature.entries(arguments), signature.settled(arguments)
    _agree(signature, entries)
    if any(isinstance(entry.value, Outline) for entry in entries):
        return _outline(signature, entries, settled, None if derive else run), False
    with jaxtyped("context"):
        _decide(signature, arguments, entries, settled)
        result = run()
        if is_array(hint := signature.hints.get("return")):
            require_array(signature.name, "its result", result)
            kept = _keep_dtype(result, entries) if shape_of(hint).kind == "Float" else result
            entry = signature.entry("its result", hint, kept)
            _agree(signature, [*entries, entry])
            _decide_arrays(signature, [*entries, entry], settled, [entry])
            return kept, kept is result and not is_autocast(result)
    return result, True


def _require_given(signature: Signature, arguments: Mapping[str, Any]) -> None:
    """Refuse None for what cannot be left out, and what is neither an array nor such an object."""
    for name, hint in signature.hints.items():
        if name not in arguments or name in signature.options or (arguments[name] is None and is_optional(hint)):
            continue
        value, kinds = arguments[name], [typing.get_origin(kind) or kind for kind in alternatives(hint)]
        if all(map(is_array, kinds)):
            require_array(signature.name, name, value)
        elif not any(_is_array_like(value) if is_array(kind) else isinstance(value, kind) for kind in kinds):
            raise ConfigError(f"{signature.name}: {name}={value!r} must be {_readable(hint)}.")


def _decide(signature: Signature, arguments: Mapping[str, Any], entries: Sequence[Entry], settled: Sizes) -> None:
    from beartype import BeartypeConf  # loaded at first use
    from beartype.door import is_bearable

    tower = BeartypeConf(is_pep484_tower=True)  # a whole number is a number too
    for name, hint in signature.options.items():
        if name in arguments and not is_bearable(arguments[name], hint, conf=tower):
            msg = f"{signature.name}: {name}={arguments[name]!r} must be {_readable(hint)}."
            raise ConfigError(msg)
    for axis, (size, _) in settled.items():
        is_bearable(Outline((size,)), _one_axis(axis))  # binds the axis for the arrays that follow
    _decide_arrays(signature, entries, settled, entries)


@functools.cache
def _one_axis(name: str) -> Any:
    return Shaped[Any, f" {name}"]


@functools.cache
def _any_shape(kind: Any) -> Any:
    return kind[Any, "..."]


def _decide_arrays(signature: Signature, entries: Sequence[Entry], settled: Sizes, judged: Sequence[Entry]) -> None:
    from beartype.door import is_bearable

    for entry in judged:
        if not is_bearable(entry.value, entry.hint):
            raise _refusal(signature, entries, settled, entry)


def _refusal(signature: Signature, entries: Sequence[Entry], settled: Sizes, refused: Entry) -> AttnspecError:
    try:
        signature.bind(entries, settled)
    except Conflict as conflict:
        return ShapeError(f"{signature.name}: {conflict}.{slips.guess(signature, entries, settled, conflict)}")
    return ShapeError(f"{signature.name}: {refused} is not ({refused.shape}).")


def _outline(signature: Signature, entries: Sequence[Entry], settled: Sizes, run: Callable[[], Any] | None) -> Any:
    """Judge a call on outlines, whose sizes may be symbols, without jaxtyping."""
    try:
        sizes = signature.bind(entries, settled)
        hint = signature.hints.get("return")
        if run is None:
            shape = signature.entry("its result", hint, None).shape
            dtype = DTYPES.get(shape.kind) or next(entry.value.dtype for entry in entries if entry.shape.kind == shape.kind)
            return Outline(tuple((signature.size(axis, sizes) or (1, ""))[0] for axis in shape.axes), dtype)
        result = run()
        if is_array(hint):
            signature.bind([signature.entry("its result", hint, result)], sizes)
    except Conflict as conflict:
        raise ShapeError(f"{signature.name}: {conflict}.") from None
    return result


def _agree(signature: Signature, entries: Sequence[Entry]) -> None:
    """Refuse what is no array, and a mixture of libraries, devices or floating-point dtypes."""
    floating = next((entry for entry in entries if entry.shape.kind == "Float"), None)
    for entry in entries:
        require_array(signature.name, entry.label, entry.value)
        if clash := _clash(entry, entries[0], "from", library_of) or _clash(entry, entries[0], "on", _device_of):
            raise BackendError(f"{signature.name}: {clash}.")
        if not isinstance(entry.value, _any_shape(entry.hint.dtype)):
            msg = f"{entry.label} is {dtype_name(entry.value)}, but must be {_KINDS.get(entry.shape.kind, entry.shape.kind)}"
            raise DtypeError(f"{signature.name}: {msg}{slips.guess_kind(entry)}")
        if (
            floating
            and entry.shape.kind == "Float"
            and not is_autocast(entry.value)
            and (clash := _clash(entry, floating, "of dtype", dtype_name))
        ):
            raise DtypeError(f"{signature.name}: {clash}.")


def require_array(owner: str, label: str, value: Any, /) -> None:
    """Refuse what is no array.

    Args:
        owner: who asks for it.
        label: what it is called.
        value: what was given.

    Raises:
        BackendError: it has no shape or no dtype.
    """
    if not _is_array_like(value):
        got = "None" if value is None else f"a {type(value).__name__}"
        msg = f"{label} is {got}, but must be an array (of NumPy, PyTorch or another array-API library)"
        raise BackendError(f"{owner}: {msg}.")


def _is_array_like(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


def _clash(entry: Entry, first: Entry, link: str, trait: Callable[[Any], object]) -> str:
    got, wanted = trait(entry.value), trait(first.value)
    if got == wanted or None in (got, wanted):  # None: not known, as the device of an array that JAX traces
        return ""
    return f"{entry.label} is {link} {got}, but {first.label} is {link} {wanted}; one call takes one"


def _device_of(x: Any) -> object:
    return None if isinstance(x, Outline) else backend_of(x).device(x)


def _keep_dtype(result: Any, entries: Sequence[Entry]) -> Any:
    """Undo the promotion of NumPy's bfloat16 (of ml_dtypes), which becomes float32 in a product or beside a number."""
    narrow = next((e.value for e in entries if library_of(e.value) == "numpy" and dtype_name(e.value) == "bfloat16"), None)
    return result if narrow is None else result.astype(narrow.dtype, copy=False)


def _readable(hint: Any) -> str:
    words: list[str] = []
    for member in alternatives(hint):
        origin = typing.get_origin(member)
        if origin is typing.Literal:
            words += map(repr, typing.get_args(member))
        else:
            words.append(f"an array ({shape_of(member)})" if is_array(member) else (origin or member).__name__)
    return " or ".join([*words, *["None"] * is_optional(hint)])
