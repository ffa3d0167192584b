"""One of two processes that compare a layer whose heads are split with the layer in one piece; started by test_distributed.py."""

import copy
import json
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

import attnspec
from attnspec import Heads, Mask, Parameters, Policy, Rotation
from attnspec.bookkeeping.network import crossings
from attnspec.distributed import HeadParallel
from attnspec.torch import MultiHeadAttention, MultiheadAttention

RANKS = 2
BATCH, SEQ, SEQ_K, D_MODEL, H = 3, 5, 8, 7, 4
WITHIN = 1e-12


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64)


@dataclass(frozen=True)
class Case:
    """A layer and a call.

    Attributes:
        sizes: other sizes of the heads.
        extras: the shapes of parameters besides projections and biases.
        policy: the conventions.
        bias: whether the projections have biases.
        options: what the call is given, besides `x`.
        x: the shape of `x`.
    """

    sizes: dict[str, int] = field(default_factory=dict)
    extras: dict[str, tuple[int, ...]] = field(default_factory=dict)
    policy: Policy = field(default_factory=Policy)
    bias: bool = True
    options: Callable[[torch.Tensor], dict[str, Any]] = lambda x: {}
    x: tuple[int, ...] = (BATCH, SEQ, D_MODEL)

    def layer(self) -> MultiHeadAttention:
        heads = Heads(**{"d_model": D_MODEL, "h": H, "h_kv": 2, "d_k": 6, "d_v": 3} | self.sizes)
        parameters = Parameters.random(heads, seed=1, bias=self.bias).to_torch()
        extras = {name: draw(*shape, seed=place) for place, (name, shape) in enumerate(self.extras.items())}
        return MultiHeadAttention.from_parameters(replace(parameters, **extras), policy=self.policy)


def cross(x: torch.Tensor) -> dict[str, Any]:
    return {"context": draw(BATCH, SEQ_K, 5).requires_grad_(), "context_v": draw(BATCH, SEQ_K, 11).requires_grad_()}


def rules(x: torch.Tensor) -> dict[str, Any]:
    of_heads = Mask.drop(draw(H, SEQ) > 1, "h seq_k") & Mask.keep(draw(1, SEQ, SEQ, seed=1) < 1, "h seq_q seq_k")
    return {
        "keep": of_heads & Mask.additive(torch.where(draw(BATCH, H, 1, SEQ) > 1, -torch.inf, 0.0)) & Mask.lengths(torch.tensor([5, 3, 4]))
    }


CASES = {
    "self-attention": Case(),
    "heads of their own": Case({"h_kv": H}),
    "no biases": Case(bias=False),
    "causal": Case(options=lambda x: {"causal": True}),
    "cross-attention": Case({"d_key_in": 5, "d_value_in": 11}, options=cross),
    "one context for keys and values": Case(options=lambda x: {"context": draw(BATCH, SEQ_K, D_MODEL).requires_grad_()}),
    "the context is x": Case(options=lambda x: {"context": x}),
    "a mask for each head": Case(options=lambda x: {"keep": draw(BATCH, H, SEQ, SEQ) < 1}),
    "a mask for all heads": Case(options=lambda x: {"keep": draw(1, 1, SEQ, SEQ) < 1}),
    "rules": Case(options=rules),
    "a bias for each head": Case(options=lambda x: {"bias": draw(1, H, SEQ, SEQ).requires_grad_()}),
    "a bias for all heads": Case(options=lambda x: {"bias": draw(BATCH, 1, 1, SEQ).requires_grad_(), "causal": True}),
    "rotation": Case(policy=Policy(rotation=Rotation())),
    "a gain for all heads": Case(policy=Policy(normalise="rms"), extras={"gain_q": (1, 6), "gain_k": (1, 6)}),
    "a gain for each head": Case(policy=Policy(normalise="layer"), extras={"gain_q": (H, 6), "gain_k": (2, 6)}),
    "a gain for the one key head of each rank": Case(policy=Policy(normalise="l2"), extras={"gain_k": (2, 6)}),
    "sinks": Case(extras={"sinks": (H,)}),
    "extra keys and gates": Case(extras={"extra_k": (2, 3, 6), "extra_v": (2, 3, 3), "gates": (H,)}),
    "weights": Case(options=lambda x: {"need": "weights", "causal": True}),
    "one sequence": Case(x=(SEQ, D_MODEL)),
    "products in double precision": Case(policy=Policy(product_precision="float64")),
    "groups strided, of one head": Case({"h_kv": H}, policy=Policy(grouping="strided")),
}


