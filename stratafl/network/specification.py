"""Links and devices as data: network files and presets."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stratafl.base.errors import InvalidInput, first_line_of, unknown_name
from stratafl.base.files import read_bounded
from stratafl.network.distributions import Distribution

ZERO, ONE = Distribution.constant(0), Distribution.constant(1)

POSITIVE = ("up_mbit_s", "down_mbit_s", "pipe_up_mbit_s", "pipe_down_mbit_s", "step_s", "gflop_s",
            "flops_per_sample", "slowdown")  # fmt: skip
"""Quantities that must be above 0; the others may be 0."""

CHANCES = ("availability", "dropout")

SMALLEST, LARGEST = 1e-60, 1e60
"""Of a quantity that must be above 0, and of any: so what is worked out from several of them is a
number, too."""

LONGEST = 300
"""Characters of a text."""

STEP_TIME = "how fast a leaf trains"


@dataclass(frozen=True)
class Tier:
    """The edges of one level: each child's link to its parent, and what a parent does.

    A message takes `overhead_s` at its sender, then its bytes and `overhead_bytes` go over the
    link, then `latency_s` and a jitter pass until it is there.
    """

    name: str = ""
    up_mbit_s: Distribution | None = None
    """Of the child's own link, towards its parent, in 10^6 bits per second."""
    down_mbit_s: Distribution | None = None
    """The other way; drawn from what up is unless given."""
    latency_s: Distribution = ZERO
    """One way."""
    jitter_s: Distribution = ZERO
    """Added to it, drawn anew for every message."""
    pipe_up_mbit_s: Distribution | None = None
    """What a parent takes in from all children together: those that send at the same time share it
    fairly. None: no limit."""
    pipe_down_mbit_s: Distribution | None = None
    """What a parent gives to all of them together."""
    overhead_bytes: Distribution = ZERO
    """Of the protocol, per message."""
    overhead_s: Distribution = ZERO
    merge_s: Distribution = ZERO
    """A parent's time for one meeting."""
    merge_s_per_child: Distribution = ZERO
    """And for each child that came to it."""
    up_watts: Distribution = ZERO
    """While a child sends."""
    down_watts: Distribution = ZERO
    """While a parent sends, per child."""
    merge_watts: Distribution = ZERO
    money_per_gb_up: Distribution = ZERO
    money_per_gb_down: Distribution = ZERO
    parent_money_per_hour: Distribution = ZERO
    """Of each parent, for as long as the run goes."""


@dataclass(frozen=True)
class Device:
    """What trains: how long a step takes, and when the device is there at all."""

    step_s: Distribution | None = None
    """Seconds of one local step; else the time follows from the two below."""
    gflop_s: Distribution | None = None
    """10^9 floating-point operations per second that training really gets."""
    flops_per_sample: Distribution | None = None
    """Of training, forward and backward; that of the run's model unless given."""
    slowdown: Distribution = ONE
    """A factor of its computing, drawn anew for every meeting."""
    pause_s: Distribution = ZERO
    """Idle before it computes, drawn anew for every meeting."""
    availability: Distribution = ONE
    """The chance that it is there when its parent has something for it; otherwise it comes back
    after `away_s`. A synchronous parent waits."""
    away_s: Distribution = ZERO
    dropout: Distribution = ZERO
    """The chance that its work is lost before it is sent, and is done again from the start."""
    watts: Distribution = ZERO
    """While it computes."""
    money_per_hour: Distribution = ZERO
    """Of each leaf, for as long as the run goes."""


LINK = ("up_mbit_s", "down_mbit_s", "latency_s", "jitter_s", "overhead_bytes", "overhead_s",
        "up_watts", "down_watts", "money_per_gb_up", "money_per_gb_down")  # fmt: skip
"""Quantities of a tier that belong to the child of an edge; the others are its parent's."""

TIER = tuple(each.name for each in dataclasses.fields(Tier) if each.name != "name")

DEVICE = tuple(each.name for each in dataclasses.fields(Device))


