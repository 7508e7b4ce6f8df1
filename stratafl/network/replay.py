"""Participation and traffic of a run's rounds, without training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from stratafl.base.topology import Topology
from stratafl.core.participation import Participation, sample_participants
from stratafl.core.schedule import SyncSchedule
from stratafl.data.batches import steps_per_epoch
from stratafl.federation.events import GradientsExchanged, LevelSynchronized, ModelFromAbove, RoundBegan, SyncCounts
from stratafl.metrics.communication import CommunicationMeter, LinkCounts
from stratafl.network.messages import MessageSizes
from stratafl.network.timeline import (
    Activity,
    ActivityCallback,
    Messages,
    NetworkTimeline,
    RoundCosts,
    Stage,
    TimelineState,
)
from stratafl.network.waiting import WaitPolicy

BLOCK_VALUES = 4_000_000
"""Approximate number of values in the matrices of rounds that are computed side by side."""

GRADIENT_ROUND_OFFSET = 1 << 40
"""Offset of a round's counter for the exchange of gradients before it, which has random draws of
its own."""


@dataclass(frozen=True, eq=False)
class Workload:
    """Quantities of a run that decide which nodes take part and what is sent."""

    tree: Topology
    schedule: SyncSchedule
    participation: tuple[Participation, ...]
    """Participation of each edge level, root first."""
    seed: int
    sizes: MessageSizes
    steps_N: np.ndarray
    """Local steps of each leaf between two synchronisations."""
    samples_N: np.ndarray
    """Samples that each leaf takes in one step."""
    rounds: int
    wait: tuple[WaitPolicy, ...] = ()
    """Waiting policies, root first; without them all parents wait for all children."""

    @property
    def has_waiting_policy(self) -> bool:
        """Whether the time line decides which nodes take part."""
        return any(not policy.waits_for_all for policy in self.wait)

    def applies_late_updates(self, level: int) -> bool:
        """Whether late updates are applied at an edge level."""
        return bool(self.wait) and self.wait[level - 1].applies_late_updates

    @property
    def is_asynchronous(self) -> bool:
        """Whether work continues from one global round to the next."""
        return any(policy.applies_late_updates for policy in self.wait)

    @property
    def is_steady(self) -> bool:
        """Whether the same nodes take part in every round."""
        return not self.has_waiting_policy and all(
            share is None or share == "all" or (type(share) is float and share == 1) for share in self.participation
        )


@dataclass(frozen=True, eq=False)
class LevelTraffic:
    """Traffic of one edge level, for several rounds (R)."""

    messages_up: np.ndarray
    messages_down: np.ndarray
    bytes_up: np.ndarray
    bytes_down: np.ndarray


@dataclass(frozen=True, eq=False)
class RoundBlock:
    """Consecutive rounds of a run, with one row of every array for each; or equal rounds, with one
    row for all."""

    first: int
    """Number of the first round, counted from 0."""
    rounds: int
    stages: tuple[Stage, ...]
    traffic: tuple[LevelTraffic, ...]
    """Traffic of each round, as the run itself records it; root's edge level first."""
    costs: tuple[RoundCosts, ...] = ()
    """Costs of each round, where they do not follow from its stages alone."""

    def repeated(self, schedule: SyncSchedule, rounds: range) -> tuple[Stage, ...]:
        """Stages of equal rounds for some of the repetitions, each with random draws of its own."""
        numbers_R = np.arange(rounds.start, rounds.stop)

        def repeat(stage: Stage) -> Stage:
            counter = {level: first + schedule.meetings[level] * numbers_R for level, first in stage.counter.items()}
            repeated = stage.map_rows(lambda rows_1N: np.broadcast_to(rows_1N, (len(rounds), rows_1N.shape[1])))
            return replace(repeated, counter=counter)

        return tuple(map(repeat, self.stages))


ByLevel = dict[int, np.ndarray]
MessageCounts = tuple[np.ndarray, np.ndarray]
"""Number and bytes of the messages to or from each node of a level."""


class RoundStage(NamedTuple):
    """Fields of a `Stage` for a single round, without the local steps."""

    begin: int
    end: int
    active: ByLevel
    downloads: dict[int, MessageCounts]
    uploads: dict[int, MessageCounts]
    counter: dict[int, int]
    selected: ByLevel | None = None


