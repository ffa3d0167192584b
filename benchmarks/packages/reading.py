"""How implementations are read out of the packages of others, and declared."""

import ast
import importlib
import importlib.util
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from attnspec import Heads, Policy

from .entry import Layout

EVEN = Heads(d_model=24, h=4)
GROUPED = Heads(d_model=24, h=4, h_kv=2)
FREE = Heads(d_model=24, h=4, d_k=5, d_v=3)
ROWS = {row: Policy(empty_row=row) for row in ("zero", "nan", "uniform", "any")}
ROOM = 64
"""How many tokens a layer is built for, where it has to be told."""


def module_of(folder: Path, name: str, /) -> Any:
    """Import a module of a package, which is on the path no longer than that takes."""
    sys.path.insert(0, str(folder))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(folder))


def module_of_file(path: Path, /) -> Any:
    """Import one file of a package, and not the package."""
    spec = importlib.util.spec_from_file_location(f"{path.parent.name}_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def taken(path: Path, names: str, /, **known: Any) -> SimpleNamespace:
    """Take classes and functions out of a file whose imports are heavy, or that runs more than definitions."""
    wanted = names.split()
    body = [node for node in ast.parse(path.read_text()).body if getattr(node, "name", None) in wanted]
    space = {"torch": torch, "nn": nn, "math": math, **known}
    exec(compile(ast.Module(body, []), str(path), "exec"), space)  # noqa: S102  # to run it is what it was installed for
    return SimpleNamespace(**{name: space[name] for name in wanted})


def layer(heads: Heads, layout: Layout, call: Callable[..., Any], /, **more: Any) -> dict[str, Any]:
    """Declare a whole layer."""
    return {"heads": heads, "layout": layout, "call": call, **more}


def ready(module: nn.Module, /) -> nn.Module:
    """Make a module of PyTorch double and undropped."""
    return module.double().eval()
