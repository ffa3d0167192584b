"""How gradients are obtained: those of the specification, and those of an implementation."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from ..spec.attend import Dropout, blend, gate
from ..spec.chain import compute, dropped, weigh
from ..spec.fan_out import share_keys, share_values
from ..spec.parameters import Parameters
from ..spec.positions import Positions, linear_bias, rotate
from .problem import Array, Problem
from .subject import Subject
from .tensors import stored as read_stored
from .tensors import tensors_of
from .walk import is_variable, walk

SOURCES = ("queries", "keys", "values")
GIVEN = ("bias", "sinks", "slopes", "gates")
"""The options that have gradients."""

_MARGIN = 10
"""An implementation may round more often than need be."""

Backward = Callable[[Any, Any], Mapping[str, Any]]
"""The backward of an implementation: takes it after a call, and the gradient of the output; returns gradients by name."""


@dataclass(frozen=True, eq=False)
class Gradients:
    """The gradients of the product of the output and a cotangent.

    Attributes:
        inputs: those with respect to inputs and options, by name; None where there is none.
        stored: those with respect to the tensors of the implementation, by name.
        y: the output.
    """

    inputs: dict[str, Array | None]
    stored: dict[str, Array | None]
    y: Array


def inputs_of(problem: Problem, /) -> dict[str, Array]:
    """The inputs and options that have gradients, each array once."""
    found: dict[str, Array] = {}
    for name in SOURCES:
        if not any(array is getattr(problem, name) for array in found.values()):
            found[name] = getattr(problem, name)
    return found | {name: problem.options[name] for name in GIVEN if name in problem.options}


def specification(problem: Problem, /) -> tuple[Callable[[Mapping[str, Any]], Any], dict[str, Any]]:
    """Write the specification of a problem as a function of PyTorch tensors: inputs, options and parameters by name.

    Args:
        problem: the problem.

    Returns:
        The function, and the tensors to call it with.
    """
    import torch

    given = {name: torch.from_numpy(np.array(array)) for name, array in inputs_of(problem).items()}
    parameters = problem.parameters
    if parameters is not None:
        named = {f.name: getattr(parameters, f.name) for f in fields(parameters)}
        # what an option says too is the option's
        given |= {name: torch.from_numpy(np.array(a)) for name, a in named.items() if a is not None and name not in given}
    return lambda tensors: _evaluate(problem, tensors, torch.from_numpy), given


def _evaluate(problem: Problem, given: Mapping[str, Any], native: Callable[[Array], Any]) -> Any:
    policy, options = replace(problem.effective_policy, window=(None, None)), problem.options
    first = {id(array): name for name, array in reversed(inputs_of(problem).items())}
    queries, keys, values = (given[first[id(getattr(problem, name))]] for name in SOURCES)
    kept, positions, bias = native(np.array(problem.visible)), _positions(problem, native), given.get("bias")
    if "slopes" in given:
        linear = linear_bias(given["slopes"], positions.queries, positions.keys)
        bias = linear if bias is None else bias + linear
    survivors = options.get("survivors")
    chance = None if survivors is None else native(np.where(survivors, 1.0, 0.0))
    dropout = None if survivors is None else Dropout(options["dropout"], lambda _: chance)
    if problem.parameters is not None:
        parameters = Parameters(**{f.name: given[f.name] for f in fields(Parameters) if f.name in given})
        stand = None if policy.rotation is None else positions
        return compute(
            queries, parameters, policy, context=keys, context_v=values, keep=kept, bias=bias, scale=options.get("scale"),
            positions=stand, dropout=dropout,
        ).y  # fmt: skip
    if policy.rotation is not None:
        queries = rotate(queries, positions.queries, **vars(policy.rotation))
        keys = rotate(keys, positions.keys, **vars(policy.rotation))
    if (h := queries.shape[1]) != keys.shape[1]:
        keys, values = share_keys(keys, h=h, grouping=policy.grouping), share_values(values, h=h, grouping=policy.grouping)
    weights = weigh(queries, keys, policy, kept=kept, bias=bias, scale=options.get("scale"), sinks=given.get("sinks"))
    found = blend(dropped(weights, dropout), values)
    return gate(found, given["gates"]) if "gates" in given else found


def _positions(problem: Problem, native: Callable[[Array], Any]) -> Positions[Any]:
    queries, keys = (np.empty((problem.sizes["batch"], 1, problem.sizes[seq], 0)) for seq in ("seq_q", "seq_k"))
    places = problem.places(queries, keys).positions()
    return Positions(native(np.array(places.queries)), native(np.array(places.keys)))


def specified(problem: Problem, cotangent: Array, /) -> dict[str, Array]:
    """Differentiate the specification by PyTorch, in float64; by name of input, option or parameter."""
    import torch

    function, given = specification(problem)
    leaves = {name: tensor.requires_grad_() for name, tensor in given.items()}
    found = torch.autograd.grad(function(leaves), list(leaves.values()), torch.from_numpy(cotangent), allow_unused=True)
    grads = zip(leaves, found, strict=True)
    return {name: np.zeros(leaves[name].shape) if grad is None else grad.numpy() for name, grad in grads}


def limits(problem: Problem, cotangent: Array, unit: float, /) -> dict[str, Array]:
    """How far right gradients may be off, element by element, by the same names."""
    import torch

    from .gradient_tolerance import gradient_tolerance

    function, given = specification(problem)
    leaves = {name: tensor.requires_grad_() for name, tensor in given.items()}
    found = gradient_tolerance(lambda: function(leaves), leaves, torch.from_numpy(cotangent), unit, seed=problem.seed)
    return {name: _MARGIN * limit for name, limit in found.items()}


def slope_of(problem: Problem, cotangent: Array, name: str, direction: Array, /) -> float:
    """Differentiate the specification in one direction of an input, by a central difference."""
    step = 1e-5

    def at(factor: float) -> float:
        array = inputs_of(problem)[name] + factor * direction
        names = [name] if name in problem.options else [n for n in SOURCES if getattr(problem, n) is getattr(problem, name)]
        return float(np.sum(problem.change(**dict.fromkeys(names, array)).run().y * cotangent))

    return (at(step) - at(-step)) / (2 * step)


def differentiated(
    subject: Subject, problem: Problem, cotangent: Array, /, *, only: Collection[str] | None = None, backward: Backward | None = None
) -> Gradients:
    """Differentiate an implementation.

    Args:
        subject: the implementation.
        problem: what it is asked.
        cotangent: the gradient of its output.
        only: the inputs and options that ask for a gradient, where not all do; its tensors do not then.
        backward: its own backward; None to leave it to its library.

    Returns:
        The gradients.

    Raises:
        Exception: whatever it raises.
    """
    swaps = not problem.is_layer and subject.order == "bshd"
    outside = np.ascontiguousarray(cotangent.swapaxes(1, 2)) if swaps else cotangent
    with subject.library.working():
        way = _by_hand if backward is not None else _by_torch if subject.library.name == "torch" else _by_jax
        inputs, stored, y = way(subject, problem, subject.library.give(outside, "float64"), only, backward)
    taken = [{name: None if grad is None else subject.library.take(grad) for name, grad in found.items()} for found in (inputs, stored)]
    inputs = {_ROLES.get(name, name): grad for name, grad in taken[0].items()}
    if swaps:
        inputs = {name: grad.swapaxes(1, 2) if name in SOURCES and grad is not None else grad for name, grad in inputs.items()}
        y = y.swapaxes(1, 2)
    return Gradients(inputs, taken[1], subject.library.take(y))


_ROLES = {"x": "queries"}


def _graded(role: str, only: Collection[str] | None) -> bool:
    name = _ROLES.get(role, role)
    return name in (*SOURCES, *GIVEN) and (only is None or name in only)


def _first(result: Any) -> Any:
    return next(part for part in result if part is not None) if isinstance(result, tuple | list) else result


def _by_torch(subject: Subject, problem: Problem, cotangent: Any, only: Collection[str] | None, _: Any) -> tuple[Any, Any, Any]:
    import torch

    target, leaves = subject.prepared(problem, "float64"), {}

    def leaf(role: str, array: Any) -> Any:
        if _graded(role, only):
            leaves[role] = array.requires_grad_()
        return array

    stored = {name: t.value if is_variable(t) else t for name, t in tensors_of(target).items()} if subject.load is not None else {}
    for tensor in stored.values():
        tensor.requires_grad_(only is None)
    stored = stored if only is None else {}
    y = _first(subject.call(target, **subject.arguments(problem, "float64", change=leaf)))
    wanted = [tensor for tensor in (*leaves.values(), *stored.values()) if tensor.requires_grad]  # it may have been cut off
    found = torch.autograd.grad(y, wanted, cotangent, allow_unused=True) if wanted and y.requires_grad else [None] * len(wanted)
    by_id = {id(tensor): grad for tensor, grad in zip(wanted, found, strict=True)}
    of_inputs, of_stored = ({name: by_id.get(id(tensor)) for name, tensor in named.items()} for named in (leaves, stored))
    return of_inputs, of_stored, y.detach()


def _by_jax(subject: Subject, problem: Problem, cotangent: Any, only: Collection[str] | None, _: Any) -> tuple[Any, Any, Any]:
    leaves: dict[str, Any] = {}

    def leaf(role: str, array: Any) -> Any:
        if _graded(role, only):
            leaves[role] = array
        return array

    y = _first(subject.call(subject.prepared(problem, "float64"), **subject.arguments(problem, "float64", change=leaf)))
    stored: dict[str, Any] = {}
    if subject.load is not None and only is None:
        arrays = read_stored(subject.prepared(problem, "float64"))
        stored = {f"stored:{name}": subject.library.give(array, "float64") for name, array in arrays.items()}

    def function(given: dict[str, Any]) -> Any:
        target = subject.prepared(problem, "float64")
        if stored:
            target = walk(target, lambda name, _: given.get(f"stored:{name}"))
        return _first(subject.call(target, **subject.arguments(problem, "float64", change=given.get)))

    found = subject.library.gradients(function, leaves | stored, cotangent) or {}
    of_tensors = {name.removeprefix("stored:"): found.get(name) for name in stored}
    return {name: found.get(name) for name in leaves}, of_tensors, y


def _by_hand(subject: Subject, problem: Problem, cotangent: Any, _: Any, backward: Any) -> tuple[Any, Any, Any]:
    target = subject.prepared(problem, "float64")
    y = _first(subject.call(target, **subject.arguments(problem, "float64")))
    roles = dict(subject.signature.places)
    found = {roles.get(name, name): grad for name, grad in backward(target, cotangent).items()}
    known = {role for role in roles.values() if _graded(role, None)}
    return (
        {name: grad for name, grad in found.items() if name in known},
        {name: grad for name, grad in found.items() if name not in known},
        y,
    )