class ReplayedRound:
    """Replayed global round: participants and traffic per stage and level."""

    def __init__(self) -> None:
        self.stages: list[RoundStage] = []
        self.traffic: list[tuple[np.ndarray, ...]] = []
        self.costs: RoundCosts | None = None
        """Time and energy of the round, where a time line was given."""
        self.selected: dict[tuple[int, int], np.ndarray] = {}
        """Nodes that were selected, by level and the number of its round."""
        self.arrived: dict[tuple[int, int], np.ndarray] = {}
        """Nodes that arrived in time, also below nodes that were late themselves."""

    def participants(self, workload: Workload) -> dict[tuple[int, int], np.ndarray]:
        """Participants of each level's rounds.

        These are the nodes that arrived in time, or whose late update will be applied, and all of
        whose ancestors take part.
        """
        participants: dict[tuple[int, int], np.ndarray] = {}
        schedule, tree = workload.schedule, workload.tree
        for level, number in sorted(self.arrived):
            nodes_N = (self.selected if workload.applies_late_updates(level) else self.arrived)[level, number]
            if level > 1:
                above = number * schedule.meetings[level - 1] // schedule.meetings[level]
                nodes_N = nodes_N & participants[level - 1, int(above)][tree.parents[level]]
            participants[level, number] = nodes_N
        return participants


