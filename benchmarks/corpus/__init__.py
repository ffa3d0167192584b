"""Faults of attention that were reported in public, each written again beside a right twin, to be found by the oracle."""

from importlib import import_module
from pkgutil import iter_modules

from .case import Case


def cases() -> list[Case]:
    """Collect the cases of all modules of this package, by the number of the fault."""
    modules = [import_module(f".{found.name}", __name__) for found in iter_modules(__path__)]
    return sorted((case for module in modules for case in getattr(module, "CASES", [])), key=lambda case: case.fault)
