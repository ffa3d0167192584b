"""How the tensors of an implementation are named, read and set."""

import inspect
import sys
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

from ..arrays import dtype_name, library_of
from ..errors import ConfigError
from .libraries import LIBRARIES, Library
from .problem import Array
from .walk import is_flax, is_keras, is_of, is_torch, is_variable, objects, walk


def stored(target: Any, /) -> dict[str, Array]:
    """Read every floating-point tensor.

    Args:
        target: the implementation.

    Returns:
        The tensors by dotted name, in float64.
    """
    return {name: _taken(tensor) for name, tensor in tensors_of(target).items()}


def tensors_of(target: Any, /) -> dict[str, Any]:
    """List every floating-point tensor as it is.

    Args:
        target: the implementation.

    Returns:
        The tensors by dotted name.

    Raises:
        ConfigError: a tensor gets its shape only in the first call.
    """
    found: dict[str, Any] = {}
    walk(target, found.__setitem__)
    for name, tensor in found.items():
        if is_of(tensor, "torch", "nn", "parameter", "UninitializedTensorMixin"):
            raise ConfigError(f"layout: {name} has no shape before the first call; call the layer once.")
    return found


def _taken(tensor: Any) -> Array:
    return LIBRARIES[_kind(tensor)].take(tensor if not is_variable(tensor) else _value(tensor))


def _value(variable: Any) -> Any:
    return variable.value if is_of(variable, "keras", "Variable") else variable.get_value()


def _kind(tensor: Any) -> str:
    library = library_of(_value(tensor) if is_variable(tensor) else tensor)
    return library if library in LIBRARIES else "numpy"


def set_stored(target: Any, tensors: Mapping[str, Array], library: Library, precision: str, /) -> Any:
    """Put tensors in the place of those that there are; where one is known by several names, under all of them.

    Args:
        target: the implementation, which is changed where it can be.
        tensors: the tensors by name.
        library: whose arrays the implementation takes.
        precision: the dtype.

    Returns:
        The implementation with the tensors: the same object, or a copy.
    """
    known = tensors_of(target)
    new = {id(known[found]): tensors[name] for name in tensors for found in [find(target, name, known)]}

    def change(_: str, tensor: Any) -> Any:
        return _given(tensor, new[id(tensor)], library, precision) if id(tensor) in new else None

    return walk(target, change)


def _given(tensor: Any, array: Array, library: Library, precision: str) -> Any:
    """Make an array of the kind that a tensor is; what JAX is to take is JAX's."""
    kind = _kind(tensor)
    return LIBRARIES["jax" if library.name == "jax" and kind == "numpy" else kind].give(array, precision)


def find(target: Any, name: str, known: Mapping[str, Any], /) -> str:
    """Find out which tensor is meant by a name: the whole of it, its end, or attributes that lead to it.

    Args:
        target: the implementation.
        name: the name, with dots or slashes.
        known: the tensors of the implementation.

    Returns:
        The whole name.

    Raises:
        ConfigError: there is no such tensor, or several.
    """
    dotted = name.replace("/", ".")
    if dotted in known:
        return dotted
    ends = [whole for whole in known if whole.endswith(f".{dotted}")]
    if len(ends) == 1:
        return ends[0]
    if len(ends) > 1:
        raise ConfigError(f"layout: {name} may be any of {', '.join(ends)}; give the whole name.")
    led = attribute(target, name)
    for whole, tensor in known.items():
        if tensor is led:
            return whole
    raise ConfigError(f"layout: there is no tensor {name}; {nearest(dotted, known)}.")


def nearest(name: str, known: Iterable[str], /) -> str:
    """Say which names are like one that is not known, or which there are."""
    known = list(known)
    near = get_close_matches(name, known, n=3, cutoff=0.5)
    return f"near it are {', '.join(near)}" if near else f"there are {', '.join(known)}"


def attribute(target: Any, name: str, /) -> Any:
    """Follow a dotted name by attributes, keys and numbers; what is not there is `find`."""
    for word in name.replace("/", ".").split("."):
        if isinstance(target, Mapping):
            target = target.get(word, find)
        elif word.isdigit():
            target = target[int(word)] if isinstance(target, list | tuple) and int(word) < len(target) else getattr(target, word, find)
        else:
            target = getattr(target, word, find)
    return target


def is_parameter(target: Any, tensor: Any, /) -> bool:
    """Tell whether a tensor of an implementation is learnt, as far as that can be seen."""
    if is_of(tensor, "keras", "Variable"):
        return bool(tensor.trainable)
    if is_variable(tensor):
        return is_of(tensor, "flax.nnx", "Param")
    return is_of(tensor, "torch", "nn", "Parameter") if is_torch(target) else len(tensor.shape) > 0


def cast(target: Any, precision: str, library: Library, /) -> Any:
    """Bring a whole implementation to a precision.

    Args:
        target: the implementation, which is changed where it can be.
        precision: the dtype.
        library: whose arrays it takes.

    Returns:
        The implementation in this precision: the same object, or a copy.
    """
    if is_keras(target):
        return _cast_keras(target, precision)
    if is_torch(target):
        target.to(getattr(sys.modules["torch"], precision))

    def change(_: str, tensor: Any) -> Any:
        if dtype_name(tensor) == precision or precision not in LIBRARIES[_kind(tensor)].precisions:
            return None
        return _given(tensor, _taken(tensor), library, precision)

    return walk(target, change)


def _cast_keras(layer: Any, precision: str) -> Any:
    """A layer of Keras computes in the dtype that it was made for, so it is made anew, as are the layers inside, if that can be."""
    if layer.compute_dtype == precision:
        return layer
    keras, config = sys.modules["keras"], layer.get_config()
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(precision)
    try:
        arguments = inspect.signature(type(layer)).parameters
        takes_all = any(argument.kind is argument.VAR_KEYWORD for argument in arguments.values())
        made = type(layer).from_config({n: v for n, v in {**config, "dtype": precision}.items() if takes_all or n in arguments})
        if layer.built:
            _build_keras(made, layer.get_build_config(), precision)
    except TypeError:  # it cannot be made anew from its settings, so it stays as it is, and computes in its own dtype
        return layer
    finally:
        keras.config.set_dtype_policy(before)
    return made


def _build_keras(layer: Any, config: dict[str, Any], precision: str) -> None:
    """Make the tensors of a new layer: by its own method, or by a call that only works out shapes."""
    keras = sys.modules["keras"]
    if type(layer).build is not keras.Layer.build:
        layer.build_from_config(config)
    elif "input_shape" in config:  # of the first input, which is all that Keras keeps; the others are taken for as wide
        needed = [argument for argument in inspect.signature(layer.call).parameters.values() if argument.default is argument.empty]
        layer(*[keras.KerasTensor(config["input_shape"], precision) for _ in needed])
    else:
        shapes = config["shapes_dict"]
        layer(**{name.removesuffix("_shape"): keras.KerasTensor(shape, precision) for name, shape in shapes.items()})


def set_training(target: Any, training: bool, /) -> None:  # noqa: FBT001  # as PyTorch's train()
    """Set whether an implementation is in training; one of Keras is told so in each call.

    Args:
        target: the implementation.
        training: whether it is.
    """
    if is_keras(target):
        return
    if is_torch(target) or is_flax(target):
        target.train() if training else target.eval()
        return
    for part in objects(target):
        for name, value in (("training", training), ("inference", not training)):
            if isinstance(getattr(part, "__dict__", {}).get(name), bool):
                object.__setattr__(part, name, value)  # past the lock of Equinox' modules
