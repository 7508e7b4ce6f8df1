"""Links and devices as data: distributions of quantities, network files and presets.

Distributions are sampled by the inverse of their distribution function: one uniform number yields
one value, so a sample is a function of its position in the run, as all values of `base.rng` are.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import math
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from stratafl.base.errors import InvalidInput, first_line_of, unknown_name
from stratafl.base.files import read_bounded
from stratafl.base.validation import check_keys, check_number, name_and_params

LOWEST, HIGHEST = 2.0**-54, 1 - 2.0**-53
"""Range of the probabilities that are sampled: a tail is unbounded, a sample is not."""
SHIFT, AT_LEAST, AT_MOST = "shift", "at_least", "at_most"
COMMON_KEYS = (SHIFT, AT_LEAST, AT_MOST)
"""Parameters of every distribution: an offset, and bounds to clip at."""
EMPIRICAL = "empirical"


class _Family(NamedTuple):
    parameters: tuple[str, ...]
    quantile: Callable[[np.ndarray, Mapping[str, float]], np.ndarray]
    positive: tuple[str, ...] = ()
    """Parameters that must be above 0."""
    defaults: Mapping[str, float] = {}


def _normal(u: np.ndarray) -> np.ndarray:
    return np.asarray(torch.special.ndtri(torch.as_tensor(u, dtype=torch.float64)).numpy())


def _normal_cdf(z: float) -> float:
    """Distribution function of the standard normal distribution."""
    return 0.5 * math.erfc(-z / math.sqrt(2))


def _truncated_normal(u: np.ndarray, p: Mapping[str, float]) -> np.ndarray:
    low, high = ((p[end] - p["mean"]) / p["deviation"] for end in ("low", "high"))
    # in the upper tail probabilities are too near to one to tell apart; the lower one has the room
    if low > 0:
        return p["mean"] - p["deviation"] * _normal(_normal_cdf(-low) + u * (_normal_cdf(-high) - _normal_cdf(-low)))
    return p["mean"] + p["deviation"] * _normal(_normal_cdf(low) + u * (_normal_cdf(high) - _normal_cdf(low)))


FAMILIES: dict[str, _Family] = {
    "constant": _Family(("value",), lambda u, p: np.full_like(u, p["value"])),
    "uniform": _Family(("low", "high"), lambda u, p: p["low"] + (p["high"] - p["low"]) * u),
    "lognormal": _Family(
        ("median", "sigma"), lambda u, p: p["median"] * np.exp(p["sigma"] * _normal(u)), ("median", "sigma")
    ),
    "pareto": _Family(("least", "alpha"), lambda u, p: p["least"] * (1 - u) ** (-1 / p["alpha"]), ("least", "alpha")),
    "normal": _Family(
        ("mean", "deviation", "low", "high"), _truncated_normal, ("deviation",), {"low": 0.0, "high": math.inf}
    ),
}
"""Distributions by name. A normal distribution is truncated at `low`, 0 by default, and at
`high`."""
NAMES = (*FAMILIES, EMPIRICAL)


@dataclass(frozen=True)
class Distribution:
    """Distribution of a quantity, which may be a constant."""

    name: str
    parameters: tuple[tuple[str, float], ...] = ()
    values: tuple[float, ...] = ()
    """Sorted observations of an empirical distribution."""

    @staticmethod
    def constant(value: float) -> Distribution:
        return Distribution("constant", (("value", float(value)),))

    @staticmethod
    def of(field: str, value: Any, folder: Path | None = None) -> Distribution:
        """Create a distribution from a number, or from a table with a name and parameters.

        folder: where a file that the table names is.
        """
        if isinstance(value, Distribution):
            return value
        if not isinstance(value, str | Mapping):
            return Distribution.constant(check_number(field, value))
        name, parameters = name_and_params(field, value, "a number")
        if name not in NAMES:
            raise unknown_name(f"{field}.name", name, NAMES)
        specific = {key: value for key, value in parameters.items() if key not in COMMON_KEYS}
        common = {key: check_number(f"{field}.{key}", parameters[key]) for key in COMMON_KEYS if key in parameters}
        if common.get(AT_LEAST, -math.inf) > common.get(AT_MOST, math.inf):
            allowed = f"must be at most at_most, which is {common[AT_MOST]:g}"
            raise InvalidInput(f"{field}.{AT_LEAST}", common[AT_LEAST], allowed)
        if name == EMPIRICAL:
            return Distribution(name, tuple(common.items()), _empirical_values(field, specific, folder))
        return Distribution(name, (*_parameters(field, name, specific).items(), *common.items()))

    @property
    def is_constant(self) -> bool:
        return self.name == "constant"

    def quantile(self, u: np.ndarray) -> np.ndarray:
        """Values of the quantile function."""
        u = np.clip(np.asarray(u, dtype=np.float64), LOWEST, HIGHEST)
        parameters = dict(self.parameters)
        if self.name == EMPIRICAL:
            values = np.asarray(self.values)[np.floor(u * len(self.values)).astype(np.int64)]
        else:
            # a tail that is too long for a number is rejected by `check_bounds`
            with np.errstate(over="ignore"):
                values = FAMILIES[self.name].quantile(u, parameters)
        values = values + parameters.get(SHIFT, 0.0)
        if AT_LEAST in parameters or AT_MOST in parameters:
            values = np.clip(values, parameters.get(AT_LEAST, -math.inf), parameters.get(AT_MOST, math.inf))
        return values

    def quantile_at(self, share: float) -> float:
        """Single value of the quantile function."""
        return float(self.quantile(np.array([share]))[0])

    def to_plain(self) -> float | dict[str, Any]:
        """Return the distribution as a TOML file may have it."""
        if self.is_constant and len(self.parameters) == 1:
            return self.parameters[0][1]
        finite = {key: value for key, value in self.parameters if math.isfinite(value)}
        return {"name": self.name, **finite, **({"values": list(self.values)} if self.values else {})}

    def check_bounds(
        self, field: str, *, at_least: float | None = None, above: float | None = None, at_most: float | None = None
    ) -> Distribution:
        """Return the distribution if all its values are finite and within these bounds."""
        for end in (self.quantile_at(0.0), self.quantile_at(1.0)):
            if self.is_constant:
                check_number(field, end, at_least=at_least, above=above, at_most=at_most)
            else:
                what = f"{field}, of which {self.name} can give"
                check_number(what, end, at_least=at_least, above=above, at_most=at_most)
        return self

    def __str__(self) -> str:
        if self.is_constant:
            return f"{self.quantile_at(0.5):.4g}"
        return f"{self.quantile_at(0.5):.4g} ({self.quantile_at(0.1):.3g} to {self.quantile_at(0.9):.3g})"


def _parameters(field: str, name: str, values: Mapping[str, Any]) -> dict[str, float]:
    family = FAMILIES[name]
    check_keys(field, values, (*family.parameters, *COMMON_KEYS))
    parameters = {}
    for key in family.parameters:
        if key in values:
            parameters[key] = check_number(f"{field}.{key}", values[key], above=0 if key in family.positive else None)
        elif key in family.defaults:
            parameters[key] = family.defaults[key]
        else:
            raise InvalidInput(field, dict(values), f"{name} needs {key}")
    if "low" in parameters and not parameters["low"] < parameters["high"]:
        raise InvalidInput(f"{field}.low", parameters["low"], f"must be below high, which is {parameters['high']:g}")
    return parameters


def _empirical_values(field: str, parameters: Mapping[str, Any], folder: Path | None) -> tuple[float, ...]:
    """Read the values of an empirical distribution: a list, or a column of a CSV file."""
    check_keys(field, parameters, ("values", "file", "column", *COMMON_KEYS))
    if ("values" in parameters) == ("file" in parameters):
        raise InvalidInput(field, dict(parameters), "empirical needs either values or a file")
    values = parameters["values"] if "values" in parameters else _column(field, parameters, folder)
    if isinstance(values, np.ndarray):
        values = values.tolist()
    if not isinstance(values, list | tuple) or not values:
        raise InvalidInput(f"{field}.values", values, "must be a list of numbers, one at least")
    return tuple(sorted(check_number(f"{field}.values", value) for value in values))


def _column(field: str, parameters: Mapping[str, Any], folder: Path | None) -> list[float]:
    """Read a column of a CSV file whose first line has the names; the first one by default."""
    if not isinstance(parameters["file"], str):
        raise InvalidInput(f"{field}.file", parameters["file"], "must be the path of a CSV file")
    path = (folder or Path()) / parameters["file"]
    if not path.is_file():
        raise InvalidInput(f"{field}.file", path, "no such file")
    try:
        # a program for tables may have put a mark before the first name
        rows = list(csv.reader(io.StringIO(read_bounded(path).decode("utf-8-sig"))))
    except (UnicodeDecodeError, csv.Error):
        raise InvalidInput(f"{field}.file", path, "is no CSV file") from None
    rows = [[cell.strip() for cell in row] for row in rows if any(cell.strip() for cell in row)]
    if len(rows) < 2:
        raise InvalidInput(f"{field}.file", path, "needs a line with the names of its columns, and one with numbers")
    column = parameters.get("column", rows[0][0])
    if column not in rows[0]:
        raise unknown_name(f"{field}.column", column, rows[0])
    if "column" not in parameters and _is_number(column):
        raise InvalidInput(f"{field}.file", path, f"begins with {column}: its first line must name its columns")
    index = rows[0].index(column)
    return [_cell(field, path, row[index] if index < len(row) else "") for row in rows[1:]]


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _cell(field: str, path: Path, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InvalidInput(f"{field}.file", path, f"has {text!r} where a number should be") from None


ZERO, ONE = Distribution.constant(0), Distribution.constant(1)
POSITIVE = ("up_mbit_s", "down_mbit_s", "pipe_up_mbit_s", "pipe_down_mbit_s", "step_s", "gflop_s",
            "flops_per_sample", "slowdown")  # fmt: skip
"""Quantities that must be above 0; the others may be 0."""

PROBABILITIES = ("availability", "dropout")
SMALLEST, LARGEST = 1e-60, 1e60
"""Bounds of quantities that must be above 0, and upper bound of all: products of several are
finite, too."""

MAX_TEXT_LENGTH = 300
"""Maximum number of characters."""

STEP_TIME = "how fast a leaf trains"


@dataclass(frozen=True)
class Tier:
    """Links of one level: each child's link to its parent, and what the parent does.

    A message takes `overhead_s` at its sender, then its bytes and `overhead_bytes` go over the
    link, then `latency_s` and a jitter pass until it arrives.
    """

    name: str = ""
    up_mbit_s: Distribution | None = None
    """Upload rate of the child's own link, in 10^6 bits per second."""
    down_mbit_s: Distribution | None = None
    """Download rate; sampled from the distribution of the upload rate unless set."""
    latency_s: Distribution = ZERO
    """One-way latency."""
    jitter_s: Distribution = ZERO
    """Addition to the latency, sampled for every message."""
    pipe_up_mbit_s: Distribution | None = None
    """Upload rate that all children of a parent share, fairly among simultaneous transfers; None:
    no limit."""
    pipe_down_mbit_s: Distribution | None = None
    """Download rate that all children of a parent share."""
    overhead_bytes: Distribution = ZERO
    """Bytes of the protocol, per message."""
    overhead_s: Distribution = ZERO
    merge_s: Distribution = ZERO
    """Seconds of an aggregation."""
    merge_s_per_child: Distribution = ZERO
    """Additional seconds of an aggregation per update."""
    up_watts: Distribution = ZERO
    """Power while a child sends."""
    down_watts: Distribution = ZERO
    """Power while a parent sends, per child."""
    merge_watts: Distribution = ZERO
    money_per_gb_up: Distribution = ZERO
    money_per_gb_down: Distribution = ZERO
    parent_money_per_hour: Distribution = ZERO
    """Money per hour of each parent, for the duration of the run."""