class WorkloadReplay:
    """State of a replay: traffic, participants, and the number of rounds that each level has
    begun."""

    def __init__(self, workload: Workload, timeline: NetworkTimeline | None = None):
        """timeline: decides which nodes are late; without it none are."""
        self.workload, self.tree, self.timeline = workload, workload.tree, timeline
        self.traffic, self.top = CommunicationMeter(workload.tree), 0
        self.rounds_begun = [0] * (workload.tree.depth + 1)
        self.active = [np.ones(n, dtype=bool) for n in workload.tree.sizes]
        self.in_progress = [np.zeros(n, dtype=bool) for n in workload.tree.sizes]
        """Nodes whose work is in progress, by level at which late updates are applied."""
        self.has_model = [np.zeros(n, dtype=bool) for n in workload.tree.sizes]
        """Nodes that have a model to send, by level; an aggregator that received none has not."""
        self.state = TimelineState(1)

    def next_round(self, callback: ActivityCallback | None = None) -> ReplayedRound:
        """Replay the next global round."""
        if not self.workload.is_asynchronous:
            self.state = TimelineState(1)
        replayed, depth, state = ReplayedRound(), self.tree.depth, self.state
        begin_seconds = state.begin_round(callback)
        totals = [np.zeros((4, size), dtype=np.int64) for size in self.tree.sizes]
        # answers to the last synchronisation are counted already, and belong to the round before
        self._add_pending(totals, sign=-1)
        for event in self.workload.schedule.events():
            begin, restarted = max(self.top, 1), self._restarted_levels()
            self._begin(restarting=bool(restarted))
            if restarted:
                self._exchange_gradients(replayed, begin, restarted, totals)
                begin = restarted[0]
            active = {level: self.active[level] for level in range(begin, depth + 1)}
            counter = {level: self.rounds_begun[level] - 1 for level in range(begin, depth + 1)}
            downloads = self._collect_traffic("down", range(begin, depth + 1), totals)
            self._update_has_model(event.top_level)
            uploads = {level: self._uploads(level) for level in range(event.top_level, depth + 1)}
            counter |= {level: self.rounds_begun[level] - 1 for level in range(event.top_level, depth + 1)}
            arrived = self._play(replayed, RoundStage(begin, event.top_level, active, downloads, uploads, counter))
            for level in range(depth, event.top_level - 1, -1):
                self._synchronize(level, arrived[level] & self.has_model[level], relayed=level > event.top_level)
                self.in_progress[level] = self.in_progress[level] & ~arrived[level]
            self._collect_traffic("up", range(event.top_level, depth + 1), totals)
            has_correction = [False, *(self.workload.sizes.edge(level).has_correction for level in range(1, depth + 1))]
            self.traffic.on_model_from_above(ModelFromAbove(top_level=event.top_level, has_correction=has_correction))
            self.top = event.top_level
        self._add_pending(totals, sign=1)
        replayed.traffic = [tuple(total.sum(axis=1)) for total in totals]
        if self.timeline is not None:
            round_totals = state.totals
            replayed.costs = RoundCosts(state.seconds_R - begin_seconds, round_totals.parts, round_totals.joules_R)
        if self.workload.has_waiting_policy:
            participants = replayed.participants(self.workload)
            replayed.stages = [
                stage._replace(
                    active={level: participants[level, stage.counter[level]] for level in stage.active},
                    selected=stage.active,
                )
                for stage in replayed.stages
            ]
        return replayed

    def _exchange_gradients(
        self, replayed: ReplayedRound, begin: int, restarted: Sequence[int], totals: list[np.ndarray]
    ) -> None:
        """Play the stage in which nodes send the gradients from which corrections are set."""
        depth = self.tree.depth
        active = {level: self.active[level] for level in range(begin, depth + 1)}
        counter = {level: self.rounds_begun[level] - 1 for level in range(begin, depth + 1)}
        downloads = self._collect_traffic("down", range(begin, depth + 1), totals)
        self._restart(restarted)
        uploads = self._collect_traffic("up", range(restarted[0], depth + 1), totals)
        early = {level: count + GRADIENT_ROUND_OFFSET for level, count in counter.items()}
        early |= {
            level: self.rounds_begun[level] - 1 + GRADIENT_ROUND_OFFSET for level in range(restarted[0], depth + 1)
        }
        # messages owed above the gradients' levels travel with the models
        for level in range(begin, restarted[0]):
            owed = self._collect_traffic("down", range(level, level + 1), totals)[level]
            downloads[level] = _combined(downloads[level], owed)
        self._play(replayed, RoundStage(begin, restarted[0], active, downloads, uploads, early))

    def _uploads(self, level: int) -> MessageCounts:
        """Messages that children are about to send, in time or not; without a model, a notice of
        that."""
        count_N = self.active[level].astype(np.int64)
        return count_N, count_N * self.has_model[level] * self.workload.sizes.edge(level).upload_bytes

    def _update_has_model(self, top: int) -> None:
        """Mark the nodes that get a model, up to the parents that synchronise at edge level `top`.

        Of children with models, at least one arrives.
        """
        leaves = self.tree.depth
        self.has_model[leaves] = self.has_model[leaves] | self.active[leaves]
        for level in range(leaves, top - 1, -1):
            sending_N = (self.active[level] | self.in_progress[level]) & self.has_model[level]
            self.has_model[level - 1][self.tree.parents[level][sending_N]] = True

    def _play(self, replayed: ReplayedRound, stage: RoundStage) -> ByLevel:
        """Add a stage and play it on the time line; returns the nodes that arrive in time, by
        level."""
        replayed.stages.append(stage)
        arrived = {level: self.active[level] for level in range(stage.end, self.tree.depth + 1)}
        if self.timeline is not None:
            arrivals = self.timeline.play_stage(self.state, _stage(self.workload, [stage]))
            arrived = {level: arrived_1N[0] for level, arrived_1N in arrivals.items()}
        levels = range(stage.begin, self.tree.depth + 1)
        replayed.selected |= {(level, stage.counter[level]): stage.active[level] for level in levels}
        replayed.arrived |= {(level, stage.counter[level]): arrived_N for level, arrived_N in arrived.items()}
        return arrived

    def traffic_state(self) -> tuple:
        """State that decides the next round if all nodes take part."""
        saved = self.traffic.saved()
        arrays = [*saved["outdated"], *saved["corrections_due"], *saved["down"]["bytes"], *saved["up"]["bytes"]]
        return self.top, *(array.tobytes() for array in arrays)

    def _restarted_levels(self) -> list[int]:
        levels = range(max(self.top + 1, 1), self.tree.depth + 1)
        return [level for level in levels if self.workload.sizes.edge(level).from_gradient]

    def _begin(self, restarting: bool) -> None:
        workload = self.workload
        for level in range(max(self.top, 1), self.tree.depth + 1):
            arguments = workload.participation[level - 1], self.tree, level, self.rounds_begun[level], workload.seed
            selected_N = sample_participants(*arguments, self.in_progress[level])
            self.active[level] = selected_N & self.active[level - 1][self.tree.parents[level]]
            self.has_model[level] = self.has_model[level] & ~self.active[level]
            if workload.applies_late_updates(level):
                self.in_progress[level] = self.in_progress[level] | self.active[level]
            self.rounds_begun[level] += 1
            began = RoundBegan(
                level=level,
                active_N=self.active[level],
                broadcast_bytes=workload.sizes.edge(level).download_bytes,
                model_bytes=workload.sizes.model,
                restarts_from_gradients=restarting,
            )
            self.traffic.on_round_begin(began)

    def _restart(self, restarted: Sequence[int]) -> None:
        senders = {level: self.active[level] for level in range(restarted[0], self.tree.depth + 1)}
        exchanged = GradientsExchanged(
            top_level=self.top,
            restarted_levels=restarted,
            sent=senders,
            active=self.active,
            model_bytes=self.workload.sizes.model,
        )
        self.traffic.on_gradients_exchanged(exchanged)

    def _synchronize(self, level: int, arrived_N: np.ndarray, relayed: bool) -> None:
        edge = self.workload.sizes.edge(level)
        counts = SyncCounts(
            reported_N=arrived_N,
            accepted_N=arrived_N,
            upload_bytes=edge.upload_bytes,
            broadcast_bytes=edge.download_bytes,
            is_answered=edge.answered_when_relayed if relayed else edge.answered,
        )
        self.traffic.on_level_synchronized(LevelSynchronized(level=level, counts=counts, models=None))

    def _direction(self, way: str) -> LinkCounts:
        communication = self.traffic.communication
        return communication.up if way == "up" else communication.down

    def _collect_traffic(self, way: str, levels: range, totals: list[np.ndarray]) -> dict[int, MessageCounts]:
        """Return the counted messages of these levels, add them to the totals and reset the
        counts."""
        direction, messages, row = self._direction(way), {}, 0 if way == "up" else 1
        for level in levels:
            messages[level] = direction.messages[level], direction.bytes[level]
            totals[level][row] += direction.messages[level]
            totals[level][row + 2] += direction.bytes[level]
            direction.messages[level] = np.zeros_like(direction.messages[level])
            direction.bytes[level] = np.zeros_like(direction.bytes[level])
        return messages

    def _add_pending(self, totals: list[np.ndarray], sign: int) -> None:
        """Add the answers that are counted already and will be collected in the next round."""
        for way, row in (("up", 0), ("down", 1)):
            direction = self._direction(way)
            for level, total in enumerate(totals):
                total[row] += sign * direction.messages[level]
                total[row + 2] += sign * direction.bytes[level]