@dataclass(frozen=True)
class Network:
    """Links and devices of a tree, whatever its depth."""

    name: str
    tiers: tuple[Tier, ...]
    """Counted from the leaves; the last stands for all above."""
    leaf: Device
    about: str = ""
    source: str = ""
    currency: str = ""
    direct: Tier | None = None
    """The only edge level of a tree of depth 1, if it is not the first tier."""
    nodes: tuple[tuple[str, tuple[tuple[str, Distribution], ...]], ...] = ()
    """Names or patterns, each with the quantities that differ there; later ones win."""

    @staticmethod
    def of(values: Mapping[str, Any], name: str = "network", folder: Path | None = None) -> Network:
        """From nested tables, such as a parsed TOML file, in a folder that its files lie in."""
        known = [each.name for each in dataclasses.fields(Network) if each.name != "tiers"] + ["tier"]
        for key in values:
            if key not in known:
                raise unknown_name("network key", key, known)
        tiers = values.get("tier", [])
        if isinstance(tiers, Mapping):
            tiers = [tiers]
        if not isinstance(tiers, list | tuple) or not tiers:
            raise InvalidInput("tier", tiers, "needs one [[tier]] at least: the leaves' links to their parents")
        direct = values.get("direct")
        return Network(
            name=text("name", values.get("name", name)) or name,
            tiers=tuple(_tier(f"tier {number}", each, folder) for number, each in enumerate(tiers, 1)),
            leaf=_device(values.get("leaf", {}), folder),
            direct=None if direct is None else _tier("direct", direct, folder),
            nodes=_nodes(values.get("nodes", {}), folder),
            **{key: text(key, values.get(key, "")) for key in ("about", "source", "currency")},
        )

    @staticmethod
    def load(path: Path) -> Network:
        """From a TOML file."""
        try:
            values = tomllib.loads(read_bounded(path).decode("utf-8-sig"))
        except (ValueError, RecursionError) as problem:
            raise InvalidInput("network", path, f"not valid TOML: {first_line_of(problem)}") from None
        return Network.of(values, path.stem, path.parent)

    def as_tables(self) -> dict[str, Any]:
        """Nested tables from which `of` makes the same again, without any file."""
        texts = {key: getattr(self, key) for key in ("name", "about", "source", "currency") if getattr(self, key)}
        return {
            **texts,
            "tier": [_table(tier) for tier in self.tiers],
            "leaf": _table(self.leaf),
            **({} if self.direct is None else {"direct": _table(self.direct)}),
            "nodes": {pattern: {key: each.as_plain() for key, each in given} for pattern, given in self.nodes},
        }

    @property
    def needs_flops(self) -> bool:
        """Whether how long a step takes may depend on the model's operations."""
        computes = self.leaf.gflop_s is not None and self.leaf.flops_per_sample is None
        return computes or any(key == "gflop_s" for _, given in self.nodes for key, _ in given)

    def is_like(self, other: Network) -> bool:
        """Whether links and devices are the same, whatever it is called."""
        return all(getattr(self, each) == getattr(other, each) for each in ("tiers", "leaf", "direct", "nodes"))

    def tier(self, level: int, depth: int) -> Tier:
        """That of an edge level, 1 for the root's, of a tree so deep."""
        if depth == 1 and self.direct is not None:
            return self.direct
        return self.tiers[min(depth - level, len(self.tiers) - 1)]

    def title(self, level: int, depth: int) -> str:
        """What an edge level is called in tables."""
        return self.tier(level, depth).name or f"level {level}"


def _table(quantities: Tier | Device) -> dict[str, Any]:
    """Those that are not as usual."""
    found = {}
    for each in dataclasses.fields(quantities):
        value = getattr(quantities, each.name)
        if value != each.default:
            found[each.name] = value if isinstance(value, str) else value.as_plain()
    return found


def text(key: str, value: object) -> str:
    """A network's name, or what it says of itself."""
    if not isinstance(value, str):
        raise InvalidInput(key, value, "must be a text")
    if not value.isprintable() or len(value) > LONGEST:
        raise InvalidInput(key, value, f"must be a line of printable text, of at most {LONGEST} characters")
    return value


def _filled(kind: Any, where: str, values: Any, folder: Path | None) -> dict[str, Any]:
    if not isinstance(values, Mapping):
        raise InvalidInput(where, values, "must be a table")
    known = [each.name for each in dataclasses.fields(kind)]
    for key in values:
        if key not in known:
            raise unknown_name(f"{where} key", key, known)
    return {
        key: text(f"{where}.{key}", value) if key == "name" else _quantity(f"{where}.{key}", key, value, folder)
        for key, value in values.items()
    }


def _quantity(where: str, key: str, value: Any, folder: Path | None) -> Distribution:
    drawn = Distribution.of(where, value, folder)
    if key == "dropout" and drawn.at(1.0) >= 1:
        raise InvalidInput(where, value, "must be a finite number at least 0 and below 1")
    if key in POSITIVE:
        return drawn.within(where, above=0).within(where, at_least=SMALLEST, at_most=LARGEST)
    return drawn.within(where, at_least=0, at_most=1 if key in CHANCES else LARGEST)


def _tier(where: str, values: Any, folder: Path | None) -> Tier:
    tier = Tier(**_filled(Tier, where, values, folder))
    if tier.up_mbit_s is None:
        raise InvalidInput(where, dict(values), "needs up_mbit_s, the bandwidth of a child's link")
    return dataclasses.replace(tier, down_mbit_s=tier.down_mbit_s or tier.up_mbit_s)


def _device(values: Any, folder: Path | None) -> Device:
    device = Device(**_filled(Device, "leaf", values, folder))
    if (device.step_s is None) == (device.gflop_s is None):
        raise InvalidInput("leaf", dict(values), f"needs either step_s or gflop_s: {STEP_TIME}")
    return device


def _nodes(values: Any, folder: Path | None) -> tuple[tuple[str, tuple[tuple[str, Distribution], ...]], ...]:
    if not isinstance(values, Mapping):
        raise InvalidInput("nodes", values, 'must be tables, such as [nodes."paris/*"]')
    found = []
    for pattern, given in values.items():
        where = f"nodes.{pattern}"
        if not isinstance(given, Mapping):
            raise InvalidInput(where, given, "must be a table")
        for key in given:
            if key not in (*TIER, *DEVICE):
                raise unknown_name(f"{where} key", key, (*TIER, *DEVICE))
        if "step_s" in given and "gflop_s" in given:
            raise InvalidInput(where, dict(given), f"takes either step_s or gflop_s: {STEP_TIME}")
        quantities = tuple((key, _quantity(f"{where}.{key}", key, value, folder)) for key, value in given.items())
        found.append((pattern, quantities))
    return tuple(found)


FOLDER = Path(__file__).parent / "presets"


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
    problem = unknown_name(field, str(given), presets())
    raise InvalidInput(field, str(given), f"{problem.allowed}; or the path of a .toml file")