@dataclass(frozen=True)
class Device:
    """Training device: duration of a step, and availability."""

    step_s: Distribution | None = None
    """Seconds of one local step; otherwise they follow from the next two."""
    gflop_s: Distribution | None = None
    """Speed achieved in training, in 10^9 floating-point operations per second."""
    flops_per_sample: Distribution | None = None
    """Operations of training on one sample, forward and backward; those of the run's model unless
    set."""
    slowdown: Distribution = ONE
    """Factor of the compute time, sampled for every round."""
    pause_s: Distribution = ZERO
    """Idle seconds before computing, sampled for every round."""
    availability: Distribution = ONE
    """Probability that the device is online when its parent sends a model; otherwise it comes back
    after `away_s`. A synchronous parent waits."""
    away_s: Distribution = ZERO
    dropout: Distribution = ZERO
    """Probability that its work is lost before it is sent, and is done again from the start."""
    watts: Distribution = ZERO
    """Power while computing."""
    money_per_hour: Distribution = ZERO
    """Money per hour of each leaf, for the duration of the run."""


LINK = ("up_mbit_s", "down_mbit_s", "latency_s", "jitter_s", "overhead_bytes", "overhead_s",
        "up_watts", "down_watts", "money_per_gb_up", "money_per_gb_down")  # fmt: skip