def _combined(one: MessageCounts, other: MessageCounts) -> MessageCounts:
    """Combine two messages to the same nodes that travel as one: the bytes of both."""
    return np.maximum(one[0], other[0]), one[1] + other[1]


def leaf_steps(
    counts_N: Sequence[int] | np.ndarray, batch: int | None, schedule: SyncSchedule, counts_epochs: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Local steps of each leaf between two synchronisations, and samples per step.

    counts_N: samples of each leaf. counts_epochs: whether the lowest period counts epochs.
    """
    counts_N, period = np.asarray(counts_N, dtype=np.int64), schedule.periods[-1]
    samples_N = counts_N if batch is None else np.minimum(batch, np.where(counts_N > 0, counts_N, batch))
    if not counts_epochs:
        return np.full(len(counts_N), period), samples_N
    return np.array([period * steps_per_epoch(max(int(count), 1), batch) for count in counts_N]), samples_N


def block_size(workload: Workload) -> int:
    """Number of rounds that are computed side by side."""
    return max(1, BLOCK_VALUES // (sum(workload.tree.sizes) * int(workload.schedule.meetings[-1])))


def replay_rounds(workload: Workload, timeline: NetworkTimeline | None = None) -> Iterator[RoundBlock]:
    """Replay the rounds of a run in blocks.

    Where all rounds are alike from some round on, the last block has one of them and their number.
    timeline: needed only where nodes can be late.
    """
    replay = WorkloadReplay(workload, timeline if workload.has_waiting_policy else None)
    size = block_size(workload)
    replayed: list[ReplayedRound] = []
    first, before = 0, None
    for round in range(workload.rounds):
        replayed.append(replay.next_round())
        if workload.is_steady:
            state = replay.traffic_state()
            if state == before:
                if replayed[:-1]:
                    yield _block(workload, replayed[:-1], first)
                yield replace(_block(workload, replayed[-1:], round), rounds=workload.rounds - round)
                return
            before = state
        if len(replayed) == size:
            yield _block(workload, replayed, first)
            first, replayed = round + 1, []
    if replayed:
        yield _block(workload, replayed, first)


def _block(workload: Workload, rounds: Sequence[ReplayedRound], first: int) -> RoundBlock:
    """Stack replayed rounds."""
    numbers = range(len(rounds[0].stages))
    stages = [_stage(workload, [replayed.stages[number] for replayed in rounds]) for number in numbers]
    traffic = []
    for level in range(1, workload.tree.depth + 1):
        counts = np.array([replayed.traffic[level] for replayed in rounds], dtype=np.float64).reshape(-1, 4).T
        traffic.append(LevelTraffic(*counts))
    costs = tuple(replayed.costs for replayed in rounds if replayed.costs is not None)
    return RoundBlock(first, len(rounds), tuple(stages), tuple(traffic), costs if workload.is_asynchronous else ())


def _stage(workload: Workload, stages: Sequence[RoundStage]) -> Stage:
    """Stack the same stage of several rounds."""
    begin, end, depth = stages[0].begin, stages[0].end, workload.tree.depth
    below, above = range(begin, depth + 1), range(end, depth + 1)
    counter = {level: np.array([stage.counter[level] for stage in stages]) for level in stages[0].counter}
    is_gradient = bool(counter[depth][0] >= GRADIENT_ROUND_OFFSET)
    selected = [stage.selected for stage in stages if stage.selected is not None]
    return Stage(
        begin=begin,
        end=end,
        active={level: np.stack([stage.active[level] for stage in stages]) for level in below},
        downloads={level: _messages([stage.downloads[level] for stage in stages]) for level in below},
        uploads={level: _messages([stage.uploads[level] for stage in stages]) for level in above},
        counter=counter,
        steps_N=np.ones_like(workload.steps_N) if is_gradient else workload.steps_N,
        selected={level: np.stack([nodes[level] for nodes in selected]) for level in below} if selected else None,
    )


def _messages(parts: Sequence[MessageCounts]) -> Messages:
    return Messages(*(np.stack([part[n] for part in parts]).astype(np.float64) for n in (0, 1)))


def trace_round(workload: Workload, round: int, timeline: NetworkTimeline, callback: ActivityCallback) -> None:
    """Emit the activities of all nodes in one global round, counted from 0, with times from its
    start."""
    if not workload.is_asynchronous:
        timeline.round_costs(_stages_of_round(workload, round, timeline), 1, callback)
        return
    replay, activities = WorkloadReplay(workload, timeline), list[Activity]()
    for _ in range(round):
        replay.next_round(activities.append)
        seconds = replay.state.seconds_R[0]
        activities = [activity for activity in activities if (activity.end_RN > seconds)[activity.active_RN].any()]
    begin = float(replay.state.seconds_R[0])
    replay.next_round(activities.append)
    timeline.emit_rest(replay.state)
    end = float(replay.state.seconds_R[0])
    for activity in activities:
        # activities that began before the round, or last longer, are cut off
        shape = activity.active_RN.shape
        begin_RN, end_RN = (np.broadcast_to(times, shape) for times in (activity.begin_RN, activity.end_RN))
        in_round_RN = (begin_RN <= end) & ((begin_RN >= begin) | (end_RN > begin))
        span = np.clip((begin_RN - begin, end_RN - begin), 0.0, end - begin)
        active_RN = activity.active_RN & in_round_RN
        callback(activity._replace(begin_RN=span[0], end_RN=span[1], active_RN=active_RN))


def _stages_of_round(workload: Workload, round: int, timeline: NetworkTimeline) -> tuple[Stage, ...]:
    """Stages of one global round, counted from 0."""
    for block in replay_rounds(replace(workload, rounds=round + 1), timeline):
        row = round - block.first
        if len(block.traffic[0].bytes_up) < block.rounds:
            return block.repeated(workload.schedule, range(row, row + 1))
        if row < block.rounds:
            rows = slice(row, row + 1)
            return tuple(
                replace(
                    stage.map_rows(lambda values_RN: values_RN[rows]),
                    counter={level: counter_R[rows] for level, counter_R in stage.counter.items()},
                )
                for stage in block.stages
            )
    raise AssertionError("a workload has all its rounds")
