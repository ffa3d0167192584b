"""The faults, each as another way to compute attention, and the kinds they are of."""

from .kinds import KINDS as KINDS
from .kinds import OTHER as OTHER
from .kinds import Kind as Kind
