"""The record of a global round, formed of what each process saw."""

from __future__ import annotations

import functools
import math
import statistics
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import takewhile
from typing import Any

import numpy as np

from stratafl.base.errors import InvalidInput, join_names
from stratafl.base.topology import Tree
from stratafl.base.validation import check_integer
from stratafl.federation.update_checks import Refusal
from stratafl.metrics.drift import DriftSamples, DriftSums, Levels, append_syncs, drift_by_level, sum_over_ranks
from stratafl.metrics.evaluation import EvaluationSums, finalize_metrics
from stratafl.metrics.metrics import Better, Directions
from stratafl.metrics.objective import Goal, Objective

Record = Mapping[str, Any]
"""A round's, as in rounds.jsonl."""


def measured(record: Record) -> dict[str, float]:
    """A round's test metrics, each finite or NaN; empty where it was not evaluated.

    Where the loss is not finite nothing else was measured, either: also in records of versions that
    took the first class for the best of scores that were NaN.
    """
    found = dict(_numbers(record.get("metrics")))
    return dict.fromkeys(found, math.nan) if math.isnan(found.get("loss", 0.0)) else found


def diverged(records: Iterable[Record]) -> int | None:
    """The first round of those up to the last that are not finite; None for a run that lives."""
    return functools.reduce(diverged_after, records, None)


def diverged_after(before: int | None, record: Record) -> int | None:
    """What `diverged` says with one more record, from what it said before that."""
    values = measured(record)
    if not values:
        return before
    return (before or record["round"]) if math.isnan(values.get("loss", min(values.values()))) else None


def _numbers(table: object) -> Iterator[tuple[str, float]]:
    """The numbers in what a file may hold; those that are not finite as NaN."""
    for name, value in table.items() if isinstance(table, Mapping) else ():
        if isinstance(value, int | float) and not isinstance(value, bool):
            try:
                number = float(value)
            except OverflowError:
                number = math.nan
            yield str(name), number if math.isfinite(number) else math.nan


OverNodes = dict[str, dict[str, dict[str, float]]]
"""Mean, worst and deviation by level (as a text, since JSON knows no other keys) and by metric."""


def over_nodes(tree: Tree, nodes: Mapping[str, Mapping[str, float]], better: Directions) -> OverNodes:
    """For each level and metric the mean, the worst and the deviation over the nodes, which are all
    there are: the deviation is that of a population. With one that is no number, none of the three
    is."""
    values: dict[str, dict[str, list[float]]] = {}
    for name, found in nodes.items():
        level = values.setdefault(str(tree.find(name)[0]), {})
        for metric, value in found.items():
            level.setdefault(metric, []).append(value)
    return {
        level: {metric: _over(numbers, better.get(metric, "higher")) for metric, numbers in found.items()}
        for level, found in sorted(values.items(), key=lambda each: int(each[0]))
    }


def _over(values: Sequence[float], better: Better) -> dict[str, float]:
    if not all(map(math.isfinite, values)):
        return dict.fromkeys(("mean", "worst", "deviation"), math.nan)
    worst = min(values) if better == "higher" else max(values)
    return {"mean": statistics.fmean(values), "worst": worst, "deviation": statistics.pstdev(values)}


LOST_ROUNDS = 3
"""So many rounds in a row in which every update was refused end a run."""


