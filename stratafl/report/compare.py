"""Runs that differ only in their seed are one setting: what differs between settings, and what they
share."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from stratafl.base.errors import printable
from stratafl.report.curves import Curve, Points, curve_of, mean_curve
from stratafl.report.measures import ABSENT
from stratafl.report.naming import names
from stratafl.runs import StoredRun
from stratafl.runs.layout import flat_config

SEED = "run.seed"


@dataclass(frozen=True)
class Setting:
    """Runs with one config but for the seed."""

    label: str
    runs: list[StoredRun]
    curves: list[Curve]
    """One curve per run."""
    mean: Curve

    @property
    def seeds(self) -> list[int | str | None]:
        found = [flat_config(run.config).get(SEED) for run in self.runs]
        return [seed if seed is None or type(seed) is int else _text(seed) for seed in found]


def settings(runs: Sequence[StoredRun], further: Mapping[Path, Mapping[str, Points]] | None = None) -> list[Setting]:
    """The runs by setting, in the order in which each setting first appears. further: by run, axes
    of its curve besides its own."""
    groups: dict[str, list[StoredRun]] = {}
    for run in runs:
        config = {key: value for key, value in flat_config(run.config).items() if key != SEED}
        groups.setdefault(json.dumps(config, sort_keys=True, default=str), []).append(run)
    families = list(groups.values())
    found = []
    for label, family in zip(_labels(families), families, strict=True):
        curves = [curve_of(run, (further or {}).get(run.path)) for run in family]
        found.append(Setting(label, family, curves, mean_curve(curves)))
    return found


def differences(found: Sequence[Setting]) -> dict[str, list[str]]:
    """Config keys whose values are not the same everywhere, each with one text per setting."""
    flats = [_shown(setting.runs) for setting in found]
    keys = sorted({key for flat in flats for key in flat})
    return {key: values for key in keys if len(set(values := [flat.get(key, ABSENT) for flat in flats])) > 1}


def shared(found: Sequence[Setting]) -> dict[str, str]:
    """The rest of the config: what all settings have in common."""
    differing = differences(found)
    first = _shown(found[0].runs) if found else {}
    return {key: value for key, value in sorted(first.items()) if key not in differing}


def _labels(families: Sequence[Sequence[StoredRun]]) -> list[str]:
    """What differs, and the time they were made where that is not enough."""
    flats = [{key: value for key, value in flat_config(family[0].config).items() if key != SEED} for family in families]
    labels = list(map(printable, names(flats)))
    return [
        label if labels.count(label) == 1 else f"{label} {printable(family[0].id)}"
        for label, family in zip(labels, families, strict=True)
    ]


def _shown(family: Sequence[StoredRun]) -> dict[str, str]:
    """A setting's config as texts: its seeds are a list, and its engine and precision those that
    really trained it."""
    texts = {key: _text(value) for key, value in flat_config(family[0].config).items()}
    seeds = [flat_config(run.config).get(SEED) for run in family]
    if SEED in texts:
        texts[SEED] = ", ".join(map(_text, seeds))
    ran = {"run.engine": [run.engine for run in family], "run.precision": [run.precision for run in family]}
    texts |= {key: ", ".join(dict.fromkeys(values)) for key, values in ran.items() if all(values)}
    return texts


def _text(value: object) -> str:
    if isinstance(value, str):
        return value
    return ABSENT if value is None else json.dumps(value, default=str)
