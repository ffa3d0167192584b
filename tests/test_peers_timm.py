"""timm: the Attention of its vision transformers is the specification, in its own layout."""

import sys
import types
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from peers import DOUBLE, assert_equal, draw_problem

import attnspec
from attnspec import layouts

pytestmark = pytest.mark.peers

HEADS = attnspec.Heads(d_model=24, h=4)


@pytest.fixture(scope="module")
def attention():
    """Its class, imported without what timm has of torchvision: its datasets, and a norm that attention does not use."""
    spec = find_spec("timm")
    if spec is None:
        pytest.skip("timm is not installed")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("timm", "torchvision", "torchvision.ops", "torchvision.ops.misc"):
            patch.setitem(sys.modules, name, types.ModuleType(name))
        sys.modules["timm"].__path__ = spec.submodule_search_locations
        sys.modules["torchvision.ops.misc"].FrozenBatchNorm2d = torch.nn.BatchNorm2d
        from timm.layers.attention import Attention
    return Attention


@pytest.mark.parametrize("fused", [False, True])
def test_timm_computes_the_specification_in_the_layout_of_timm(attention, fused):
    problem = draw_problem(HEADS)
    layer = attention(HEADS.d_model, num_heads=HEADS.h, qkv_bias=True).double()
    layer.fused_attn = fused
    layer.load_state_dict({name: torch.from_numpy(array) for name, array in layouts.write(problem.parameters, "timm").items()})
    with torch.no_grad():
        y = layer(torch.from_numpy(problem.x))
    assert_equal(np.asarray(y), attnspec.multi_head_attention(problem.x, problem.parameters), within=DOUBLE)
