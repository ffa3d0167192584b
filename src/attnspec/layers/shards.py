"""Tensor parallelism: each rank has whole groups of heads, and what they found is added up."""

from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from ..axes import shapes_of
from ..errors import ConfigError, ShapeError
from ..spec.cache import Cache
from ..spec.chain import Found
from ..spec.parameters import Heads, Parameters
from ..spec.rules import Flags, Mask
from .base import NAMES
from .torch_layer import MultiHeadAttention

_FIRST_AXES = {name: shape.axes[0] for name, (shape,) in shapes_of(Parameters).items()}


class HeadParallel(ParallelStyle):
    """A plan for `torch.distributed.tensor.parallel.parallelize_module` that gives each rank some heads of a `MultiHeadAttention`.

    The ranks must divide `h` and `h_kv`: heads that share keys stay together. Every rank is called with all of the same arguments,
    for all heads, and returns all of the output; a DTensor among them is gathered first. Of its own it has its heads' parameters, as
    DTensors, and their cache; hooks and traces see the steps of its own heads, `mix` before the outputs are added up.

    One all-reduce adds the outputs up, and one each, backward, the gradients of `x`, of another context, of a bias, and of a gain
    that all heads share. `need="weights"` gathers the weights of all heads. Ranks that are seeded alike drop alike weights, each of
    its own heads.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        layer, share = _splittable(module, device_mesh)
        for name, parameter in layer.named_parameters(recurse=False):
            axis = _FIRST_AXES[name]
            of_heads = axis.names & {"h", "h_kv"} and not (axis.broadcast and parameter.shape[0] == 1)
            split = distribute_tensor(parameter, device_mesh, [Shard(0) if of_heads else Replicate()], src_data_rank=self.src_data_rank)
            layer.register_parameter(name, nn.Parameter(split, requires_grad=parameter.requires_grad))
        kind = type(layer)
        layer.__class__ = SplitAttention if kind is MultiHeadAttention else type(f"Split{kind.__name__}", (SplitAttention, kind), {})
        layer._is_plain = False
        cast("SplitAttention", layer)._share = share
        return layer


def _splittable(module: nn.Module, mesh: DeviceMesh) -> tuple[MultiHeadAttention, Heads]:
    """Refuse what cannot be split, before anything is sent, and work out the sizes of one rank."""
    if not isinstance(module, MultiHeadAttention):
        raise ConfigError(f"HeadParallel: a {type(module).__name__} is not split by heads; name an attnspec.torch.MultiHeadAttention.")
    if mesh.ndim != 1:
        raise ConfigError(f"HeadParallel: heads are split along one dimension of a mesh, but {mesh} has {mesh.ndim}; give mesh['tp'].")
    if module._parameters.keys() != set(NAMES) or any(isinstance(parameter, DTensor) for parameter in module.parameters()):
        raise ConfigError("HeadParallel: the parameters are distributed or parametrised already; split the heads first.")
    share = module.heads.split(mesh.size(), name=mesh.mesh_dim_names[0] if mesh.mesh_dim_names else "ranks")
    if mesh.size() > 1 and share.h_kv != share.h and module.policy.grouping == "strided":
        raise ConfigError("HeadParallel: policy.grouping='strided' puts the heads of a group on several ranks; use 'contiguous'.")
    return module, share


class SplitAttention(MultiHeadAttention):
    """A layer of which this rank has some heads; made by `HeadParallel`, judged as the layer of all heads."""

    _share: Heads

    def _blank(self, shape: tuple[int, ...]) -> Tensor:
        (batch, _, *rest), w_k = shape, cast("DTensor", self.w_k)
        return w_k.to_local().new_empty((batch, self._share.h_kv, *rest))

    def _whole(self, options: dict[str, Any]) -> dict[str, Any]:
        if "cache" not in options:
            return options
        cache, ranks = options["cache"], self.heads.h_kv // self._share.h_kv
        keys, values = (
            rows.new_empty(()).expand(rows.shape[0], rows.shape[1] * ranks, *rows.shape[2:]) for rows in (cache.keys, cache.values)
        )
        return options | {"cache": Cache(keys, values, cache.evicted)}

    def _run(self, x: Any, parameters: Any, options: dict[str, Any], causal: bool | None, need: str | None) -> Found[Any]:  # noqa: FBT001
        mesh = parameters.w_q.device_mesh
        shares = {name: _share_of(parameter, mesh) for name, parameter in vars(parameters).items()} | {"b_o": None}
        given = {id(array): array for array in (x, *options.values())}  # one that is given twice is spread once
        spread = {key: _spread(array, mesh) for key, array in given.items()}
        options = {name: _narrowed(name, spread[id(option)], self.heads.h, mesh) for name, option in options.items()}
        found = super()._run(spread[id(x)], type(parameters)(**shares), options, causal, need)
        y = DTensor.from_local(found.y, mesh, [Partial()], run_check=False).full_tensor()
        if parameters.b_o is not None:
            y = y + parameters.b_o.to_local().to(y.dtype)
        weights = None if found.weights is None else DTensor.from_local(found.weights, mesh, [Shard(1)], run_check=False).full_tensor()
        return Found(y, weights, found.cache)


def _share_of(parameter: Any, mesh: DeviceMesh) -> Any:
    """The part of a parameter that this rank's heads use."""
    if parameter is None or parameter.placements[0].is_shard():
        return None if parameter is None else parameter.to_local()
    return _spread(parameter, mesh)


def _spread(whole: Any, mesh: DeviceMesh) -> Any:
    """What every rank has, so that its gradients, of each rank's own heads, are added up."""
    if isinstance(whole, DTensor):
        whole = whole.full_tensor()
    if not (isinstance(whole, Tensor) and whole.requires_grad and torch.is_grad_enabled()):
        return whole
    return DTensor.from_local(whole, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])


def _narrowed(name: str, option: Any, h: int, mesh: DeviceMesh) -> Any:
    """Narrow a mask or a bias to this rank's heads."""
    if isinstance(option, Mask):
        return Mask(tuple(_narrowed_rule(rule, h, mesh) for rule in option.rules))
    return _own_heads(f"MultiHeadAttention: {name}", option, 1, h, mesh) if name in {"keep", "bias"} else option


def _narrowed_rule(rule: Any, h: int, mesh: DeviceMesh) -> Any:
    if not isinstance(rule, Flags) or "h" not in rule.axes:
        return rule
    return replace(rule, array=_own_heads(f"Mask: {rule.polarity}", rule.array, rule.axes.index("h"), h, mesh))


def _own_heads(name: str, whole: Any, axis: int, h: int, mesh: DeviceMesh) -> Any:
    if whole.shape[axis] == 1:
        return whole
    if whole.shape[axis] != h:
        raise ShapeError(f"{name} {tuple(whole.shape)} has h={whole.shape[axis]}, but h={h} was set by the layer.")
    return whole.chunk(mesh.size(), axis)[mesh.get_local_rank()]
