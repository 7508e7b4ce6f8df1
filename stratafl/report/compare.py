"""Runs that differ only in their seed are one setting: what differs between settings, and what they
share.

How a run was computed and what was kept of it makes no setting; several runs of one seed are not
several seeds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from stratafl.base.errors import listed, printable
from stratafl.report.curves import Curve, Points, curve_of, mean_curve
from stratafl.report.measures import ABSENT
from stratafl.report.naming import names
from stratafl.runs import StoredRun
from stratafl.runs.layout import DONE, flat_config
from stratafl.runs.origins import EXECUTION, STORAGE, files_of, identity

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
    """The runs by setting, one of each seed, in the order in which each setting first appears.
    further: by run, axes of its curve besides its own."""
    groups: dict[str, list[StoredRun]] = {}
    for run in one_of_each(runs)[0]:
        groups.setdefault(identity(run, seed=False), []).append(run)
    families = list(groups.values())
    found = []
    for label, family in zip(_labels(families), families, strict=True):
        curves = [curve_of(run, (further or {}).get(run.path)) for run in family]
        found.append(Setting(label, family, curves, mean_curve(curves)))
    return found


def one_of_each(runs: Sequence[StoredRun]) -> tuple[list[StoredRun], list[str]]:
    """Of the runs of one setting and seed the newest that is complete, or else the longest; and a
    line for the others."""
    same: dict[str, list[StoredRun]] = {}
    for place, run in enumerate(runs):
        # of runs that do not say their seed nobody knows whether it is one
        which = identity(run) if SEED in flat_config(run.config) else str(place)
        same.setdefault(which, []).append(run)
    kept, told = [], []
    for family in same.values():
        newest = max(family, key=lambda run: run.id)
        chosen = max(family, key=lambda run: (run.status == DONE, run.status == DONE or run.round, run.id))
        kept.append(chosen)
        if len(family) > 1:
            which = "newer" if len(family) == 2 else "newest"
            shown = which if chosen is newest else f"{which} that is complete" if chosen.status == DONE else "longest"
            others = listed([run.id for run in family if run is not chosen])
            counted = f"{len(family)} runs of seed {flat_config(chosen.config)[SEED]}{_ways(family)}"
            told.append(f"{chosen.name}: {counted}: the {shown} is shown, not {others}")
    return kept, told


def _ways(family: Sequence[StoredRun]) -> str:
    """How runs differ that are the same up to how they were computed."""
    flats = [flat_config(run.config) for run in family]
    found = {key: dict.fromkeys(_text(flat.get(f"run.{key}")) for flat in flats) for key in EXECUTION}
    told = [f"{key} {' and '.join(values)}" for key, values in found.items() if len(values) > 1]
    return f" ({', '.join(told)})" if told else ""


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
    ignored = (SEED, *(f"run.{key}" for key in (*EXECUTION, *STORAGE)))
    flats = [
        {key: value for key, value in flat_config(family[0].config).items() if key not in ignored}
        for family in families
    ]
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
    return texts | {f"files.{name}": f"#{digest[:6]}" for name, digest in files_of(family[0]).items()}


def _text(value: object) -> str:
    if isinstance(value, str):
        return value
    return ABSENT if value is None else json.dumps(value, default=str)