def tensor_parallel(layer: nn.Module) -> nn.Module:
    return parallelize_module(layer, init_device_mesh("cpu", (RANKS,)), HeadParallel())


def both(layer: nn.Module, *shape: int) -> nn.Module:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    return fully_shard(parallelize_module(layer, mesh["tp"], HeadParallel()), mesh=mesh["dp"])


SETUPS = {
    "HeadParallel": tensor_parallel,
    "HeadParallel in FSDP2": lambda layer: both(layer, 1, RANKS),
    "FSDP2 on HeadParallel of one rank": lambda layer: both(layer, RANKS, 1),
    "FSDP2": lambda layer: fully_shard(layer, mesh=init_device_mesh("cpu", (RANKS,))),
}


class Sent(TorchDispatchMode):
    """What is sent inside, by the name of the operation, with its shape."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, tuple[int, ...]]] = []

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in operation.namespace and not {"wait", "wrap"} & set(operation.__name__.split("_")):
            self.seen.append((operation.__name__.partition(".")[0], tuple(getattr(args[0], "shape", ()))))
        return operation(*args, **(kwargs or {}))


def whole(array: Any) -> torch.Tensor:
    return (array.full_tensor() if isinstance(array, DTensor) else array).detach()


def state_of(layer: nn.Module) -> dict[str, Any]:
    return get_model_state_dict(layer, options=StateDictOptions(full_state_dict=True))


def outcome(layer: nn.Module, case: Case) -> dict[str, torch.Tensor]:
    """Everything that a step of training comes to."""
    x = draw(*case.x).requires_grad_()
    options = case.options(x)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, eps=1e-3)  # so far from 0 that it does not blow rounding up
    answer = layer(x, **options)
    answers = dict(zip(("output", "weights"), answer, strict=True)) if "need" in options else {"output": answer}
    sum((array * draw(*array.shape)).sum() for array in answers.values()).backward()
    gradients = {"x": x.grad} | {name: parameter.grad for name, parameter in layer.named_parameters()}
    gradients |= {name: option.grad for name, option in options.items() if getattr(option, "requires_grad", False)}
    found = answers | {f"gradient of {name}": gradient for name, gradient in gradients.items()}
    optimizer.step()
    found |= {f"{name} after a step": array for name, array in state_of(layer).items()}
    found["training output"] = layer(x, **options)[0] if "need" in options else layer(x, **options)
    return {name: whole(array) for name, array in found.items()}


def require_same(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert got.keys() == wanted.keys()
    for name, array in wanted.items():
        assert got[name].shape == array.shape, (name, got[name].shape, array.shape)
        off = (got[name] - array).abs().max().item()
        assert off <= WITHIN * max(1.0, array.abs().max().item()), f"{name} is off by {off}"


def require(got: Any, wanted: Any) -> None:
    assert got == wanted, f"{got!r} is not {wanted!r}"


def refusal(call: Callable[[], Any]) -> str:
    try:
        call()
    except attnspec.AttnspecError as error:
        return str(error)
    return "it was not refused"


def require_said(said: str, call: Callable[[], Any]) -> None:
    assert said in (answer := refusal(call)), answer


def compare(setup: str, case: str) -> None:
    require_same(outcome(SETUPS[setup](CASES[case].layer()), CASES[case]), outcome(CASES[case].layer(), CASES[case]))


def decoding_goes_on_with_the_cache_of_its_own_heads() -> None:
    case = Case(policy=Policy(rotation=Rotation(), window=(4, 0)))
    one, split = case.layer(), tensor_parallel(case.layer())
    x, keep = draw(BATCH, 9, D_MODEL), draw(BATCH, H, 1, 9) < 1
    found = []
    for layer in (one, split):
        cache, outputs = layer.new_cache(batch=BATCH, room=4), []
        with torch.no_grad():
            for start, stop in ((0, 3), (3, 4), (4, 6), (6, 7), (7, 8), (8, 9)):
                y, cache = layer(x[:, start:stop], cache=cache, keep=keep[..., :stop])
                outputs.append(y)
        y, cache = layer(x[:, :1], cache=cache.evict(3).crop(8))  # with gradients recorded
        found.append({"outputs": torch.cat(outputs, dim=1), "the last": y.detach(), "cache": cache})
    require([each.pop("cache").keys.shape for each in found], [(BATCH, 2, 3, 6), (BATCH, 1, 3, 6)])
    require_same(found[1], found[0])
    require_said(
        "cache.keys (3, 4, 0, 6) has h_kv=4, but h_kv=2 was set when the layer was built.",
        lambda: split(x, cache=one.new_cache(batch=BATCH)),
    )


def hooks_and_traces_see_the_steps_of_its_own_heads() -> None:
    one, split = Case().layer(), tensor_parallel(Case().layer())
    x, seen = draw(BATCH, SEQ, D_MODEL), []
    with attnspec.trace() as steps:
        split(x)
    handles = [layer.on("softmax", lambda weights: seen.append(weights.shape) or weights * 2) for layer in (one, split)]
    hooked = [layer(x).detach() for layer in (one, split)]
    for handle in handles:
        handle.remove()
    substitutes = {"scale": lambda scores, /, *, d_k: scores / d_k}
    with attnspec.substitute(**substitutes):
        substituted = [layer(x).detach() for layer in (one, split)]
    assert steps["softmax"].result.shape == (BATCH, H // RANKS, SEQ, SEQ)
    require(seen, [(BATCH, H, SEQ, SEQ), (BATCH, H // RANKS, SEQ, SEQ)])
    require_same({"hooked": hooked[1], "substituted": substituted[1]}, {"hooked": hooked[0], "substituted": substituted[0]})
    assert (hooked[0] - substituted[0]).abs().max() > 0.1


def errors_speak_of_all_heads() -> None:
    one, split = Case().layer(), tensor_parallel(Case().layer())
    x, flags = draw(BATCH, SEQ, D_MODEL), torch.ones(BATCH, 2, SEQ, SEQ, dtype=torch.bool)
    wrong = ({"keep": flags}, {"bias": draw(BATCH, 3, SEQ, SEQ)}, {"context": draw(BATCH, SEQ, 6)}, {"positions": 1}, {"keep": [True]})
    for options in wrong:
        require(refusal(lambda options=options: split(x, **options)), refusal(lambda options=options: one(x, **options)))
    require(refusal(lambda: split(draw(BATCH, SEQ, 6))), refusal(lambda: one(draw(BATCH, SEQ, 6))))
    said = "Mask: keep (3, 2, 5, 5) has h=2, but h=4 was set by the layer."  # as many as a rank has
    require_said(said, lambda: split(x, keep=Mask.keep(flags)))


def what_is_sent_is_what_the_books_say() -> None:
    heads = Case().layer().heads
    split, x = tensor_parallel(Case().layer()), draw(BATCH, SEQ, D_MODEL).requires_grad_()
    for context in (None, x, draw(BATCH, SEQ_K, D_MODEL).requires_grad_()):
        seq_k = None if context is None else context.shape[1]
        books = attnspec.ledger(heads.split(RANKS), batch=BATCH, seq=SEQ, seq_k=seq_k)
        with Sent() as forward:
            y = split(x, context=context)
        with Sent() as backward:
            y.sum().backward()
        output, *gradients = crossings(books, RANKS, cross=seq_k == SEQ_K)
        require(forward.seen, [("all_reduce", output.cell.shape)])
        require(sorted(backward.seen), [("all_reduce", gradient.cell.shape) for gradient in gradients])


def what_does_not_divide_is_refused_before_anything_is_sent() -> None:
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
    square = init_device_mesh("cpu", (1, RANKS), mesh_dim_names=("dp", "tp"))
    refused = {
        "Heads: tp=2 does not divide h=3; tp=1 and tp=3 would.": Case({"h": 3, "h_kv": 3}).layer(),
        "Heads: tp=2 does not divide h_kv=1; tp=1 would.": Case({"h_kv": 1}).layer(),
        "HeadParallel: policy.grouping='strided' puts": Case(policy=Policy(grouping="strided")).layer(),
        "HeadParallel: a Linear is not split by heads;": nn.Linear(4, 4),
        "HeadParallel: a MultiheadAttention is not split by heads;": MultiheadAttention(4, 2),
        "the parameters are distributed or parametrised already;": nn.utils.parametrizations.weight_norm(Case().layer(), "w_q"),
    }
    with Sent() as sent:
        for said, module in refused.items():
            before = {name: parameter.data_ptr() for name, parameter in module.named_parameters()}
            kind = type(module)
            require_said(said, lambda module=module: parallelize_module(module, mesh, HeadParallel()))
            assert {name: parameter.data_ptr() for name, parameter in module.named_parameters()} == before
            assert not any(isinstance(parameter, DTensor) for parameter in module.parameters())
            assert type(module) is kind
        require_said("has 2; give mesh['tp']", lambda: parallelize_module(Case().layer(), square, HeadParallel()))
    require(sent.seen, [])
    with Sent() as sent:
        split = parallelize_module(Case().layer(), mesh, HeadParallel())
    require(len(sent.seen), len(list(split.parameters())))
    for twice in (split, fully_shard(Case().layer(), mesh=mesh)):
        require_said("distributed or parametrised already", lambda twice=twice: parallelize_module(twice, mesh, HeadParallel()))


def a_model_is_split_by_the_name_of_its_layer() -> None:
    class Scaled(MultiHeadAttention):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs) * 3

    torch.manual_seed(dist.get_rank())  # other parameters on each rank, of which those of the first are taken
    model = nn.ModuleDict({"attention": Scaled(D_MODEL, H, d_k=6), "linear": nn.Linear(2, 2)}).double()
    model["attention"].w_v.requires_grad_(False)
    dist.broadcast_object_list(drawn := [copy.deepcopy(model["attention"].state_dict())])
    mesh = init_device_mesh("cpu", (RANKS,))
    parallelize_module(model, mesh, {"attention": HeadParallel()})
    x = draw(BATCH, SEQ, D_MODEL)
    one = Scaled(D_MODEL, H, d_k=6).double()
    one.load_state_dict(drawn[0])
    found, wanted = model["attention"](x).detach(), one(x).detach()
    laid_out = {name: parameter.placements for name, parameter in model["attention"].named_parameters()}
    require_same({"output": found}, {"output": wanted})
    assert laid_out == {name: (Replicate() if name == "b_o" else Shard(0),) for name in laid_out}
    assert not model["attention"].w_v.requires_grad
    assert isinstance(model["attention"], Scaled)
    assert not isinstance(model["linear"].weight, DTensor)


def a_distributed_tensor_is_gathered() -> None:
    one, split = Case().layer(), tensor_parallel(Case().layer())
    mesh, keep = init_device_mesh("cpu", (RANKS,)), draw(BATCH, H, SEQ, SEQ) < 1
    x = draw(BATCH, SEQ, D_MODEL).requires_grad_()
    wanted = one(x, keep=keep)
    (wanted**2).sum().backward()
    for placement in (Replicate(), Shard(1)):
        given = distribute_tensor(x.detach(), mesh, [placement]).requires_grad_()
        y = split(given, keep=distribute_tensor(keep, mesh, [Shard(1)]))
        (y**2).sum().backward()
        require_same({"output": whole(y), "gradient": whole(given.grad)}, {"output": wanted.detach(), "gradient": x.grad})


def a_layer_without_memory_is_filled_after_it_is_split() -> None:
    wanted = MultiHeadAttention(D_MODEL, H, h_kv=2, d_k=6, qk_norm="rms", seed=3, dtype=torch.float64).state_dict()
    for setup in SETUPS.values():
        layer = setup(MultiHeadAttention(D_MODEL, H, h_kv=2, d_k=6, qk_norm="rms", device="meta", dtype=torch.float64))
        layer.to_empty(device="cpu").reset_parameters(3)
        require_same(state_of(layer), wanted)
        torch.manual_seed(dist.get_rank())
        layer.reset_parameters()
        found = whole(layer.w_q)
        torch.manual_seed(0)
        layer.reset_parameters(int(torch.randint(2**62, ())))  # the seed of the first rank
        require_same({"w_q": found}, {"w_q": whole(layer.w_q)})


def the_state_of_one_piece_can_be_loaded() -> None:
    case = CASES["a gain for all heads"]
    other = {name: draw(*array.shape, seed=9) for name, array in case.layer().state_dict().items()}
    for setup in SETUPS.values():
        layer = setup(case.layer())
        set_model_state_dict(layer, copy.deepcopy(other), options=StateDictOptions(full_state_dict=True))
        require_same(state_of(layer), other)


def nothing_is_dropped_but_in_training() -> None:
    one, x = Case().layer(), draw(BATCH, SEQ, D_MODEL)
    dropping = tensor_parallel(MultiHeadAttention.from_parameters(one.to_parameters(), dropout=0.5))
    trained, evaluated = dropping(x).detach(), dropping.eval()(x).detach()
    require_same({"output": evaluated}, {"output": one(x).detach()})
    assert (trained - evaluated).abs().max() > 0.01


def a_split_layer_can_be_compiled() -> None:
    one, split = Case().layer(), tensor_parallel(Case().layer())
    compiled = torch.compile(split, backend="aot_eager")
    found = []
    for layer in (one, compiled):
        x = draw(BATCH, SEQ, D_MODEL).requires_grad_()
        y = layer(x, causal=True)
        (y**2).sum().backward()
        found.append({"output": y.detach(), "gradient": x.grad})
    require_same(found[1], found[0])


def a_split_layer_is_saved_in_one_piece() -> None:
    case = CASES["a gain for all heads"]
    with tempfile.TemporaryDirectory() as folder:
        for setup in SETUPS.values():
            setup(case.layer()).save(f"{folder}/layer.safetensors")
            require_same(state_of(MultiHeadAttention.load(f"{folder}/layer.safetensors")), state_of(case.layer()))


SCENES = {
    scene.__name__: scene
    for scene in (
        decoding_goes_on_with_the_cache_of_its_own_heads,
        hooks_and_traces_see_the_steps_of_its_own_heads,
        errors_speak_of_all_heads,
        what_is_sent_is_what_the_books_say,
        what_does_not_divide_is_refused_before_anything_is_sent,
        a_model_is_split_by_the_name_of_its_layer,
        a_distributed_tensor_is_gathered,
        a_layer_without_memory_is_filled_after_it_is_split,
        the_state_of_one_piece_can_be_loaded,
        a_split_layer_is_saved_in_one_piece,
        nothing_is_dropped_but_in_training,
        a_split_layer_can_be_compiled,
    )
}
COMPARED = [(setup, case) for setup in SETUPS for case in CASES]


def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=20))
    tasks: dict[str, Callable[[], None]] = {f"{setup}: {case}": lambda pair=(setup, case): compare(*pair) for setup, case in COMPARED}
    with (folder / f"{rank}.jsonl").open("w") as report:
        for name, task in (tasks | SCENES).items():
            failed = ""
            try:
                task()
            except Exception:  # noqa: BLE001  # it is reported
                failed = traceback.format_exc()
            print(json.dumps([name, failed]), file=report, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
