"""Stored runs priced under networks, setting by setting: mean and deviation over seeds."""

from __future__ import annotations

import csv
import io
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from stratafl.base.errors import InvalidInput
from stratafl.base.statistics import OverSeeds
from stratafl.base.validation import check_number
from stratafl.clock.model.network import LARGEST, Network
from stratafl.clock.model.timeline import PARTS, Part
from stratafl.clock.price.costs import Costs, PricedRun, Pricing, Total
from stratafl.clock.price.story import named_networks, resolved
from stratafl.runs import StoredRun
from stratafl.runs.curves import Curve, Target, first_round, of_all, targets_of
from stratafl.runs.groups import Setting, gather, judged_by, settings

ALL = "all rounds"


@dataclass(frozen=True)
class Milestone:
    """What it took a setting to get somewhere: to a target, or through all its rounds."""

    until: str
    """What the run goes on until, such as "accuracy 75 %"."""
    runs: int
    reached: int
    """How many of the runs got there; unless all did, there are no numbers."""
    rounds: OverSeeds | None
    seconds: OverSeeds | None
    joules: OverSeeds | None
    money: OverSeeds | None
    bytes: tuple[OverSeeds, ...]
    """Over the links of each edge level, root's first."""
    parts: dict[Part, float]
    """Seconds by what they went into and on which edge level, mean over the runs."""


@dataclass(frozen=True)
class PricedSetting:
    """Runs that differ in their seed only, on one network."""

    setting: str
    network: str
    about: str
    currency: str
    levels: tuple[str, ...]
    """What the edge levels are called there, root's first."""
    milestones: tuple[Milestone, ...]
    """Targets in the order given, then all rounds."""
    notes: tuple[str, ...] = ()

    def at(self, until: str) -> Milestone:
        """The one of this name."""
        return next(each for each in self.milestones if each.until == until)


def price(
    runs: str | Path | Sequence[str | Path | StoredRun],
    networks: str | Path | Network | Sequence[str | Path | Network],
    targets: Sequence[str | float] = (),
    flops_per_sample: float | None = None,
) -> list[PricedSetting]:
    """Price stored runs under networks, afterwards: their learning does not depend on these.

    A run that cannot be priced is left out with a warning, unless there is no other.

    runs: run folders, folders of runs, or what `read_run` returned.
    networks: names of presets, paths of TOML files, or `Network` objects; "own" is the one in whose
        virtual time the runs went on.
    targets: values of metrics, such as 0.75, "accuracy=0.75" or "loss <= 0.3"; what it took to get
        there is priced besides all rounds.
    flops_per_sample: operations of training on one sample, instead of those that were counted when
        a run was set up, which of some models they cannot be.
    """
    if flops_per_sample is not None:
        check_number("flops_per_sample", flops_per_sample, above=0, at_most=LARGEST)
    places = [runs] if isinstance(runs, str | Path) else list(runs)
    stored = [each for each in places if isinstance(each, StoredRun)]
    found, _ = gather([Path(each) for each in places if not isinstance(each, StoredRun)])
    if not stored and not found:
        raise InvalidInput("runs", [str(place) for place in places], "no runs in it that can be read")
    given = [networks] if isinstance(networks, str | Path | Network) else list(networks)
    named, known = named_networks(given, "networks"), [*stored, *found]
    chosen, pricing = resolved(named, known, "networks"), Pricing(flops_per_sample)
    settled = priced(settings(known), chosen, pricing, targets, "targets")
    for line in pricing.problems:
        warnings.warn(line, stacklevel=2)
    return settled


def priced(
    compared: Sequence[Setting],
    networks: Sequence[Network],
    pricing: Pricing,
    targets: Sequence[str | float] = (),
    field: str = "--target",
) -> list[PricedSetting]:
    """Settings under networks, all settings of a network together; what cannot be priced is left
    out, and in `pricing`."""
    goals = targets_of(targets, *judged_by(compared), field)
    ready = [[pricing.ready(run) for run in setting.runs] for setting in compared]
    found = [
        _setting(setting, network, on_it, goals)
        for network in networks
        for setting, runs in zip(compared, ready, strict=True)
        if (on_it := _on(network, setting, runs, pricing))
    ]
    if not found:
        raise next(iter(pricing.problems.values()))
    return found


