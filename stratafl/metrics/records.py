"""Record of a global round, merged from the records of all ranks."""

from __future__ import annotations

import functools
import logging
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import takewhile
from typing import Any

import numpy as np

from stratafl.base.errors import InvalidInput, join_names
from stratafl.base.topology import Topology
from stratafl.base.validation import check_integer
from stratafl.federation.update_checks import Rejection
from stratafl.metrics.communication import Total
from stratafl.metrics.drift import DriftSamples, DriftSums, Levels, append_syncs, drift_by_level, sum_over_ranks
from stratafl.metrics.evaluation import EvaluationSums, finalize_metrics
from stratafl.metrics.metrics import Better, Directions
from stratafl.metrics.objective import Goal, Objective

LOG = logging.getLogger("stratafl")

Record = Mapping[str, Any]
"""The record of a round, as in rounds.jsonl."""


def measured(record: Record) -> dict[str, float]:
    """A round's test metrics, each finite or NaN; empty where it was not evaluated.

    Where the loss is not finite, all metrics are NaN. Records of earlier versions have an accuracy
    even then, computed as if the first of NaN scores were the highest.
    """
    metrics = dict(_numbers(record.get("metrics")))
    return dict.fromkeys(metrics, math.nan) if math.isnan(metrics.get("loss", 0.0)) else metrics


def diverged(records: Iterable[Record]) -> int | None:
    """The round from which on no evaluated round has a finite loss; None if the last evaluated loss
    is finite."""
    return functools.reduce(diverged_after, records, None)


def diverged_after(before: int | None, record: Record) -> int | None:
    """The result of `diverged` with one more record, given its result before."""
    values = measured(record)
    if not values:
        return before
    return (before or record["round"]) if math.isnan(values.get("loss", min(values.values()))) else None


def _numbers(table: object) -> Iterator[tuple[str, float]]:
    """The numbers of a table of a file, by name; those that are not finite as NaN."""
    for name, value in table.items() if isinstance(table, Mapping) else ():
        if isinstance(value, int | float) and not isinstance(value, bool):
            try:
                number = float(value)
            except OverflowError:
                number = math.nan
            yield str(name), number if math.isfinite(number) else math.nan


OverNodes = dict[str, dict[str, dict[str, float]]]
"""Mean, worst and deviation by level (as text, since JSON has no other keys) and metric."""


def over_nodes(tree: Topology, nodes: Mapping[str, Mapping[str, float]], better: Directions) -> OverNodes:
    """Mean, worst and population deviation over the nodes of each level, by metric.

    All three are NaN where the value of any node is not finite.
    """
    levels: dict[str, dict[str, list[float]]] = {}
    for name, metrics in nodes.items():
        level = levels.setdefault(str(tree.find(name)[0]), {})
        for metric, value in metrics.items():
            level.setdefault(metric, []).append(value)
    return {
        level: {metric: _aggregate(values, better.get(metric, "higher")) for metric, values in metrics.items()}
        for level, metrics in sorted(levels.items(), key=lambda item: int(item[0]))
    }


def _aggregate(values: Sequence[float], better: Better) -> dict[str, float]:
    if not all(map(math.isfinite, values)):
        return dict.fromkeys(("mean", "worst", "deviation"), math.nan)
    worst = min(values) if better == "higher" else max(values)
    return {"mean": statistics.fmean(values), "worst": worst, "deviation": statistics.pstdev(values)}


LOST_ROUNDS = 3
"""Number of successive lost rounds (see `RoundResult.lost`) after which a run ends, if they hit
half of the clients."""


Traffic = dict[str, dict[str, int]]
"""Messages and bytes by level (as text, since JSON has no other keys) and direction."""