@dataclass(frozen=True)
class RoundResult:
    """What one global round did."""

    round: int
    """Counted from 1."""
    steps: int
    """Local steps per client since the start of the run, as the schedule has them; where clients
    count passes over their own data, the mean over the clients, but in a deployed tree passes."""
    lr: float
    metrics: dict[str, float]
    """The root's loss, accuracy and further metrics on the test data; empty where this round was
    not evaluated."""
    nodes: dict[str, dict[str, float]]
    """The metrics of each node of the levels asked for, by its model just before its parent's
    replaced it; on its own test data, where nodes have that."""
    refused: tuple[str, ...]
    """Nodes whose update was left out, once for each time."""
    bytes_per_client: float
    """Sent and received by a client since the start of the run, mean over the clients."""
    seconds: float
    drift: Levels = field(default_factory=dict)
    """What pulled the tree apart, by level and by name of the quantity: see docs/diagnostics.md."""
    too_large: tuple[str, ...] = ()
    """The names of those refused whose update was finite, but far too large: see `refusal`."""
    renewed: bool = True
    """Whether the root's model is a new one: it is not where everything that came was refused, or
    nobody came."""
    over_nodes: OverNodes = field(default_factory=dict)
    """The `mean`, the `worst` and the `deviation` over the nodes of the levels asked for below the
    root, by level and metric."""

    @property
    def lost(self) -> bool:
        """Whether everything that came was refused."""
        return bool(self.refused) and not self.renewed

    def reaches(self, goals: Sequence[Goal]) -> bool:
        """Whether this round was evaluated and is as good as all of that; not where there is
        nothing to get to."""
        return bool(goals) and all(goal.reached(self.metrics.get(goal.metric)) for goal in goals)

    @staticmethod
    def of(values: Mapping[str, Any]) -> RoundResult:
        """Read one from what `dataclasses.asdict` made of it, also by way of JSON."""
        # what records of earlier versions do not have
        later = {"too_large": (), "renewed": True, "over_nodes": {}}
        values = {**later, **values} if isinstance(values, Mapping) else values
        kind_of_round = RoundResult
        for mark, kind in (("absent", DeployedRound), ("late", ClockedRound)):
            kind_of_round = kind if isinstance(values, Mapping) and mark in values else kind_of_round
        names = {f.name for f in fields(kind_of_round)}
        if not isinstance(values, Mapping) or not names <= set(values):
            raise InvalidInput("record", values, f"must have {', '.join(sorted(names))}")
        # what later versions add has no meaning here
        values = {name: values[name] for name in values if name in names}
        real = int | float
        kinds: dict[str, Any] = {"round": int, "steps": int}
        kinds |= dict.fromkeys(("metrics", "nodes", "drift", "over_nodes"), dict)
        kinds |= dict.fromkeys(("lr", "bytes_per_client", "seconds"), real)
        kinds |= dict.fromkeys(({"clock_seconds", "clock_total"} & names), real)
        for name, kind in kinds.items():
            if not isinstance(values[name], kind) or isinstance(values[name], bool):
                raise InvalidInput(f"record.{name}", values[name], "is of the wrong kind")
        levels = values["over_nodes"].values()
        over = [each for level in levels for each in (level.values() if isinstance(level, dict) else [level])]
        for each in (values["metrics"], *values["nodes"].values(), *values["drift"].values(), *over):
            if not isinstance(each, dict) or not all(isinstance(value, real) for value in each.values()):
                raise InvalidInput("record.metrics", each, "must be numbers by name")
        named = {name: values[name] for name in ("refused", "too_large", "absent", "late") if name in values}
        for name, nodes in named.items():
            if not isinstance(nodes, list | tuple) or not all(isinstance(each, str) for each in nodes):
                raise InvalidInput(f"record.{name}", nodes, "must be names of nodes")
        if not isinstance(values["renewed"], bool):
            raise InvalidInput("record.renewed", values["renewed"], "must be true or false")
        known: dict[str, Any] = {**values, **{name: tuple(nodes) for name, nodes in named.items()}}
        return kind_of_round(**known)


@dataclass(frozen=True)
class DeployedRound(RoundResult):
    """What one global round of a deployed tree did: there, nodes can also stay away."""

    absent: tuple[str, ...] = ()
    """Nodes that were asked and did not answer in time, once for each time."""


@dataclass(frozen=True)
class ClockedRound(RoundResult):
    """What one global round did in the virtual time of a network."""

    clock_seconds: float = 0.0
    """Seconds that the round takes on the network."""
    clock_total: float = 0.0
    """Seconds on the network since the start of the run."""
    late: tuple[str, ...] = ()
    """Nodes that were asked, and that their parents did not wait for, once for each time."""


