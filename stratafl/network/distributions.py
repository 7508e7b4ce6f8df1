"""Quantities that vary: distributions by name, drawn from by the inverse of their distribution
function.

One uniform number makes one value, so a draw is a function of its place in the run, as all of
`base.rng` are.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from stratafl.base.errors import InvalidInput, unknown_name
from stratafl.base.files import read_bounded
from stratafl.base.validation import check_number, name_and_params

LOWEST, HIGHEST = 2.0**-54, 1 - 2.0**-53
"""The probabilities that are drawn lie between these: a tail has no end, a draw has."""
SHIFT, AT_LEAST, AT_MOST = "shift", "at_least", "at_most"
COMMON = (SHIFT, AT_LEAST, AT_MOST)
"""What every distribution takes besides its own: something added, and bounds to clip at."""
EMPIRICAL = "empirical"


class _Family(NamedTuple):
    parameters: tuple[str, ...]
    quantile: Callable[[np.ndarray, Mapping[str, float]], np.ndarray]
    positive: tuple[str, ...] = ()
    """Parameters that must be above 0."""
    defaults: Mapping[str, float] = {}


def _normal(u: np.ndarray) -> np.ndarray:
    return np.asarray(torch.special.ndtri(torch.as_tensor(u, dtype=torch.float64)).numpy())


def _below(z: float) -> float:
    """The probability that a standard normal number is smaller."""
    return 0.5 * math.erfc(-z / math.sqrt(2))


def _truncated(u: np.ndarray, p: Mapping[str, float]) -> np.ndarray:
    low, high = ((p[end] - p["mean"]) / p["deviation"] for end in ("low", "high"))
    # in the upper tail probabilities are too near to one to tell apart; the lower one has the room
    if low > 0:
        return p["mean"] - p["deviation"] * _normal(_below(-low) + u * (_below(-high) - _below(-low)))
    return p["mean"] + p["deviation"] * _normal(_below(low) + u * (_below(high) - _below(low)))


FAMILIES: dict[str, _Family] = {
    "constant": _Family(("value",), lambda u, p: np.full_like(u, p["value"])),
    "uniform": _Family(("low", "high"), lambda u, p: p["low"] + (p["high"] - p["low"]) * u),
    "lognormal": _Family(
        ("median", "sigma"), lambda u, p: p["median"] * np.exp(p["sigma"] * _normal(u)), ("median", "sigma")
    ),
    "pareto": _Family(("least", "alpha"), lambda u, p: p["least"] * (1 - u) ** (-1 / p["alpha"]), ("least", "alpha")),
    "normal": _Family(("mean", "deviation", "low", "high"), _truncated, ("deviation",), {"low": 0.0, "high": math.inf}),
}
"""By name. A normal distribution is cut off at `low`, which is 0 unless given, and at `high`."""
KNOWN = (*FAMILIES, EMPIRICAL)


@dataclass(frozen=True)
class Distribution:
    """A quantity: a number, or what it is drawn from."""

    name: str
    parameters: tuple[tuple[str, float], ...] = ()
    values: tuple[float, ...] = ()
    """Of an empirical one: those observed, sorted."""

    @staticmethod
    def constant(value: float) -> Distribution:
        return Distribution("constant", (("value", float(value)),))

    @staticmethod
    def of(field: str, given: Any, folder: Path | None = None) -> Distribution:
        """From a number, or a table with a name and parameters; a file that it names lies in the
        folder."""
        if isinstance(given, Distribution):
            return given
        if not isinstance(given, str | Mapping):
            return Distribution.constant(check_number(field, given))
        name, parameters = name_and_params(field, given, "a number")
        if name not in KNOWN:
            raise unknown_name(f"{field}.name", name, KNOWN)
        own = {key: value for key, value in parameters.items() if key not in COMMON}
        common = {key: check_number(f"{field}.{key}", parameters[key]) for key in COMMON if key in parameters}
        if common.get(AT_LEAST, -math.inf) > common.get(AT_MOST, math.inf):
            allowed = f"must be at most at_most, which is {common[AT_MOST]:g}"
            raise InvalidInput(f"{field}.{AT_LEAST}", common[AT_LEAST], allowed)
        if name == EMPIRICAL:
            return Distribution(name, tuple(common.items()), _observed(field, own, folder))
        return Distribution(name, (*_parameters(field, name, own).items(), *common.items()))

    @property
    def is_constant(self) -> bool:
        return self.name == "constant"

    def quantile(self, u: np.ndarray) -> np.ndarray:
        """The value below which a share of all lies, for each of these shares."""
        u = np.clip(np.asarray(u, dtype=np.float64), LOWEST, HIGHEST)
        given = dict(self.parameters)
        if self.name == EMPIRICAL:
            drawn = np.asarray(self.values)[np.floor(u * len(self.values)).astype(np.int64)]
        else:
            # a tail that is too long for a number is refused by `within`
            with np.errstate(over="ignore"):
                drawn = FAMILIES[self.name].quantile(u, given)
        drawn = drawn + given.get(SHIFT, 0.0)
        if AT_LEAST in given or AT_MOST in given:
            drawn = np.clip(drawn, given.get(AT_LEAST, -math.inf), given.get(AT_MOST, math.inf))
        return drawn

    def at(self, share: float) -> float:
        """One quantile."""
        return float(self.quantile(np.array([share]))[0])

    def as_plain(self) -> float | dict[str, Any]:
        """As a TOML file may have it."""
        if self.is_constant and len(self.parameters) == 1:
            return self.parameters[0][1]
        finite = {key: value for key, value in self.parameters if math.isfinite(value)}
        return {"name": self.name, **finite, **({"values": list(self.values)} if self.values else {})}

    def within(
        self, field: str, *, at_least: float | None = None, above: float | None = None, at_most: float | None = None
    ) -> Distribution:
        """Itself, if all it can give is finite and within these bounds."""
        for end in (self.at(0.0), self.at(1.0)):
            if self.is_constant:
                check_number(field, end, at_least=at_least, above=above, at_most=at_most)
            else:
                what = f"{field}, of which {self.name} can give"
                check_number(what, end, at_least=at_least, above=above, at_most=at_most)
        return self

    def __str__(self) -> str:
        if self.is_constant:
            return f"{self.at(0.5):.4g}"
        return f"{self.at(0.5):.4g} ({self.at(0.1):.3g} to {self.at(0.9):.3g})"


def _parameters(field: str, name: str, given: Mapping[str, Any]) -> dict[str, float]:
    family = FAMILIES[name]
    for key in given:
        if key not in family.parameters:
            raise unknown_name(f"{field} key", key, (*family.parameters, *COMMON))
    found = {}
    for key in family.parameters:
        if key in given:
            found[key] = check_number(f"{field}.{key}", given[key], above=0 if key in family.positive else None)
        elif key in family.defaults:
            found[key] = family.defaults[key]
        else:
            raise InvalidInput(field, dict(given), f"{name} needs {key}")
    if "low" in found and not found["low"] < found["high"]:
        raise InvalidInput(f"{field}.low", found["low"], f"must be below high, which is {found['high']:g}")
    return found


def _observed(field: str, given: Mapping[str, Any], folder: Path | None) -> tuple[float, ...]:
    """The values of an empirical distribution: a list, or a column of a CSV file."""
    for key in given:
        if key not in ("values", "file", "column"):
            raise unknown_name(f"{field} key", key, ("values", "file", "column", *COMMON))
    if ("values" in given) == ("file" in given):
        raise InvalidInput(field, dict(given), "empirical needs either values or a file")
    listed = given["values"] if "values" in given else _column(field, given, folder)
    if isinstance(listed, np.ndarray):
        listed = listed.tolist()
    if not isinstance(listed, list | tuple) or not listed:
        raise InvalidInput(f"{field}.values", listed, "must be a list of numbers, one at least")
    return tuple(sorted(check_number(f"{field}.values", each) for each in listed))


def _column(field: str, given: Mapping[str, Any], folder: Path | None) -> list[float]:
    """A column of a CSV file whose first line has the names, the first unless one is named."""
    if not isinstance(given["file"], str):
        raise InvalidInput(f"{field}.file", given["file"], "must be the path of a CSV file")
    path = (folder or Path()) / given["file"]
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
    column = given.get("column", rows[0][0])
    if column not in rows[0]:
        raise unknown_name(f"{field}.column", column, rows[0])
    if "column" not in given and _is_number(column):
        raise InvalidInput(f"{field}.file", path, f"begins with {column}: its first line must name its columns")
    place = rows[0].index(column)
    return [_cell(field, path, row[place] if place < len(row) else "") for row in rows[1:]]


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
