"""Settings of `attnspec check`: from pyproject.toml and from the command line, as the examination takes them."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import AttnspecError, ConfigError
from ..spec.parameters import Heads
from ..spec.policy import Policy, Rotation
from .job import Entry, Job
from .written import layout_of, named_arguments

KEYS = (
    "target", "args", "call", "mask", "mask_axes", "causal", "layout", "heads", "policy", "options", "order", "attention", "cache",
    "properties", "library", "effort", "seed", "timeout", "memory", "in_process", "report", "json",
)  # fmt: skip
"""What may be set, on the command line or in `[tool.attnspec]`."""

_CHOICES = {
    "mask": ("keep", "drop", "additive", "lengths", "none"),
    "order": ("bhsd", "bshd"),
    "effort": ("quick", "default", "thorough"),
    "library": ("numpy", "torch", "jax"),
}
_ENTRIES: dict[str, Entry] = {"attention": "check_attention", "cache": "check_cache", "properties": "check_properties"}


def gathered(target: str, said: Mapping[str, Any], /, *, directory: Path) -> dict[str, Any]:
    """Gather what is set: in pyproject.toml for all, there for this subject, and on the command line, the later over the earlier.

    Args:
        target: the target, or the name of a subject of pyproject.toml.
        said: what was said on the command line; None where nothing was.
        directory: where pyproject.toml may lie.

    Returns:
        The settings by name, with `target`.

    Raises:
        ConfigError: pyproject.toml cannot be read, holds what nobody knows, or has no such subject.
    """
    table = _table(directory / "pyproject.toml")
    subjects = table.pop("subjects", {})
    own = subjects.get(target, {})
    if not own and ":" not in target:
        known = f"; the subjects of pyproject.toml are {', '.join(subjects)}" if subjects else ""
        raise ConfigError(f"check: {target!r} is no target; write it as module:attribute, for example torch.nn:MultiheadAttention{known}.")
    found = {"target": target} | _known(table, "[tool.attnspec]") | _known(own, f"[tool.attnspec.subjects.{target}]")
    found |= {name: value for name, value in said.items() if value is not None}
    for name, choices in _CHOICES.items():
        if found.get(name, choices[0]) not in choices:
            raise ConfigError(f"check: {name}={found[name]!r} is not known; it is one of {', '.join(choices)}.")
    return found


def _table(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return dict(tomllib.loads(path.read_text(encoding="utf-8")).get("tool", {}).get("attnspec", {}))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"check: {path.name} cannot be read: {error}") from error


def _known(table: Mapping[str, Any], where: str) -> dict[str, Any]:
    found = {name.replace("-", "_"): value for name, value in table.items()}
    if strange := [name for name in found if name not in KEYS]:
        raise ConfigError(f"check: {where} sets {strange[0]!r}, which is not known; the names are {', '.join(KEYS)}.")
    return found


def job_of(settings: Mapping[str, Any], /) -> Job:
    """Make a job of settings.

    Args:
        settings: the settings by name.

    Returns:
        The job.

    Raises:
        ConfigError: a setting cannot be read, or several ways to examine exclude each other.
    """
    chosen = [entry for name, entry in _ENTRIES.items() if settings.get(name)]
    if len(chosen) > 1:
        raise ConfigError(f"check: {', '.join(name for name in _ENTRIES if settings.get(name))} exclude each other; say one of them.")
    entry = chosen[0] if chosen else None
    kept = {name: settings[name] for name in ("mask", "causal", "order", "library", "seed") if name in settings}
    if entry != "check_properties" and "effort" in settings:
        kept["effort"] = settings["effort"]
    if "mask_axes" in settings:
        kept["mask_axes"] = _split(settings["mask_axes"], ";")
    if "options" in settings:
        kept["options"] = _split(settings["options"], ",")
    if "layout" in settings:
        kept["layout"] = layout_of(settings["layout"])
    if "policy" in settings:
        kept["policy"] = _made(Policy, named_arguments(settings["policy"], option="--policy", makers={"Rotation": Rotation}), "--policy")
    return Job(settings["target"], entry, settings.get("args"), settings.get("call"), kept | _heads(settings, entry))


def _heads(settings: Mapping[str, Any], entry: Entry | None) -> dict[str, Any]:
    if "heads" not in settings:
        return {}
    sizes = named_arguments(settings["heads"], option="--heads")
    if entry == "check_properties" and set(sizes) == {"d_model"}:
        return sizes
    return {"heads": _made(Heads, sizes, "--heads")}


def _made(kind: Any, arguments: Mapping[str, Any], option: str) -> Any:
    try:
        return kind(**arguments)
    except AttnspecError:
        raise
    except TypeError as error:
        raise ConfigError(f"check: {option}: {error}.") from error


def _split(said: Any, mark: str) -> tuple[str, ...]:
    parts = said.split(mark) if isinstance(said, str) else said
    return tuple(part.strip() for part in parts if part.strip())