"""Quantities of a tier that belong to the child of an edge; the others are its parent's."""

TIER = tuple(field.name for field in dataclasses.fields(Tier) if field.name != "name")
DEVICE = tuple(field.name for field in dataclasses.fields(Device))


@dataclass(frozen=True)
class Network:
    """Links and devices of a tree, whatever its depth."""

    name: str
    tiers: tuple[Tier, ...]
    """Tiers from the leaves up; the last one is repeated for all levels above."""
    leaf: Device
    about: str = ""
    source: str = ""
    currency: str = ""
    direct: Tier | None = None
    """Tier for trees of depth 1, if it is not the first one."""
    nodes: tuple[tuple[str, tuple[tuple[str, Distribution], ...]], ...] = ()
    """Changed quantities by names or patterns of nodes; later ones win."""

    @staticmethod
    def of(values: Mapping[str, Any], name: str = "network", folder: Path | None = None) -> Network:
        """Create a network from nested tables, such as a parsed TOML file.

        folder: where files that the tables name are.
        """
        keys = [field.name for field in dataclasses.fields(Network) if field.name != "tiers"] + ["tier"]
        check_keys("network", values, keys)
        tiers = values.get("tier", [])
        if isinstance(tiers, Mapping):
            tiers = [tiers]
        if not isinstance(tiers, list | tuple) or not tiers:
            raise InvalidInput("tier", tiers, "needs one [[tier]] at least: the leaves' links to their parents")
        direct = values.get("direct")
        return Network(
            name=check_text("name", values.get("name", name)) or name,
            tiers=tuple(_tier(f"tier {number}", tier, folder) for number, tier in enumerate(tiers, 1)),
            leaf=_device(values.get("leaf", {}), folder),
            direct=None if direct is None else _tier("direct", direct, folder),
            nodes=_nodes(values.get("nodes", {}), folder),
            **{key: check_text(key, values.get(key, "")) for key in ("about", "source", "currency")},
        )

    @staticmethod
    def load(path: Path) -> Network:
        """Read a network from a TOML file."""
        try:
            values = tomllib.loads(read_bounded(path).decode("utf-8-sig"))
        except (ValueError, RecursionError) as problem:
            raise InvalidInput("network", path, f"not valid TOML: {first_line_of(problem)}") from None
        return Network.of(values, path.stem, path.parent)

    def as_tables(self) -> dict[str, Any]:
        """Nested tables from which `of` creates an equal network, without any file."""
        texts = {key: getattr(self, key) for key in ("name", "about", "source", "currency") if getattr(self, key)}
        return {
            **texts,
            "tier": [_table(tier) for tier in self.tiers],
            "leaf": _table(self.leaf),
            **({} if self.direct is None else {"direct": _table(self.direct)}),
            "nodes": {pattern: {key: value.to_plain() for key, value in changes} for pattern, changes in self.nodes},
        }

    @property
    def needs_flops(self) -> bool:
        """Whether the duration of a step may depend on the operations of the model."""
        computes = self.leaf.gflop_s is not None and self.leaf.flops_per_sample is None
        return computes or any(key == "gflop_s" for _, quantities in self.nodes for key, _ in quantities)

    def same_parameters(self, other: Network) -> bool:
        """Whether links and devices are equal; names and texts may differ."""
        return all(getattr(self, name) == getattr(other, name) for name in ("tiers", "leaf", "direct", "nodes"))

    def tier(self, level: int, depth: int) -> Tier:
        """Tier of an edge level, 1 for the root's, in a tree of this depth."""
        if depth == 1 and self.direct is not None:
            return self.direct
        return self.tiers[min(depth - level, len(self.tiers) - 1)]

    def level_name(self, level: int, depth: int) -> str:
        """Name of an edge level in tables."""
        return self.tier(level, depth).name or f"level {level}"


