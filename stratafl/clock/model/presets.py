"""Networks by name: those that come with the package, each a TOML file that names its source."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stratafl.base.errors import InvalidInput, unknown
from stratafl.clock.model.network import Network, text

FOLDER = Path(__file__).parent / "networks"


NetworkLike = Network | str | Path | Mapping[str, Any]


def presets() -> list[str]:
    """Their names."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def network(given: NetworkLike, field: str = "--network") -> Network:
    """A network by its preset's name, from a TOML file, or from tables; a table with a name and
    nothing of a network's own is that preset or file, about which it may say something else."""
    if isinstance(given, Network):
        return given
    if isinstance(given, Mapping):
        if "name" not in given or not {"name", "about", "source"}.issuperset(given):
            return Network.of(given)
        named = network(given["name"], field)
        about, source = (text(key, given.get(key, getattr(named, key))) for key in ("about", "source"))
        return dataclasses.replace(named, about=about, source=source)
    if not isinstance(given, str | Path):
        raise InvalidInput(field, given, "must be a preset's name, the path of a .toml file, or tables")
    if isinstance(given, str) and given in presets():
        return Network.load(FOLDER / f"{given}.toml")
    path = Path(given)
    if path.suffix == ".toml":
        if not path.is_file():
            raise InvalidInput(field, path, "no such file")
        return Network.load(path)
    problem = unknown(field, str(given), presets())
    raise InvalidInput(field, str(given), f"{problem.allowed}; or the path of a .toml file")
