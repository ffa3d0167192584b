"""Files of layers: safetensors, with the settings in their metadata; every library reads what another wrote."""

import json
from dataclasses import asdict, fields
from os import PathLike
from typing import Any

from ..errors import ConfigError
from ..spec.parameters import Parameters
from ..spec.policy import Policy, Rotation

_KEY = "attnspec"
_KNOWN = {field.name for field in fields(Parameters)}


def describe(policy: Policy, dropout: float, /) -> dict[str, str]:
    """Write the settings as metadata.

    Args:
        policy: the conventions.
        dropout: the share of weights that is dropped in training.

    Returns:
        The metadata.
    """
    return {_KEY: json.dumps({"policy": asdict(policy), "dropout": dropout})}


def load(path: str | PathLike[str], framework: str, /) -> tuple[Parameters[Any], Policy, float]:
    """Read a file.

    Args:
        path: the file.
        framework: `np` or `pt`.

    Returns:
        The parameters, the policy, and the share of weights that is dropped in training.

    Raises:
        ConfigError: it is no file of a layer.
        AttnspecError: its tensors do not fit together.
    """
    from safetensors import safe_open

    with safe_open(path, framework=framework) as file:
        metadata = file.metadata() or {}
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is no mapping
    if _KEY not in metadata or not tensors.keys() <= _KNOWN:
        raise ConfigError(f"load: {path} was not saved by a layer; from_layout reads what other projects store.")
    settings = json.loads(metadata[_KEY])
    policy: dict[str, Any] = settings["policy"]
    rotation = None if policy["rotation"] is None else Rotation(**policy["rotation"])
    conventions = Policy(**{**policy, "rotation": rotation, "window": tuple(policy["window"])})
    return Parameters(**tensors), conventions, settings["dropout"]