def _table(quantities: Tier | Device) -> dict[str, Any]:
    """Quantities whose value differs from the default."""
    values = {}
    for field in dataclasses.fields(quantities):
        value = getattr(quantities, field.name)
        if value != field.default:
            values[field.name] = value if isinstance(value, str) else value.to_plain()
    return values


def check_text(key: str, value: object) -> str:
    """Check a name or text of a network."""
    if not isinstance(value, str):
        raise InvalidInput(key, value, "must be a text")
    if not value.isprintable() or len(value) > MAX_TEXT_LENGTH:
        raise InvalidInput(key, value, f"must be a line of printable text, of at most {MAX_TEXT_LENGTH} characters")
    return value


def _fields(kind: Any, where: str, values: Any, folder: Path | None) -> dict[str, Any]:
    if not isinstance(values, Mapping):
        raise InvalidInput(where, values, "must be a table")
    keys = [field.name for field in dataclasses.fields(kind)]
    check_keys(where, values, keys)
    return {
        key: check_text(f"{where}.{key}", value) if key == "name" else _quantity(f"{where}.{key}", key, value, folder)
        for key, value in values.items()
    }


def _quantity(where: str, key: str, value: Any, folder: Path | None) -> Distribution:
    distribution = Distribution.of(where, value, folder)
    if key == "dropout" and distribution.quantile_at(1.0) >= 1:
        raise InvalidInput(where, value, "must be a finite number at least 0 and below 1")
    if key in POSITIVE:
        return distribution.check_bounds(where, above=0).check_bounds(where, at_least=SMALLEST, at_most=LARGEST)
    return distribution.check_bounds(where, at_least=0, at_most=1 if key in PROBABILITIES else LARGEST)


