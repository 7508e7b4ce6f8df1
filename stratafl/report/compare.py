"""What differs between runs, and how they did: runs that differ only in their seed are one setting."""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from stratafl.errors import printable
from stratafl.metrics import rounds_to
from stratafl.report.curves import Curve, curve_of, mean_curve
from stratafl.store import StoredRun
from stratafl.store.layout import flat_config

SEED = "run.seed"
SPEAKING = ("method.name", "model.name", "data.name")
"""Keys whose values speak for themselves."""
TARGET_STEP = 0.05
ABSENT = "—"


@dataclass(frozen=True)
class Setting:
    """Runs with one config but for the seed."""

    label: str
    runs: list[StoredRun]
    curves: list[Curve]
    """One per run."""
    mean: Curve

    @property
    def seeds(self) -> list[int | str | None]:
        found = [flat_config(run.config).get(SEED) for run in self.runs]
        return [seed if seed is None or type(seed) is int else _text(seed) for seed in found]


@dataclass(frozen=True)
class Number:
    """A mean over runs and its standard deviation, None where there is one run only."""

    mean: float
    std: float | None

    @staticmethod
    def of(values: Sequence[float | None]) -> Number | None:
        known = [value for value in values if value is not None]
        if not known or len(known) < len(values):
            return None
        return Number(statistics.fmean(known), statistics.pstdev(known) if len(known) > 1 else None)


@dataclass(frozen=True)
class Reached:
    """When a target was reached: the mean round, or not within so many rounds."""

    rounds: Number | None
    not_within: int


@dataclass(frozen=True)
class Row:
    """One setting in the summary table."""

    label: str
    runs: int
    rounds: int
    """Of the run that has the fewest."""
    diverged: list[int]
    """In which round each run that diverged did."""
    final: dict[str, Number]
    """Where none of the runs diverged."""
    best: Number | None
    """Highest accuracy of each run."""
    targets: list[Reached]
    bytes_per_client: Number | None
    seconds_per_round: Number | None
    refused: int


def settings(runs: Sequence[StoredRun]) -> list[Setting]:
    """The runs by setting, in the order in which each setting first appears."""
    groups: dict[str, list[StoredRun]] = {}
    for run in runs:
        config = {key: value for key, value in flat_config(run.config).items() if key != SEED}
        groups.setdefault(json.dumps(config, sort_keys=True, default=str), []).append(run)
    families = list(groups.values())
    found = []
    for label, family in zip(map(printable, _labels(families)), families, strict=True):
        curves = [curve_of(run) for run in family]
        found.append(Setting(label, family, curves, mean_curve(curves)))
    return found


def summary(found: Sequence[Setting], targets: Sequence[float]) -> list[Row]:
    return [_row(setting, targets) for setting in found]


