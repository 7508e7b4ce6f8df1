"""Networks by name: those that come with the package, each a TOML file that names its source."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stratafl.base.errors import InvalidInput, unknown
from stratafl.clock.model.network import Network

FOLDER = Path(__file__).parent / "networks"


NetworkLike = Network | str | Path | Mapping[str, Any]


def presets() -> list[str]:
    """Their names."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def network(given: NetworkLike, field: str = "--network") -> Network:
    """A network by its preset's name, from a TOML file, or from tables; a table with nothing but a
    name is that preset or file."""
    if isinstance(given, Network):
        return given
    if isinstance(given, Mapping):
        if set(given) != {"name"}:
            return Network.of(given)
        given = given["name"]
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
