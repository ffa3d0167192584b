"""What is written on the command line: targets, calls, arguments and layouts as text."""

import ast
import builtins
import importlib
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from .options import NAMES
from .subject import SOURCES

_LIBRARIES = {name: name for name in ("torch", "numpy", "jax", "einops", "math")} | {"np": "numpy", "jnp": "jax.numpy"}
_SUBJECTS = ("m", "f")
_INPUTS = ("x", "queries", "keys", "values")


def target_of(text: str, /) -> Any:
    """Import what `module:attribute` stands for.

    Args:
        text: the name of a module, a colon, and a name in it, with dots where it lies deeper.

    Returns:
        The attribute.

    Raises:
        ConfigError: there is no such thing, or its module cannot be imported.
    """
    module, _, path = text.partition(":")
    if not module or not path:
        raise ConfigError(f"check: {text!r} is no target; write it as module:attribute, for example torch.nn:MultiheadAttention.")
    try:
        found = importlib.import_module(module)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"check: {module} cannot be imported: {type(error).__name__}: {error}") from error
    for name in path.split("."):
        try:
            found = getattr(found, name)
        except AttributeError as error:
            raise ConfigError(f"check: there is no {path} in {module}.") from error
    return found


def function_of(text: str, /) -> Callable[..., Any]:
    """Make a function of a call: `m(x, mask=keep)` is `lambda m, x, keep: m(x, mask=keep)`.

    Args:
        text: an expression in `m`, or `f`, and the names of inputs and options.

    Returns:
        The function; its first argument is the implementation.

    Raises:
        ConfigError: it is no expression, or nobody knows what a name in it stands for.
    """
    free = list(dict.fromkeys(_free_names(_parsed(text, "--call"))))
    first = next((name for name in _SUBJECTS if name in free), None)
    if first is None:
        raise ConfigError(f"check: --call {text!r} calls nothing; write the layer as m, for example 'm(x, mask=keep)'.")
    known = {**NAMES, **SOURCES}
    arguments = [name for name in free if name in known]
    if strange := [name for name in free if name not in {*known, *_LIBRARIES, *_SUBJECTS} and name not in vars(builtins)]:
        raise ConfigError(f"check: nobody knows what {strange[0]!r} stands for in --call; the names are {', '.join(sorted(known))}.")
    arguments.sort(key=lambda name: _INPUTS.index(known[name]) if known[name] in _INPUTS else len(_INPUTS))
    libraries = {name: importlib.import_module(_LIBRARIES[name]) for name in free if name in _LIBRARIES}
    made: Callable[..., Any] = eval(f"lambda {', '.join((first, *arguments))}: ({text})", libraries)  # noqa: S307  # it is the caller's own code
    return made


def _free_names(tree: ast.AST) -> Iterator[str]:
    bound = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    bound |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    return (node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id not in bound)


def _parsed(text: str, option: str) -> ast.expr:
    try:
        return ast.parse(text.strip(), mode="eval").body
    except SyntaxError as error:
        raise ConfigError(f"check: {option} {text!r} is no Python: {error.msg}.") from error


def arguments_of(text: str, /, *, option: str = "--args", makers: Mapping[str, Any] | None = None) -> tuple[list[Any], dict[str, Any]]:
    """Read the arguments of a call: `24, 4, batch_first=True`.

    Args:
        text: values, and values by name: what Python writes out, and names in a library such as `torch.float64`.
        option: where it was written, for the error.
        makers: what may be called in it.

    Returns:
        The arguments by position, and those by name.

    Raises:
        ConfigError: it is no list of arguments, or a value in it is none of those.
    """
    call = _parsed(f"f({text})", option)
    if not isinstance(call, ast.Call) or any(isinstance(node, ast.Starred) for node in call.args):
        raise ConfigError(f"check: {option} {text!r} is no list of arguments.")
    return _values(call, option, makers or {})


def _values(call: ast.Call, option: str, makers: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    positional = [_value(node, option, makers) for node in call.args]
    return positional, {str(keyword.arg): _value(keyword.value, option, makers) for keyword in call.keywords}


def _value(node: ast.expr, option: str, makers: Mapping[str, Any]) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        pass
    text = ast.unparse(node)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in makers:
        positional, named = _values(node, option, makers)
        return makers[node.func.id](*positional, **named)
    first, *path = text.split(".")
    if first in _LIBRARIES and path and all(name.isidentifier() for name in path):
        return target_of(f"{_LIBRARIES[first]}:{'.'.join(path)}")
    raise ConfigError(f"check: {option}: {text!r} is neither written out nor a name in a library, such as torch.float64.")


def named_arguments(text: str | Mapping[str, Any], /, *, option: str, makers: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Read arguments by name: `d_model=24, h=4`; a table is what it says.

    Args:
        text: the arguments, or a table of them.
        option: where it was written, for the error.
        makers: what may be called in it.

    Returns:
        The arguments by name.

    Raises:
        ConfigError: it is no such list.
    """
    if not isinstance(text, str):
        return dict(text)
    positional, named = arguments_of(text, option=option, makers=makers)
    if positional:
        raise ConfigError(f"check: {option} {text!r} needs a name before each value, for example d_model=24.")
    return named


def layout_of(said: str | Mapping[str, Any], /) -> str | dict[str, tuple[str, str]]:
    """Read a layout: a name, a TOML file, or a table.

    Args:
        said: the name of a layout; the path of a TOML file whose lines are like `w_q = ["q_proj.weight", "(h d_k) d_model"]`;
            or such a table.

    Returns:
        The name, or the lines.

    Raises:
        ConfigError: the file cannot be read, or a line is no pair of texts.
    """
    if isinstance(said, str) and not said.endswith(".toml"):
        return said
    table = _toml(Path(said)) if isinstance(said, str) else dict(said)
    for name, line in table.items():
        if not (isinstance(line, list) and len(line) == 2 and all(isinstance(part, str) for part in line)):
            raise ConfigError(f'check: the layout\'s line {name} must be like ["q_proj.weight", "(h d_k) d_model"], but is {line!r}.')
    return {name: (line[0], line[1]) for name, line in table.items()}


def _toml(path: Path) -> dict[str, Any]:
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"check: the layout {path} cannot be read: {error}") from error
    return dict(found.get("layout", found))