@dataclass(frozen=True)
class RoundResult:
    """Record of one global round."""

    round: int
    """Counted from 1."""
    steps: int
    """Local steps per client since the start of the run, by the schedule. If clients count passes
    over their own data: the mean over the clients; in a deployed tree, the number of passes."""
    lr: float
    metrics: dict[str, float]
    """The root's loss, accuracy and further metrics on the test data; empty where this round was
    not evaluated."""
    nodes: dict[str, dict[str, float]]
    """The metrics of each node of the levels asked for, by its model just before its parent's
    replaced it; on its own test data, where nodes have that."""
    refused: tuple[str, ...]
    """Nodes whose update was rejected, once for each time."""
    bytes_per_client: float
    """Sent and received by a client since the start of the run, mean over the clients."""
    seconds: float
    drift: Levels = field(default_factory=dict)
    """Drift measures by level and name: see docs/diagnostics.md."""
    too_large: tuple[str, ...] = ()
    """Rejected nodes whose update was finite, but far too large (see `update_checks`)."""
    renewed: bool = True
    """Whether the root has a new model: not where all updates were rejected, or none arrived."""
    traffic: Traffic = field(default_factory=dict)
    """Messages and bytes since the start of the run between the nodes of each level and their
    parents, by level and direction: `messages_up`, `messages_down`, `bytes_up`, `bytes_down`. Empty
    where it was not counted: in runs of earlier versions, and in a deployed tree."""
    over_nodes: OverNodes = field(default_factory=dict)
    """The `mean`, the `worst` and the `deviation` over the nodes of the levels asked for below the
    root, by level and metric."""

    @property
    def lost(self) -> bool:
        """Whether updates were rejected, and the root has no new model."""
        return bool(self.refused) and not self.renewed

    def reaches(self, goals: Sequence[Goal]) -> bool:
        """Whether this round was evaluated and reaches all goals; False where there are none."""
        return bool(goals) and all(goal.is_reached(self.metrics.get(goal.metric)) for goal in goals)

    @staticmethod
    def of(values: Mapping[str, Any]) -> RoundResult:
        """Read a record that `dataclasses.asdict` wrote, also by way of JSON."""
        # records of earlier versions lack some fields, and those of later versions have more
        table = (
            {"too_large": (), "renewed": True, "over_nodes": {}, "traffic": {}, **values}
            if isinstance(values, Mapping)
            else {}
        )
        cls = ClockedRound if "late" in table else DeployedRound if "absent" in table else RoundResult
        names = {f.name for f in fields(cls)}
        if not names <= set(table):
            raise InvalidInput("record", values, f"must have {', '.join(sorted(names))}")
        values = {name: table[name] for name in table if name in names}
        real = int | float
        kinds: dict[str, Any] = {"round": int, "steps": int}
        kinds |= dict.fromkeys(("metrics", "nodes", "drift", "over_nodes", "traffic"), dict)
        kinds |= dict.fromkeys(("lr", "bytes_per_client", "seconds", "clock_seconds", "clock_total"), real)
        for name in [name for name in kinds if name in names]:
            if not isinstance(values[name], kinds[name]) or isinstance(values[name], bool):
                raise InvalidInput(f"record.{name}", values[name], "is of the wrong kind")
        levels = values["over_nodes"].values()
        over = [table for level in levels for table in (level.values() if isinstance(level, dict) else [level])]
        for table in (
            values["metrics"],
            *values["nodes"].values(),
            *values["drift"].values(),
            *values["traffic"].values(),
            *over,
        ):
            if not isinstance(table, dict) or not all(isinstance(value, real) for value in table.values()):
                raise InvalidInput("record.metrics", table, "must be numbers by name")
        named = {name: values[name] for name in ("refused", "too_large", "absent", "late") if name in values}
        for name, nodes in named.items():
            if not isinstance(nodes, list | tuple) or not all(isinstance(node, str) for node in nodes):
                raise InvalidInput(f"record.{name}", nodes, "must be names of nodes")
        if not isinstance(values["renewed"], bool):
            raise InvalidInput("record.renewed", values["renewed"], "must be true or false")
        typed: dict[str, Any] = {**values, **{name: tuple(nodes) for name, nodes in named.items()}}
        return cls(**typed)


@dataclass(frozen=True)
class DeployedRound(RoundResult):
    """Record of one global round of a deployed tree, where nodes can be absent."""

    absent: tuple[str, ...] = ()
    """Nodes that did not answer their parent in time, once for each time."""


@dataclass(frozen=True)
class ClockedRound(RoundResult):
    """Record of one global round in the virtual time of a network."""

    clock_seconds: float = 0.0
    """Seconds that the round takes on the network."""
    clock_total: float = 0.0
    """Seconds on the network since the start of the run."""
    late: tuple[str, ...] = ()
    """Nodes that their parents did not wait for, once for each time."""


