"""The catalogue: every fault that the oracle can name."""

from .caches import cache_faults
from .fault import Fault
from .masks import mask_and_position_faults
from .scores import score_faults
from .structure import structure_faults

CATALOGUE: tuple[Fault, ...] = (*structure_faults(), *score_faults(), *mask_and_position_faults(), *cache_faults())
"""All of them; those that give the same are told apart by their rank."""