@dataclass(frozen=True)
class RankRecord:
    """What one part of the tree saw of a round, or of some meetings in a row of one: plain data, so
    that it can be sent."""

    refused: list[list[Refusal]]
    """Who was refused at each meeting."""
    renewed: bool
    """Whether the root has a new model."""
    tally: EvaluationSums | None
    """The root on this part's share of the test data; None where it was not evaluated."""
    nodes: list[dict[str, dict[str, float]]]
    """Per level that was asked for, the metrics of the nodes this part answers for."""
    client_bytes: int
    """Sent and received by its clients since the start of the run."""
    drift: DriftSamples | None
    clipped: int | None
    """Steps that a clip shortened; None where nothing clips."""
    client_steps: int


@dataclass(frozen=True)
class PartialRecord:
    """Some meetings in a row of a round, as the whole tree saw them: plain data, so that a round
    can be left in the middle."""

    refused: Sequence[Refusal] = ()
    drift: DriftSums | None = field(default_factory=list)
    """None where nobody measures it."""
    clipped: int | None = 0
    client_steps: int = 0

    @staticmethod
    def of(tree: Tree, parts: Sequence[RankRecord]) -> PartialRecord:
        """Put together what each part of the tree saw of the same meetings."""
        at_meetings = zip(*(part.refused for part in parts), strict=True)
        taken = [part.drift for part in parts if part.drift is not None]
        counts = [part.clipped for part in parts if part.clipped is not None]
        return PartialRecord(
            refused=[refusal for at_once in at_meetings for refusal in _in_order(tree, at_once)],
            drift=sum_over_ranks(taken) if taken else None,
            clipped=sum(counts) if len(counts) == len(parts) else None,
            client_steps=sum(part.client_steps for part in parts),
        )

    @staticmethod
    def read(values: Mapping[str, Any], tree: Tree, where: str) -> PartialRecord:
        """Read one from what `dataclasses.asdict` made of it, also by way of JSON."""
        refused, drift, clipped, client_steps = (values[each.name] for each in fields(PartialRecord))
        for each in refused:
            if not _is_list(each, str, bool):
                raise InvalidInput(f"{where}.refused", each, "must be a node's name, and whether it was too large")
            tree.find(each[0])
        for each in drift or ():
            if not (_is_list(each, int, str, list, list) and 0 <= each[0] <= tree.depth and _are_pairs(*each[2:])):
                raise InvalidInput(f"{where}.drift", each, "must be a level, a name, sums and weights")
        return PartialRecord(
            refused=[Refusal(*each) for each in refused],
            drift=None if drift is None else [(level, name, sums, weights) for level, name, sums, weights in drift],
            clipped=None if clipped is None else check_integer(f"{where}.clipped", clipped, at_least=0),
            client_steps=check_integer(f"{where}.client_steps", client_steps, at_least=0),
        )

    def then(self, more: PartialRecord) -> PartialRecord:
        """These meetings and, behind them, those that came after."""
        return PartialRecord(
            refused=[*self.refused, *more.refused],
            drift=None if self.drift is None or more.drift is None else append_syncs(self.drift, more.drift),
            clipped=None if self.clipped is None or more.clipped is None else self.clipped + more.clipped,
            client_steps=self.client_steps + more.client_steps,
        )


EMPTY_RECORD = PartialRecord()
"""The beginning of a round: no meeting has been held yet."""