class _Priced(NamedTuple):
    """A run of a setting on a network."""

    run: PricedRun
    curve: Curve
    costs: Costs


def _on(network: Network, setting: Setting, runs: Sequence[PricedRun | None], pricing: Pricing) -> list[_Priced]:
    """Those of a setting's runs that can be priced there."""
    tried = [
        (run, curve, pricing.on(run, network))
        for run, curve in zip(runs, setting.curves, strict=True)
        if run is not None
    ]
    return [_Priced(run, curve, costs) for run, curve, costs in tried if costs is not None]


def _setting(setting: Setting, network: Network, runs: Sequence[_Priced], targets: Sequence[Target]) -> PricedSetting:
    each = [priced_run.costs for priced_run in runs]
    made = []
    for measure, goal in targets:
        ends = [first_round(priced_run.curve, goal) for priced_run in runs]
        made.append(_milestone(f"{measure.name} {measure.goal_text(goal.value)}", each, ends))
    made.append(_milestone(ALL, each, [len(priced_run.run.run.rounds) for priced_run in runs]))
    return PricedSetting(
        setting=setting.label,
        network=network.name,
        about=network.about,
        currency=network.currency,
        levels=each[0].levels,
        milestones=tuple(made),
        notes=tuple(dict.fromkeys(note for priced_run in runs for note in priced_run.run.recovered.notes)),
    )


def _milestone(until: str, runs: Sequence[Costs], ends: Sequence[int | None]) -> Milestone:
    totals = [None if end is None else run.until(end) for run, end in zip(runs, ends, strict=True)]
    there = [total for total in totals if total is not None]
    if len(there) < len(totals):
        return Milestone(until, len(totals), len(there), None, None, None, None, (), {})

    def over(value: Callable[[Total], float]) -> OverSeeds:
        found = of_all([value(total) for total in there])
        assert found is not None
        return found

    return Milestone(
        until=until,
        runs=len(totals),
        reached=len(there),
        rounds=over(lambda total: float(total.round)),
        seconds=over(lambda total: total.seconds),
        joules=over(lambda total: total.joules),
        money=over(lambda total: total.money),
        bytes=tuple(over(lambda total, level=level: total.bytes[level]) for level in range(len(there[0].bytes))),  # type: ignore[misc]
        parts={part: over(lambda total, part=part: total.parts[part]).mean for part in there[0].parts},  # type: ignore[misc]
    )


# -- for other programs ----------------------------------------------------------------------------


def as_rows(found: Sequence[PricedSetting]) -> list[dict[str, Any]]:
    """One flat table per setting, network and milestone, every number in full."""
    return [_row(each, milestone) for each in found for milestone in each.milestones]


def _row(priced_setting: PricedSetting, milestone: Milestone) -> dict[str, Any]:
    row: dict[str, Any] = {
        "setting": priced_setting.setting,
        "network": priced_setting.network,
        "until": milestone.until,
        "runs": milestone.runs,
        "reached": milestone.reached,
        "currency": priced_setting.currency,
    }
    for name in ("rounds", "seconds", "joules", "money"):
        value = getattr(milestone, name)
        row[name], row[f"{name}_std"] = (None, None) if value is None else value
    for level, value in enumerate(milestone.bytes, 1):
        row[f"bytes_{level}"], row[f"bytes_{level}_std"] = value
    for what in PARTS:
        levels = sorted(level for name, level in milestone.parts if name == what)
        row |= {f"{what}_{level}_s": milestone.parts[what, level] for level in levels}
    return row


def as_csv(found: Sequence[PricedSetting]) -> str:
    """The same as a CSV file."""
    rows = as_rows(found)
    names = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: "" if value is None else value for key, value in row.items()} for row in rows)
    return text.getvalue()
