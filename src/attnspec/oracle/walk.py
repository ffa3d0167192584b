"""Walk over the tensors of an implementation, whatever object it is: each by its dotted name."""

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from ..arrays import dtype_name

Change = Callable[[str, Any], Any]
"""What to do with a tensor: takes its name and itself, and returns the array that takes its place, or None."""

Parts = tuple[Iterable[tuple[str, Any]], Callable[[dict[str, Any]], Any]]
"""What an object is made of, by name; and what puts other parts in their place and returns the object or a new one."""

DEPTH = 12
"""How deep objects may lie in one another; what lies deeper is no parameter."""

_CLOSED = (str, bytes, int, float, complex, bool, type)


def is_of(x: Any, module: str, *names: str) -> bool:
    """Tell whether something is an instance of a class of a framework, which is not imported for that."""
    found: Any = sys.modules.get(module)
    for name in names:
        found = getattr(found, name, None)
    return found is not None and isinstance(x, found)


def is_torch(x: Any, /) -> bool:
    """Tell whether something is a module of PyTorch."""
    return is_of(x, "torch", "nn", "Module")


def is_keras(x: Any, /) -> bool:
    """Tell whether something is a layer of Keras, which is also a module of PyTorch where that is its backend."""
    return is_of(x, "keras", "Layer")


def is_flax(x: Any, /) -> bool:
    """Tell whether something is a module of Flax, of those that hold their parameters."""
    return is_of(x, "flax.nnx", "Module")


def is_variable(x: Any, /) -> bool:
    """Tell whether something is a variable of Flax or Keras, which stays where it is and is given a new value."""
    return is_of(x, "flax.nnx", "Variable") or is_of(x, "keras", "Variable")


def is_tensor(x: Any, /) -> bool:
    """Tell whether something is a floating-point tensor of any library."""
    known = is_variable(x) or any(is_of(x, *kind) for kind in (("numpy", "ndarray"), ("torch", "Tensor"), ("jax", "Array")))
    return known and "float" in dtype_name(x)


def _is_closed(node: Any, above: tuple[int, ...]) -> bool:
    """Tell whether there is nothing to be looked for in an object, or whether it was looked into already."""
    return isinstance(node, _CLOSED) or inspect.ismodule(node) or inspect.isroutine(node) or id(node) in above or len(above) > DEPTH


def walk(node: Any, change: Change, /, name: str = "", above: tuple[int, ...] = ()) -> Any:
    """Offer every tensor of an implementation for a change, under its name.

    Args:
        node: the implementation, or a part of it.
        change: what to do with each tensor.
        name: what the part is called.
        above: the objects that it lies in.

    Returns:
        The implementation: the same object, or a new one where what it is made of cannot be changed.
    """
    if is_tensor(node):
        new = change(name, node)
        return node if new is None else _put(node, new)
    if _is_closed(node, above):
        return node
    parts, rebuild = parts_of(node, top=not above)
    changed = {}
    for key, part in parts:
        path = ".".join(word for word in (name, key.replace("/", ".")) if word)
        if (new := walk(part, change, path, (*above, id(node)))) is not part:
            changed[key] = new
    return rebuild(changed) if changed else node


def objects(node: Any, /, above: tuple[int, ...] = ()) -> Iterator[Any]:
    """Go through all objects that an implementation is made of."""
    if _is_closed(node, above) or is_tensor(node):
        return
    yield node
    inner = node.values() if isinstance(node, Mapping) else node if isinstance(node, list | tuple) else dict(_attributes(node)).values()
    for part in list(inner):
        yield from objects(part, (*above, id(node)))


def _put(tensor: Any, new: Any) -> Any:
    if is_of(tensor, "torch", "Tensor"):
        tensor.data = new.to(tensor.device)
    elif is_of(tensor, "keras", "Variable"):
        tensor.assign(new)
    elif is_variable(tensor):
        tensor.set_value(new)
    else:
        return new
    return tensor


def parts_of(node: Any, /, *, top: bool) -> Parts:
    """Take an object apart.

    Args:
        node: the object.
        top: whether it is the implementation itself, where a pair is a function and its parameters.

    Returns:
        Its parts, and what puts others in their place.
    """
    if is_keras(node):
        return [(variable.path.removeprefix(f"{node.name}/"), variable) for variable in node.weights], _stay(node)
    if is_flax(node):
        return _of_flax(node), _stay(node)
    if is_torch(node):
        return _of_torch(node), _attributes_set(node)
    if type(node) in {dict, list}:
        return [(str(key), part) for key, part in (node.items() if isinstance(node, dict) else enumerate(node))], _items_set(node)
    if isinstance(node, tuple):
        return _of_tuple(node, top=top)
    tree = _of_tree(node)
    return tree or (list(_attributes(node)), _attributes_set(node))


def _stay(node: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda _: node


def _of_flax(node: Any) -> list[tuple[str, Any]]:
    found = sys.modules["flax.nnx"].iter_graph(node)
    return [(".".join(map(str, path)), part) for path, part in found if is_variable(part)]


def _of_torch(node: Any) -> list[tuple[str, Any]]:
    own = vars(sys.modules["torch"].nn.Module()).keys()
    named = [*node.named_parameters(recurse=False), *node.named_buffers(recurse=False), *node.named_children()]
    return [*named, *((name, part) for name, part in vars(node).items() if name not in own)]


def _of_tuple(node: Any, *, top: bool) -> Parts:
    if top and len(node) == 2 and isinstance(node[1], Mapping):  # a function and its parameters
        return [("", node[1])], lambda new: (node[0], new[""])

    def rebuild(new: dict[str, Any]) -> Any:
        parts = [new.get(str(index), part) for index, part in enumerate(node)]
        return type(node)(*parts) if type(node) is not tuple else tuple(parts)

    return [(str(index), part) for index, part in enumerate(node)], rebuild


def _of_tree(node: Any) -> Parts | None:
    """Take what JAX knows as a tree apart; None for anything else."""
    jax = sys.modules.get("jax")
    if jax is None or jax.tree_util.all_leaves([node]):
        return None
    leaves, structure = jax.tree_util.tree_flatten_with_path(node)
    named = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
    return list(named.items()), lambda new: jax.tree_util.tree_unflatten(structure, [new.get(key, leaf) for key, leaf in named.items()])


def _attributes(node: Any) -> Iterator[tuple[str, Any]]:
    yield from getattr(node, "__dict__", {}).items()
    for base in type(node).__mro__:
        slots = base.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in {"__dict__", "__weakref__"} and (part := getattr(node, name, None)) is not None:
                yield name, part


def _attributes_set(node: Any) -> Callable[[dict[str, Any]], Any]:
    def rebuild(new: dict[str, Any]) -> Any:
        for name, part in new.items():
            try:
                setattr(node, name, part)
            except AttributeError:  # it is frozen; but it is a copy, which nobody else has seen
                object.__setattr__(node, name, part)
        return node

    return rebuild


def _items_set(node: Any) -> Callable[[dict[str, Any]], Any]:
    def rebuild(new: dict[str, Any]) -> Any:
        for key in list(node) if isinstance(node, dict) else range(len(node)):
            if str(key) in new:
                node[key] = new[str(key)]
        return node

    return rebuild