def _tier(where: str, values: Any, folder: Path | None) -> Tier:
    tier = Tier(**_fields(Tier, where, values, folder))
    if tier.up_mbit_s is None:
        raise InvalidInput(where, dict(values), "needs up_mbit_s, the bandwidth of a child's link")
    return dataclasses.replace(tier, down_mbit_s=tier.down_mbit_s or tier.up_mbit_s)


def _device(values: Any, folder: Path | None) -> Device:
    device = Device(**_fields(Device, "leaf", values, folder))
    if (device.step_s is None) == (device.gflop_s is None):
        raise InvalidInput("leaf", dict(values), f"needs either step_s or gflop_s: {STEP_TIME}")
    return device


def _nodes(values: Any, folder: Path | None) -> tuple[tuple[str, tuple[tuple[str, Distribution], ...]], ...]:
    if not isinstance(values, Mapping):
        raise InvalidInput("nodes", values, 'must be tables, such as [nodes."paris/*"]')
    nodes = []
    for pattern, table in values.items():
        where = f"nodes.{pattern}"
        if not isinstance(table, Mapping):
            raise InvalidInput(where, table, "must be a table")
        check_keys(where, table, (*TIER, *DEVICE))
        if "step_s" in table and "gflop_s" in table:
            raise InvalidInput(where, dict(table), f"takes either step_s or gflop_s: {STEP_TIME}")
        quantities = tuple((key, _quantity(f"{where}.{key}", key, value, folder)) for key, value in table.items())
        nodes.append((pattern, quantities))
    return tuple(nodes)


FOLDER = Path(__file__).parent / "presets"


NetworkLike = Network | str | Path | Mapping[str, Any]


def presets() -> list[str]:
    """Names of the presets."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def network(value: NetworkLike, field: str = "--network") -> Network:
    """Create a network from the name of a preset, a TOML file, or tables.

    Tables with a name and nothing but texts are the preset or file of that name with these texts.
    """
    if isinstance(value, Network):
        return value
    if isinstance(value, Mapping):
        if "name" not in value or not {"name", "about", "source"}.issuperset(value):
            return Network.of(value)
        named = network(value["name"], field)
        about, source = (check_text(key, value.get(key, getattr(named, key))) for key in ("about", "source"))
        return dataclasses.replace(named, about=about, source=source)
    if not isinstance(value, str | Path):
        raise InvalidInput(field, value, "must be a preset's name, the path of a .toml file, or tables")
    if isinstance(value, str) and value in presets():
        return Network.load(FOLDER / f"{value}.toml")
    path = Path(value)
    if path.suffix == ".toml":
        if not path.is_file():
            raise InvalidInput(field, path, "no such file")
        return Network.load(path)
    problem = unknown_name(field, str(value), presets())
    raise InvalidInput(field, str(value), f"{problem.allowed}; or the path of a .toml file")