def merge_records(
    tree: Tree,
    parts: Sequence[RankRecord],
    objective: Objective,
    round: int,
    steps: int,
    lr: float,
    seconds: float,
    before: PartialRecord = EMPTY_RECORD,
) -> RoundResult:
    """The round as the whole tree saw it. before: its first meetings, where the parts saw only
    those after them."""
    tallies = [EvaluationSums(*part.tally) for part in parts if part.tally is not None]
    seen = before.then(PartialRecord.of(tree, parts))
    refused = [name for name, _ in seen.refused]
    nodes = {
        name: found
        for level in zip(*(part.nodes for part in parts), strict=True)
        for part in level
        for name, found in part.items()
    }
    return RoundResult(
        round=round,
        steps=steps,
        lr=lr,
        metrics=finalize_metrics(tallies, objective.metrics) if tallies else {},
        nodes=nodes,
        refused=tuple(refused),
        bytes_per_client=sum(part.client_bytes for part in parts) / tree.leaves,
        seconds=seconds,
        drift=_diagnosis(tree, seen, refused),
        too_large=tuple(name for name, too_large in seen.refused if too_large),
        renewed=parts[0].renewed,
        over_nodes=over_nodes(tree, nodes, objective.better),
    )


def _is_list(value: object, *kinds: type) -> bool:
    """Whether a value has an entry of each of these kinds, and no others."""
    if not isinstance(value, list | tuple) or len(value) != len(kinds):
        return False
    return all(type(each) is kind for each, kind in zip(value, kinds, strict=True))


def _are_pairs(sums: list[Any], weights: list[Any]) -> bool:
    return len(sums) == len(weights) and all(type(each) is float for each in (*sums, *weights))


def _in_order(tree: Tree, parts: Sequence[list[Refusal]]) -> list[Refusal]:
    """What several parts refused as one process would have it: from the leaves up, each level in
    its order."""
    refusals = [refusal for part in parts for refusal in part]
    if sum(map(bool, parts)) < 2:
        return refusals

    def place(refusal: Refusal) -> tuple[int, int]:
        level, number = tree.find(refusal[0])
        return -level, number

    return sorted(refusals, key=place)


def _diagnosis(tree: Tree, seen: PartialRecord, refused: Sequence[str]) -> Levels:
    """What the meetings showed, and who was refused or clipped."""
    if seen.drift is None:
        return {}
    found = drift_by_level(tree.depth, seen.drift)
    for level, count in by_level(tree, refused).items():
        found[level]["refused"] = count
    if seen.clipped is not None and seen.client_steps:
        found[str(tree.depth)]["clipped"] = seen.clipped / seen.client_steps
    return found


def by_level(tree: Tree, names: Sequence[str]) -> dict[str, int]:
    """How many of these nodes are on each level that has any, root first."""
    counts = Counter(tree.find(name)[0] for name in names)
    return {str(level): counts[level] for level in sorted(counts)}


def all_refused_error(tree: Tree, history: Sequence[RoundResult], aloud: bool) -> InvalidInput | None:
    """What is wrong with a run in which nothing is accepted any more; the first round that was lost
    is told of at once.

    It takes `LOST_ROUNDS` in a row, in which half of the clients or more were refused themselves or
    above them: where few take part at a time, the wrong ones may be drawn several times in a
    row.
    """
    last = history[-1]
    if not last.lost:
        return None
    row = list(takewhile(lambda result: result.lost, reversed(history)))
    if aloud and not any(result.lost for result in history[:-1]):
        told = f"round {last.round}: every update was refused, so the model stays as it was: {_why(last)}"
        print(told, file=sys.stderr, flush=True)
    if len(row) < LOST_ROUNDS:
        return None
    refused_N = [np.zeros(size, dtype=bool) for size in tree.sizes]
    for level, number in {tree.find(name) for result in row for name in result.refused}:
        refused_N[level][number] = True
    lost_N = np.any([mask_N[tree.ancestors(level)] for level, mask_N in enumerate(refused_N)], axis=0)
    if 2 * lost_N.sum() < tree.leaves:
        return None
    return InvalidInput("round", last.round, f"every update was refused, {len(row)} rounds in a row: {_why(last)}")


def _why(result: RoundResult) -> str:
    too_large = dict.fromkeys(result.too_large)
    not_finite = [name for name in dict.fromkeys(result.refused) if name not in too_large]
    words = {"not finite": not_finite, "far too large": list(too_large)}
    return "; ".join(f"{why}: {join_names(names)}" for why, names in words.items() if names)
