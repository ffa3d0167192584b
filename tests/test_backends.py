"""The same specification on every array library: the same numbers, nothing lost of what the library can do."""

import copy
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import array_api_strict
import jax
import numpy as np
import pytest
import torch
from arrays import PRIMES, Library, Problem, assert_same, draw, library_of, unwrap
from reference import UNIT, gamma, reference

import attnspec
from attnspec import Parameters
from attnspec.arrays import Backend, backend_of, dtype_name
from attnspec.backends import array_api as array_api_backend
from attnspec.backends import numpy as numpy_backend
from attnspec.backends import torch as torch_backend

CASES: dict[str, dict[str, Any]] = {
    "plain": {"self_attention": True},
    "masked": {"masked": True},
    "causal with offset": {"causal": True, "offset": 3},
    "masked and causal": {"masked": True, "causal": True, "offset": -1},
    "grouped": {"group": 2, "masked": True},
    "cross, scaled": {"scale": 0.3},
    "without biases": {"bias": False, "masked": True},
}
SMALL = PRIMES | {"seq_q": 3, "seq_k": 4, "d_k": 2, "d_v": 3, "d_model": 2, "d_key_in": 3, "d_value_in": 2, "h_kv": 1, "group": 2}
SOURCES = ("x", "context", "context_v", "w_q", "w_k", "w_v", "w_o", "b_q", "b_k", "b_v", "b_o")
"""The arrays of numbers that multi-head attention takes."""

each_library = pytest.mark.parametrize("library", list(Library), ids=lambda library: library.value)
each_case = pytest.mark.parametrize("settings", list(CASES.values()), ids=list(CASES))


def convert(problem: Problem, library: Library, dtype: str) -> Problem:
    """Move a problem to a library and a floating-point dtype."""
    return problem.map(lambda array: library.wrap(array if array.dtype == bool else array.astype(dtype)))


# --- the same numbers


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@each_case
@each_library
def test_every_step_agrees_with_the_reference(library: Library, settings: dict[str, Any], dtype: str) -> None:
    """So all libraries agree with each other; library, dtype and device are those of the input.

    Allowed are the worst-case rounding errors of this computation and of the reference, and one rounding for storing
    the reference in this dtype.
    """
    rounded = convert(draw(**PRIMES | settings), Library.NUMPY, dtype)
    problem = convert(rounded, library, dtype)
    expected = reference(rounded, UNIT[dtype] + UNIT["float64"])
    steps = problem.steps()
    for name, result in steps.items():
        if name == "count_positions":  # of the keys, which are counted last
            assert_same(unwrap(result), np.arange(rounded.keys.shape[2])[None])
            continue
        if name.startswith("keep"):
            seen = rounded.seen if name == "keep_both" or rounded.keep is None else rounded.but(keep=None).seen
            assert_same(result, library.wrap(seen if name == "keep_both" else seen[:1, :1]), what=name)
            continue
        value, error = expected[name]
        stored = UNIT[dtype] * np.abs(np.where(np.isfinite(value), value, 0.0))
        assert_same(result, library.wrap(value.astype(dtype)), within=error + stored, what=name)
    assert list(steps)[-1] == "mix"
    assert_same(problem.run(), steps["mix"], what="the result without a trace")


def test_the_matrix_of_libraries_is_as_nasty_as_it_says() -> None:
    """A sanity check of the other tests' inputs."""
    array = np.arange(6.0).reshape(2, 3)
    for library in Library:
        wrapped = library.wrap(array)
        assert library_of(wrapped) == ("numpy" if "numpy" in library.value else library.value.partition("_non")[0])
        assert_same(wrapped, library.wrap(array), what=library.value)
        np.testing.assert_array_equal(np.asarray(wrapped), array)
    assert not Library.NUMPY_READONLY.wrap(array).flags.writeable
    assert not Library.NUMPY_NONCONTIGUOUS.wrap(array).flags.c_contiguous
    assert not Library.TORCH_NONCONTIGUOUS.wrap(array).is_contiguous()
    flags = array_api_strict.get_array_api_strict_flags()
    assert (flags["boolean_indexing"], flags["data_dependent_shapes"], flags["enabled_extensions"]) == (False, False, ())


