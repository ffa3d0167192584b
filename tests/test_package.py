"""The package as a whole: what it imports, in which direction, how long that takes, and what it says of itself."""

import ast
import importlib
import pkgutil
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import attnspec

ROOT = Path(attnspec.__file__).parent
MODULES = sorted(info.name for info in pkgutil.walk_packages([str(ROOT)], "attnspec."))

# What each room may import, besides itself. `attnspec` alone is the manifest of what is public.
GROUND = {"errors", "arrays", "axes", "signature", "slips", "judge", "step"}
ROOMS = {
    "errors": set(),
    "arrays": {"errors", "backends"},
    "backends": set(),
    "axes": {"errors"},
    "signature": {"axes"},
    "slips": {"arrays", "signature"},
    "judge": {"arrays", "axes", "errors", "signature", "slips"},
    "step": {"axes", "errors", "judge", "signature"},
    "spec": GROUND,
    "bookkeeping": {*GROUND, "spec"},
    "layouts": {*GROUND, "spec"},
    "heads": {*GROUND, "spec", "bookkeeping", "layouts"},
    "layers": {*GROUND, "spec", "layouts"},
    "torch": {"layers"},
    "distributed": {"layers"},
    "numpy": {"layers"},
    "oracle": {*GROUND, "spec", "bookkeeping", "layouts", "layers"},
    "pytest_plugin": {"errors", "oracle"},
    "cli": {*GROUND, "spec", "bookkeeping", "heads", "oracle"},
}


def rooms_imported_by(module: str) -> set[str]:
    path = ROOT.joinpath(*module.split(".")[1:])
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            names = [f"{base}.{alias.name}" for alias in node.names] if base in {"attnspec", package} else [base]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        found |= {name.split(".")[1] for name in names if name.startswith("attnspec.")}
        assert "attnspec" not in names, f"{module} imports the manifest"
    return found


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_one_way(module):
    room = module.split(".")[1]
    assert rooms_imported_by(module) <= ROOMS[room] | {room}


def run_python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_import_brings_no_framework_and_nothing_slow():
    loaded = run_python("import sys, attnspec; print(*sys.modules)").split()
    assert "jaxtyping" in loaded
    assert not {
        "torch",
        "jax",
        "beartype",
        "array_api_compat",
        "einops",
        "safetensors",
        "typer",
        "rich",
        "threadpoolctl",
        "transformers",
    } & set(loaded)


def test_a_numpy_user_never_imports_pytorch():
    code = "import sys, numpy as np, attnspec; attnspec.score(np.ones((1, 2, 3, 5)), np.ones((1, 2, 7, 5))); print('torch' in sys.modules)"
    assert run_python(code) == "False"


def test_import_takes_at_most_150_milliseconds_more_than_numpy():
    """Of the processor's time, which other work on the machine does not stretch."""
    code = "import numpy, time; t = time.process_time(); import attnspec; print(time.process_time() - t)"
    assert min(float(run_python(code)) for _ in range(5)) <= 0.15


def test_the_version_is_that_of_the_distribution():
    assert attnspec.__version__ == version("attnspec")


def test_the_manifest_is_sorted_and_complete():
    tree = ast.parse((ROOT / "__init__.py").read_text())
    imports = [
        (node.module, node.names[0].name, node.names[0].asname) for node in tree.body if isinstance(node, ast.ImportFrom) and node.level
    ]
    assert all(name == public for _, name, public in imports)
    assert [module for module, *_ in imports] == sorted(module for module, *_ in imports)
    steps = {name for name in attnspec.step._steps if hasattr(attnspec, name)}
    assert steps == set(attnspec.step._steps)


@pytest.mark.parametrize("name", [name for name in dir(attnspec) if not name.startswith("_") and callable(getattr(attnspec, name))])
def test_every_public_name_is_documented(name):
    documentation = getattr(attnspec, name).__doc__
    assert documentation
    if name in attnspec.step._steps:
        assert "Args:" in documentation
        assert "Returns:" in documentation
        assert "Raises:" in documentation


def test_shapes_stand_in_annotations_and_nowhere_else():
    """A docstring that lists axes in brackets states a shape that nothing checks."""
    listed = re.compile(r"[(\[](batch|h|h_kv|seq|seq_q|seq_k|d_k|d_v|d_model)(, ?| )(\w+)(, ?| )")
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Module)) and (text := ast.get_docstring(node)):
                assert not listed.search(text), f"{path.name}: {listed.search(text).group()}"