@dataclass(frozen=True, kw_only=True)
class RankRecord:
    """Observations of one rank in a round, or in some successive synchronisations of a round."""

    rejected: list[list[Rejection]]
    """The rejections of every synchronisation."""
    renewed: bool
    """Whether the root has a new model."""
    evaluation: EvaluationSums | None
    """Sums for the root on this rank's share of the test data; None where it was not evaluated."""
    nodes: list[dict[str, dict[str, float]]]
    """For every evaluated level, the metrics of the nodes that this rank owns."""
    traffic: list[Total]
    """Messages of the nodes that this rank owns since the start of the run, by level from 1."""
    drift: DriftSamples | None
    clipped: int | None
    """Steps that a clip shortened; None where nothing clips."""
    client_steps: int

    def to_plain(self) -> dict[str, Any]:
        """The record as plain data, to send it to other ranks."""
        return asdict(self)

    @staticmethod
    def from_plain(values: Mapping[str, Any]) -> RankRecord:
        """Read a record that `to_plain` wrote, also by way of JSON."""
        evaluation, drift = values["evaluation"], values["drift"]
        typed = {
            "rejected": [[Rejection(*rejection) for rejection in at_sync] for at_sync in values["rejected"]],
            "evaluation": None if evaluation is None else EvaluationSums(*evaluation),
            "drift": None if drift is None else [(level, *sample) for level, *sample in drift],
            "traffic": [Total(**total) for total in values["traffic"]],
        }
        return RankRecord(**{**values, **typed})


@dataclass(frozen=True, kw_only=True)
class PartialRecord:
    """The observations of all ranks in some successive synchronisations of a round; empty before
    the first. It is saved with a state inside the round."""

    rejected: Sequence[Rejection] = ()
    drift: DriftSums | None = field(default_factory=list)
    """None where drift is not measured."""
    clipped: int | None = 0
    client_steps: int = 0

    @staticmethod
    def merge_ranks(tree: Topology, parts: Sequence[RankRecord]) -> PartialRecord:
        """Merge the records of all ranks of the same synchronisations."""
        by_sync = zip(*(part.rejected for part in parts), strict=True)
        drifts = [part.drift for part in parts if part.drift is not None]
        counts = [part.clipped for part in parts if part.clipped is not None]
        return PartialRecord(
            rejected=[rejection for at_sync in by_sync for rejection in _in_order(tree, at_sync)],
            drift=sum_over_ranks(drifts) if drifts else None,
            clipped=sum(counts) if len(counts) == len(parts) else None,
            client_steps=sum(part.client_steps for part in parts),
        )

    @staticmethod
    def from_plain(values: Mapping[str, Any], tree: Topology, path: str) -> PartialRecord:
        """Read a record that `dataclasses.asdict` wrote, also by way of JSON; path: for errors."""
        rejected, drift, clipped, client_steps = (values[part.name] for part in fields(PartialRecord))
        for rejection in rejected:
            if not _is_list(rejection, str, bool):
                raise InvalidInput(f"{path}.rejected", rejection, "must be a node's name, and whether it was too large")
            tree.find(rejection[0])
        for sums in drift or ():
            if not (_is_list(sums, int, str, list, list) and 0 <= sums[0] <= tree.depth and _are_pairs(*sums[2:])):
                raise InvalidInput(f"{path}.drift", sums, "must be a level, a name, sums and weights")
        return PartialRecord(
            rejected=[Rejection(*rejection) for rejection in rejected],
            drift=None if drift is None else [(level, name, sums, weights) for level, name, sums, weights in drift],
            clipped=None if clipped is None else check_integer(f"{path}.clipped", clipped, at_least=0),
            client_steps=check_integer(f"{path}.client_steps", client_steps, at_least=0),
        )

    def append(self, later: PartialRecord) -> PartialRecord:
        """Append the observations of later synchronisations."""
        return PartialRecord(
            rejected=[*self.rejected, *later.rejected],
            drift=None if self.drift is None or later.drift is None else append_syncs(self.drift, later.drift),
            clipped=None if self.clipped is None or later.clipped is None else self.clipped + later.clipped,
            client_steps=self.client_steps + later.client_steps,
        )


def merge_records(
    tree: Topology,
    parts: Sequence[RankRecord],
    objective: Objective,
    *,
    round: int,
    steps: int,
    lr: float,
    seconds: float,
    before: PartialRecord | None = None,
) -> RoundResult:
    """Merge the records of all ranks into the record of a round.

    before: the round's first synchronisations, where the ranks' records only have later ones.
    """
    evaluations = [part.evaluation for part in parts if part.evaluation is not None]
    total = (before or PartialRecord()).append(PartialRecord.merge_ranks(tree, parts))
    rejected = [rejection.name for rejection in total.rejected]
    nodes = {
        name: metrics
        for level in zip(*(part.nodes for part in parts), strict=True)
        for part in level
        for name, metrics in part.items()
    }
    return RoundResult(
        round=round,
        steps=steps,
        lr=lr,
        metrics=finalize_metrics(evaluations, objective.metrics) if evaluations else {},
        nodes=nodes,
        refused=tuple(rejected),
        bytes_per_client=sum(part.traffic[-1].bytes for part in parts) / tree.leaves,
        seconds=seconds,
        drift=_drift_measures(tree, total, rejected),
        too_large=tuple(rejection.name for rejection in total.rejected if rejection.is_oversized),
        renewed=parts[0].renewed,
        traffic=_traffic_by_level(parts),
        over_nodes=over_nodes(tree, nodes, objective.better),
    )


