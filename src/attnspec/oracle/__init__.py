"""The oracle: tells whether an implementation of attention is right, and if not, what is wrong with it."""

from .entries import assert_conforms as assert_conforms
from .entries import check as check
from .entries import check_attention as check_attention
from .entries import check_cache as check_cache
from .entries import check_properties as check_properties
from .isolation import run_isolated as run_isolated
from .job import Job as Job
from .report import Check as Check
from .report import ConformanceError as ConformanceError
from .report import Counterexample as Counterexample
from .report import Finding as Finding
from .report import Power as Power
from .report import Report as Report
