"""The catalogue: every fault that the oracle can name."""

from .addresses import overflow_faults
from .biases import cap_faults, position_bias_faults
from .caches import cache_faults
from .causal import causal_faults
from .fault import Fault
from .grouping import grouping_faults, head_faults
from .layout import layout_faults
from .masks import mask_faults
from .projections import bias_faults, packing_faults, routing_faults
from .ragged import ragged_faults
from .rotations import rotation_faults
from .rows import row_faults
from .rules import ignored_faults
from .scales import scale_faults
from .softmax import softmax_faults
from .variants import variant_faults
from .weights import dropout_faults, weights_faults
from .windows import window_faults

_FAMILIES = (
    layout_faults, routing_faults, bias_faults, packing_faults, grouping_faults, head_faults,
    scale_faults, cap_faults, position_bias_faults, softmax_faults, dropout_faults, weights_faults,
    ignored_faults, mask_faults, causal_faults, window_faults, row_faults, rotation_faults, ragged_faults, overflow_faults,
    cache_faults, variant_faults,
)  # fmt: skip

CATALOGUE: tuple[Fault, ...] = tuple(fault for family in _FAMILIES for fault in family())
"""All of them; those that give the same are told apart by their rank."""