def _traffic_by_level(parts: Sequence[RankRecord]) -> Traffic:
    """Messages and bytes of each level, summed over the ranks."""
    levels = zip(*([asdict(total) for total in part.traffic] for part in parts), strict=True)
    return {
        str(level): {name: sum(total[name] for total in totals) for name in totals[0]}
        for level, totals in enumerate(levels, 1)
    }


def _is_list(value: object, *kinds: type) -> bool:
    """Whether a value is a list with one entry of each of these types."""
    if not isinstance(value, list | tuple) or len(value) != len(kinds):
        return False
    return all(type(entry) is kind for entry, kind in zip(value, kinds, strict=True))


def _are_pairs(sums: list[Any], weights: list[Any]) -> bool:
    return len(sums) == len(weights) and all(type(number) is float for number in (*sums, *weights))


def _in_order(tree: Topology, parts: Sequence[list[Rejection]]) -> list[Rejection]:
    """The rejections of several ranks in the order of a single process: from the clients up, each
    level in its order."""
    rejections = [rejection for part in parts for rejection in part]
    if sum(map(bool, parts)) < 2:
        return rejections

    def key(rejection: Rejection) -> tuple[int, int]:
        level, number = tree.find(rejection.name)
        return -level, number

    return sorted(rejections, key=key)


def _drift_measures(tree: Topology, total: PartialRecord, rejected: Sequence[str]) -> Levels:
    """Drift measures, counts of rejections and shares of clipped steps, by level."""
    if total.drift is None:
        return {}
    levels = drift_by_level(tree.depth, total.drift)
    for level, count in by_level(tree, rejected).items():
        levels[level]["refused"] = count
    if total.clipped is not None and total.client_steps:
        levels[str(tree.depth)]["clipped"] = total.clipped / total.client_steps
    return levels


def by_level(tree: Topology, names: Sequence[str]) -> dict[str, int]:
    """The number of these names on each level that has any, root first; repeats count."""
    counts = Counter(tree.find(name)[0] for name in names)
    return {str(level): counts[level] for level in sorted(counts)}


def all_refused_error(tree: Topology, history: Sequence[RoundResult], warns: bool) -> InvalidInput | None:
    """The error of a run in which no update is accepted any more, or None.

    It takes `LOST_ROUNDS` lost rounds in a row, in which at least half of the clients were
    rejected, or a node above them was: where few take part at a time, the wrong ones may be sampled
    several times in a row. warns: log a warning after the first lost round.
    """
    last = history[-1]
    if not last.lost:
        return None
    lost_rounds = list(takewhile(lambda result: result.lost, reversed(history)))
    if warns and not any(result.lost for result in history[:-1]):
        reasons = _reasons(last)
        LOG.warning("round %d: every update was refused, so the model stays as it was: %s", last.round, reasons)
    if len(lost_rounds) < LOST_ROUNDS:
        return None
    is_rejected = [np.zeros(size, dtype=bool) for size in tree.sizes]
    for level, number in {tree.find(name) for result in lost_rounds for name in result.refused}:
        is_rejected[level][number] = True
    lost_N = np.any([mask_N[tree.ancestors(level)] for level, mask_N in enumerate(is_rejected)], axis=0)
    if 2 * lost_N.sum() < tree.leaves:
        return None
    expected = f"every update was refused, {len(lost_rounds)} rounds in a row: {_reasons(last)}"
    return InvalidInput("round", last.round, expected)


def _reasons(result: RoundResult) -> str:
    too_large = dict.fromkeys(result.too_large)
    not_finite = [name for name in dict.fromkeys(result.refused) if name not in too_large]
    reasons = {"not finite": not_finite, "far too large": list(too_large)}
    return "; ".join(f"{reason}: {join_names(names)}" for reason, names in reasons.items() if names)
