"""Named distributions, sampled by the inverse of their distribution function.

One uniform number yields one value, so a sample is a function of its position in the run, as all
values of `base.rng` are.
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
    for key in values:
        if key not in family.parameters:
            raise unknown_name(f"{field} key", key, (*family.parameters, *COMMON_KEYS))
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
    for key in parameters:
        if key not in ("values", "file", "column"):
            raise unknown_name(f"{field} key", key, ("values", "file", "column", *COMMON_KEYS))
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