def usual_targets(found: Sequence[Setting]) -> list[float]:
    """The highest multiple of five per cent that at least half of the settings reached with every run."""
    best = sorted(
        (min(max((value for _, value in curve.known("accuracy")), default=0.0) for curve in setting.curves))
        for setting in found
    )
    if not best:
        return []
    reached = best[len(best) // 2]
    # counted in whole steps, since 0.9 / 0.05 is a hair below 18
    steps = int(reached / TARGET_STEP + 1e-9)
    return [round(steps * TARGET_STEP, 2)] if steps > 0 else []


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


def number_text(value: Number | None, digits: int) -> str:
    """ "0.912 ± 0.003", or the mean alone where there is one run."""
    if value is None:
        return ABSENT
    return f"{value.mean:.{digits}f}" + ("" if value.std is None else f" ± {value.std:.{digits}f}")


def diverged_text(rounds: Sequence[int], runs: int) -> str:
    """What stands in the place of a final value."""
    if runs == 1:
        return f"diverged at round {rounds[0]}"
    return f"{len(rounds)} of {runs} diverged, the first at round {min(rounds)}"


def reached_text(reached: Reached) -> str:
    """As the paper writes it: "52.7 ± 1.2", or ">500" where a run did not get there."""
    if reached.rounds is None:
        return f">{reached.not_within}"
    return f"{reached.rounds.mean:.0f}" if reached.rounds.std is None else number_text(reached.rounds, 1)


def _row(setting: Setting, targets: Sequence[float]) -> Row:
    curves = setting.curves
    names = [name for name in setting.mean.y if not name.startswith("drift.")]
    final = {name: value for name in names if (value := Number.of([curve.last(name) for curve in curves]))}
    best = Number.of([max((value for _, value in curve.known("accuracy")), default=None) for curve in curves])
    rounds = [len(curve.x["rounds"]) for curve in curves]
    seconds = [_per_round(curve) for curve in curves]
    return Row(
        label=setting.label,
        runs=len(curves),
        rounds=min(rounds),
        diverged=[curve.diverged for curve in curves if curve.diverged is not None],
        final=final,
        best=best,
        targets=[_reached(curves, target) for target in targets],
        bytes_per_client=Number.of([curve.x["bytes"][-1] if curve.x["bytes"] else None for curve in curves]),
        seconds_per_round=Number.of(seconds),
        refused=sum(_count(record.get("refused")) for run in setting.runs for record in run.rounds),
    )


def _count(names: object) -> int:
    return len(names) if isinstance(names, list) else 0


def _per_round(curve: Curve) -> float | None:
    total = curve.x["seconds"][-1] if curve.x["seconds"] else None
    return None if total is None else total / len(curve.x["seconds"])


def _reached(curves: Sequence[Curve], target: float) -> Reached:
    when: list[float | None] = []
    for curve in curves:
        known = curve.known("accuracy")
        when.append(rounds_to(target, [int(r) for r, _ in known], [value for _, value in known]))
    lacking = [len(curve.x["rounds"]) for curve, at in zip(curves, when, strict=True) if at is None]
    return Reached(Number.of(when), min(lacking, default=0))


def _labels(families: Sequence[Sequence[StoredRun]]) -> list[str]:
    """Names that tell the settings apart: the runs' own, else what differs, else the time they were made."""
    names = [_common_name(family) for family in families]
    if all(names) and len(set(names)) == len(names):
        return names
    flats = [_shown(family) for family in families]
    keys = sorted({key for flat in flats for key in flat}, key=lambda key: (key not in SPEAKING, key))
    differing = [key for key in keys if key != SEED and len({flat.get(key) for flat in flats}) > 1]
    labels = []
    for name, flat in zip(names, flats, strict=True):
        values = [_short(key, flat.get(key, ABSENT)) for key in differing]
        labels.append(", ".join(values) or name or "run")
    return [
        label if labels.count(label) == 1 else f"{label} {family[0].id}"
        for label, family in zip(labels, families, strict=True)
    ]


def _common_name(family: Sequence[StoredRun]) -> str:
    """What the names of runs that differ only in the seed begin with."""
    names = {run.name for run in family}
    if len(names) == 1:
        return names.pop()
    alike = itertools.takewhile(lambda letters: len(set(letters)) == 1, zip(*names, strict=False))
    start = "".join(letters[0] for letters in alike)
    return start.rstrip("0123456789-_.=+ ").removesuffix("seed").rstrip("-_.=+ ")


def _short(key: str, value: str) -> str:
    return value if key in SPEAKING else f"{key.rpartition('.')[2]} {value}"


def _shown(family: Sequence[StoredRun]) -> dict[str, str]:
    """A setting's config as texts; its seeds are a list."""
    texts = {key: _text(value) for key, value in flat_config(family[0].config).items()}
    seeds = [flat_config(run.config).get(SEED) for run in family]
    if SEED in texts:
        texts[SEED] = ", ".join(map(_text, seeds))
    return texts


def _text(value: object) -> str:
    if isinstance(value, str):
        return value
    return ABSENT if value is None else json.dumps(value, default=str)