@pytest.mark.parametrize("like", [Library.NUMPY, Library.TORCH], ids=lambda library: library.value)
@each_case
def test_views_and_read_only_arrays_give_the_same(like: Library, settings: dict[str, Any]) -> None:
    """How an array lies in memory may choose another matrix product, but no other result."""
    problem = draw(**PRIMES | settings)
    wanted = problem.map(like.wrap).run()
    error = 2 * reference(problem)["mix"].error
    for library in Library:
        if library.value.startswith(f"{like.value}_"):
            assert_same(problem.map(library.wrap).run(), wanted, within=error, what=library.value)


# --- devices


def test_everything_stays_on_the_device_of_the_input() -> None:
    """On a second device of array-api-strict, which refuses to mix devices."""
    device = array_api_strict.Device("device1")
    problem = draw(**PRIMES | CASES["masked and causal"])
    steps = problem.map(lambda array: array_api_strict.asarray(array, device=device)).steps()
    assert {name: result.device for name, result in steps.items()} == dict.fromkeys(steps, device)


def test_nothing_is_computed_beside_the_device_of_the_input() -> None:
    """On PyTorch's meta device, which has no numbers to give away."""
    problem = draw(**PRIMES | CASES["masked and causal"]).map(lambda array: torch.tensor(array, device="meta"))
    steps = problem.steps()
    assert {name: result.device.type for name, result in steps.items()} == dict.fromkeys(steps, "meta")


# --- PyTorch: gradients and transformations


@pytest.fixture(params=list(CASES.values()), ids=list(CASES))
def tensors(request: pytest.FixtureRequest) -> Problem:
    """Each case, as tensors."""
    torch.compiler.reset()  # or the layers of different tests count as recompilations of one
    return draw(**PRIMES | request.param).map(Library.TORCH.wrap)


def function_of(problem: Problem, *names: str) -> tuple[Callable[..., Any], list[Any]]:
    """Make multi-head attention a function of some of its arrays, or of all numbers; and give these arrays."""
    arrays = problem.arrays()
    names = names or tuple(name for name in SOURCES if name in arrays)

    def function(*values: Any) -> Any:
        return problem.but(**dict(zip(names, values, strict=True))).run()

    return function, [arrays[name] for name in names]


def test_every_argument_gets_a_gradient(tensors: Problem) -> None:
    """Through all steps, finite, and not all zero but for `b_k`, which has no influence."""
    sources = {name: array for name, array in tensors.arrays().items() if name in SOURCES}
    leaves = {name: array.requires_grad_() for name, array in sources.items()}
    y = tensors.run()
    assert y.requires_grad
    y.square().sum().backward()
    for name, leaf in leaves.items():
        assert torch.isfinite(leaf.grad).all(), f"the gradient for {name} is {leaf.grad}"
        assert name == "b_k" or leaf.grad.abs().max() > 2.0**-20, f"the gradient for {name} is {leaf.grad}"


@each_case
def test_the_gradients_are_those_of_finite_differences(settings: dict[str, Any]) -> None:
    """By PyTorch's own check, in float64, at its own tolerance."""
    function, arguments = function_of(draw(**SMALL | settings).map(Library.TORCH.wrap))
    assert torch.autograd.gradcheck(function, [argument.requires_grad_() for argument in arguments])


class Layer(torch.nn.Module):
    """A problem's parameters and options as a module that takes x."""

    def __init__(self, problem: Problem) -> None:
        """Keep the problem."""
        super().__init__()
        self.parameters_ = problem.parameters
        self.others = {"context": problem.context, "context_v": problem.context_v, "keep": problem.keep} | problem.options

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the problem on other positions."""
        return attnspec.multi_head_attention(x, self.parameters_, **self.others)

    def with_arrays(self, x: torch.Tensor, arrays: dict[str, torch.Tensor]) -> torch.Tensor:
        """Run the problem on other positions, with other parameters."""
        return attnspec.multi_head_attention(x, Parameters(**arrays), **self.others)


def test_torch_compile_gives_what_eager_execution_gives(tensors: Problem) -> None:
    """In one graph, whether or not the signature was judged before, and with the same gradients."""
    layer = Layer(tensors)
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    fresh = compiled(tensors.x)
    assert_same(fresh, layer(tensors.x))
    assert_same(compiled(tensors.x), fresh)
    leaves = [array.requires_grad_() for array in (tensors.x, *vars(tensors.parameters).values()) if array is not None]
    got = torch.autograd.grad(compiled(tensors.x).sum(), leaves)
    for one, wanted in zip(got, torch.autograd.grad(layer(tensors.x).sum(), leaves), strict=True):
        assert_same(one, wanted)


def test_torch_compile_sees_through_the_making_of_parameters() -> None:
    """A module may keep its arrays in any form and build `Parameters` when it runs."""
    problem = draw(**PRIMES).map(Library.TORCH.wrap)
    arrays = {name: array for name, array in vars(problem.parameters).items() if array is not None}
    function = Layer(problem).with_arrays
    assert_same(torch.compile(function, fullgraph=True, backend="eager")(problem.x, arrays), problem.run())


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "non-strict"])
def test_torch_export_gives_what_eager_execution_gives(tensors: Problem, *, strict: bool) -> None:
    """The whole as one graph."""
    layer = Layer(tensors)
    exported = torch.export.export(layer, (tensors.x,), strict=strict)
    assert_same(exported.module()(tensors.x), layer(tensors.x))


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "non-strict"])
def test_torch_export_keeps_batch_and_sequence_open(*, strict: bool) -> None:
    """No size is built into the graph that is not one of the parameters."""
    problem = draw(**PRIMES | {"self_attention": True, "causal": True, "group": 2}).map(Library.TORCH.wrap)
    layer, x = Layer(problem), problem.x
    sizes = {0: torch.export.Dim("batch", min=1, max=64), 1: torch.export.Dim("seq", min=1, max=64)}
    exported = torch.export.export(layer, (x,), strict=strict, dynamic_shapes=(sizes,)).module()
    for other in (x, x[:1], torch.cat([x, x, x])[:, :4], torch.cat([x, x.flip(1)], dim=1)):
        assert_same(exported(other), layer(other))


def test_torch_vmap_gives_what_a_loop_gives(tensors: Problem) -> None:
    """Over inputs, and over parameters."""
    for name in ("x", "w_k"):
        function, (argument,) = function_of(tensors, name)
        many = torch.stack([argument, -argument, 2 * argument])
        got = torch.func.vmap(function)(many)
        for index, one in enumerate(many):
            error = 2 * reference(tensors.but(**{name: one}).map(unwrap))["mix"].error
            assert_same(got[index], function(one), within=error, what=f"{name} number {index}")


def test_torch_func_grad_gives_what_backward_gives(tensors: Problem) -> None:
    """Two ways to one gradient."""
    function, (x,) = function_of(tensors, "x")
    got = torch.func.grad(lambda x: function(x).square().sum())(x)
    leaf = x.clone().requires_grad_()
    function(leaf).square().sum().backward()
    assert_same(got, leaf.grad)


@each_library
@pytest.mark.parametrize("clone", [copy.deepcopy, lambda p: pickle.loads(pickle.dumps(p))], ids=["deepcopy", "pickle"])  # noqa: S301
def test_a_copy_of_the_parameters_computes_the_same(library: Library, clone: Callable[[Parameters], Parameters]) -> None:
    """Copies share nothing."""
    if library is Library.ARRAY_API_STRICT:
        pytest.skip("its arrays cannot be copied or pickled")
    problem = draw(**PRIMES).map(library.wrap)
    other = clone(problem.parameters)
    assert other.w_q is not problem.parameters.w_q
    assert other.heads == problem.parameters.heads
    assert_same(problem.but(parameters=other).run(), problem.run(), within=2 * reference(draw(**PRIMES))["mix"].error)


# --- JAX: transformations


@each_case
def test_jax_jit_gives_what_eager_execution_gives(settings: dict[str, Any]) -> None:
    """Up to rounding: XLA may fuse."""
    problem = draw(**PRIMES | settings)
    function, arguments = function_of(problem.map(Library.JAX.wrap))
    assert_same(jax.jit(function)(*arguments), function(*arguments), within=2 * reference(problem)["mix"].error)


@each_case
def test_jax_vmap_gives_what_a_loop_gives(settings: dict[str, Any]) -> None:
    """Over inputs, under jit too."""
    problem = draw(**PRIMES | settings)
    function, (x,) = function_of(problem.map(Library.JAX.wrap), "x")
    many = jax.numpy.stack([x, -x, 2 * x])
    for vectorised in (jax.vmap(function), jax.jit(jax.vmap(function))):
        got = vectorised(many)
        for index, one in enumerate(many):
            error = 2 * reference(problem.but(x=np.asarray(one)))["mix"].error
            assert_same(got[index], function(one), within=error, what=f"x number {index}")


@each_case
def test_jax_grad_gives_what_torch_gives(settings: dict[str, Any]) -> None:
    """For every argument, but for one rounding for each number on the longest path there and back."""
    problem = draw(**SMALL | settings)
    function, arguments = function_of(problem.map(Library.JAX.wrap))
    got = jax.grad(lambda *values: function(*values).sum(), argnums=tuple(range(len(arguments))))(*arguments)
    function, arguments = function_of(problem.map(Library.TORCH.wrap))
    wanted = torch.autograd.grad(function(*(argument.requires_grad_() for argument in arguments)).sum(), arguments)
    within = gamma(2 * sum(SMALL.values()), UNIT["float64"]) * max(gradient.abs().max().item() for gradient in wanted)
    for one, other in zip(got, wanted, strict=True):
        assert_same(unwrap(one), unwrap(other), within=within)


# --- the backends


def members(owner: Any) -> dict[str, str]:
    """List the functions that a module or class defines, in order, each with the names and kinds of its parameters."""
    home = getattr(owner, "__module__", None) or owner.__name__
    functions = [value for value in vars(owner).values() if inspect.isfunction(value) and value.__module__ == home]
    named = {function.__name__: inspect.signature(function).parameters.values() for function in functions}
    return {
        name: ", ".join(f"{parameter.kind.name} {parameter.name}" for parameter in parameters if parameter.name != "self")
        for name, parameters in named.items()
        if not name.startswith("_")
    }


@pytest.mark.parametrize("backend", [numpy_backend, torch_backend, array_api_backend], ids=lambda backend: backend.__name__)
def test_a_backend_has_the_members_of_the_protocol_in_its_order(backend: Any) -> None:
    """With the same parameters; the generic one tells besides what it `owns`."""
    own = members(backend)
    if backend is array_api_backend:
        del own["owns"]
    assert list(own.items()) == list(members(Backend).items())


@each_library
def test_every_member_of_a_backend_does_what_its_docstring_says(library: Library) -> None:
    """On an array so small that the answers can be written down."""
    array = np.array([[1.0, -2.0, 0.5], [np.inf, 0.0, np.nan]], np.float32)
    x, xp = library.wrap(array), backend_of(library.wrap(array))
    finite = library.wrap(array[:1])
    assert_same(xp.permute(x, (1, 0)), library.wrap(array.T.copy()))
    assert_same(xp.reshape(x, (3, 2)), library.wrap(array.reshape(3, 2)))
    assert_same(xp.repeat(x, 2, axis=1), library.wrap(array[:, [0, 0, 1, 1, 2, 2]]))
    assert_same(xp.where(x == x, x, 7.0), library.wrap(np.array([[1, -2, 0.5], [np.inf, 0, 7]], np.float32)))  # noqa: PLR0124  # not NaN
    assert_same(xp.exp(finite), library.wrap(np.exp(array[:1])), within=2.0**-20)
    assert_same(xp.isfinite(x), library.wrap(np.array([[True, True, True], [False, True, False]])))
    assert_same(xp.max(finite, axis=-1), library.wrap(np.float32([[1.0]])))
    assert_same(xp.sum(finite, axis=-1), library.wrap(np.float32([[-0.5]])))
    assert_same(xp.any(x == 0, axis=-1), library.wrap(np.array([[False], [True]])))
    assert_same(xp.astype(x, "float64"), library.wrap(array.astype(np.float64)))
    assert_same(xp.astype(xp.astype(x, "float64"), x.dtype), x)
    assert np.asarray(xp.arange(3, x)).tolist() == [0, 1, 2]
    assert "int" in dtype_name(xp.arange(3, x))
    assert xp.device(xp.arange(3, x)) == xp.device(x)
