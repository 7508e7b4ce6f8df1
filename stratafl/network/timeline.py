"""Time line of a global round: download, compute, upload, wait, aggregate.

Shape suffixes: R global rounds, N nodes of a level, M nodes of the level above, F phases.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from stratafl.network.instance import NetworkInstance
from stratafl.network.links import SiblingGroups, Transfers
from stratafl.network.waiting import WAIT_FOR_ALL, ClosedRound, WaitPolicy, close_round

OFFLINE, COMPUTE, DOWNLOAD, UPLOAD, WAIT, AGGREGATE, SUBTREE = PARTS = (
    "away", "compute", "down", "up", "wait", "merge", "work",
)  # fmt: skip
"""Kinds of activity; their values are the names in files. SUBTREE: an aggregator that works
with its own children, as its parent sees it."""

Part = tuple[str, int]
"""Kind of activity and its edge level, which is the leaves' level for offline and compute."""


class Phase(NamedTuple):
    """Step of a child's work in a round."""

    kind: str
    end_RN: np.ndarray


class PendingReport(NamedTuple):
    """Update that a child sends at the end of its work."""

    begin_RN: np.ndarray
    bytes_RN: np.ndarray
    delay_RN: np.ndarray
    """Seconds between sending the last byte and its arrival."""
    has_model_RN: np.ndarray
    """Whether the update contains a model."""


@dataclass(eq=False)
class InFlightWork:
    """Work in progress at one level; entries are valid where `active_RN` is true."""

    active_RN: np.ndarray
    phases: tuple[str, ...]
    bounds_FRN: np.ndarray
    """Start of each phase; the last entry is when the update was ready."""
    report: PendingReport

    @staticmethod
    def started(
        before: InFlightWork | None,
        starting_RN: np.ndarray,
        sent_at_RN: np.ndarray,
        phases: Sequence[Phase],
        report: PendingReport,
    ) -> InFlightWork:
        """Work in progress before, with the work of the nodes in the mask, which start now.

        sent_at_RN: when their parents send them a model.
        """
        shape, kinds = starting_RN.shape, tuple(phase.kind for phase in phases)
        times = sent_at_RN, *(phase.end_RN for phase in phases)
        bounds_FRN = np.stack([np.broadcast_to(time_RN, shape) for time_RN in times])
        new = PendingReport(*(np.broadcast_to(values_RN, shape).copy() for values_RN in report))
        if before is None:
            return InFlightWork(starting_RN.copy(), kinds, bounds_FRN, new)
        reports = PendingReport(
            *(np.where(starting_RN, one, other) for one, other in zip(new, before.report, strict=True))
        )
        bounds_FRN = np.where(starting_RN, bounds_FRN, before.bounds_FRN)
        return InFlightWork(before.active_RN | starting_RN, kinds, bounds_FRN, reports)

    def intervals(self, arrival_RN: np.ndarray) -> list[tuple[str, np.ndarray, np.ndarray]]:
        """Kind, start and end of each phase, ending with the upload."""
        phases = [(kind, self.bounds_FRN[n], self.bounds_FRN[n + 1]) for n, kind in enumerate(self.phases)]
        return [*phases, (UPLOAD, self.bounds_FRN[-1], arrival_RN)]

    def after_aggregation(
        self, arrived_RN: np.ndarray, remaining_RN: np.ndarray, upload_end_RN: np.ndarray, closed_RN: np.ndarray
    ) -> None:
        """Remove the work that was aggregated; other uploads continue with their remaining
        bytes."""
        begin_RN = np.where(remaining_RN > 0, np.maximum(self.report.begin_RN, closed_RN), upload_end_RN)
        self.active_RN = self.active_RN & ~arrived_RN
        self.report = self.report._replace(begin_RN=begin_RN, bytes_RN=remaining_RN)


class Messages(NamedTuple):
    """Messages over one edge level in one direction during a stage."""

    count_RN: np.ndarray
    bytes_RN: np.ndarray
    """Bytes of the content, without protocol overhead."""


@dataclass(frozen=True, eq=False)
class Stage:
    """Part of a global round up to a synchronisation of the clients: download, compute, upload.

    It describes several global rounds at once, one row each.
    """

    begin: int
    """Edge levels from this one to the leaves' begin a round."""
    end: int
    """Edge levels from the leaves' up to this one synchronise after the stage."""
    active: dict[int, np.ndarray]
    """Nodes that take part and arrive in time (R x N), by level that begins."""
    downloads: dict[int, Messages]
    """Messages to the children, by level that begins."""
    uploads: dict[int, Messages]
    """Messages to the parents, by level that synchronises."""
    counter: dict[int, np.ndarray]
    """By level, the number of its round in the run (R), from which random quantities are drawn."""
    steps_N: np.ndarray
    """Local steps of each leaf."""
    selected: dict[int, np.ndarray] | None = None
    """Nodes that were selected and work, also in vain, by level that begins; None without late
    nodes."""

    def working(self, level: int) -> np.ndarray:
        """Nodes of a level that work, whether their update is used or not."""
        return self.active[level] if self.selected is None else self.selected[level]

    def map_rows(self, function: Callable[[np.ndarray], np.ndarray]) -> Stage:
        """Apply a function to every matrix of rounds and nodes (R x N)."""

        def of_messages(messages: dict[int, Messages]) -> dict[int, Messages]:
            return {level: Messages(*map(function, sent)) for level, sent in messages.items()}

        return replace(
            self,
            active={level: function(active_RN) for level, active_RN in self.active.items()},
            downloads=of_messages(self.downloads),
            uploads=of_messages(self.uploads),
            selected=self.selected and {level: function(nodes_RN) for level, nodes_RN in self.selected.items()},
        )


@dataclass(frozen=True, eq=False)
class RoundCosts:
    """Time and energy of global rounds, one entry per round (R)."""

    seconds: np.ndarray
    parts: dict[Part, np.ndarray]
    """Seconds by activity; they add up to all seconds."""
    joules: np.ndarray


class Activity(NamedTuple):
    """Activity of one kind of the nodes of a level, for a chart of the time line."""

    kind: str
    level: int
    begin_RN: np.ndarray
    end_RN: np.ndarray
    active_RN: np.ndarray


ActivityCallback = Callable[[Activity], None]


@dataclass(eq=False)
class _RoundTotals:
    """Time and energy summed over the stages of a round."""

    rounds: int
    callback: ActivityCallback | None
    parts: dict[Part, np.ndarray] = field(default_factory=dict)
    joules_R: np.ndarray = field(init=False)
    compute_RN: np.ndarray = field(init=False)
    """Seconds for which each leaf computes in the current stage."""

    def __post_init__(self) -> None:
        self.joules_R = np.zeros(self.rounds)

    def add_time(self, kind: str, level: int, share_RN: np.ndarray, seconds_RN: np.ndarray) -> None:
        seconds_R = (share_RN * seconds_RN).sum(axis=1)
        self.parts[kind, level] = self.parts.get((kind, level), np.zeros(self.rounds)) + seconds_R

    def emit(self, kind: str, level: int, begin_RN: np.ndarray, end_RN: np.ndarray, active_RN: np.ndarray) -> None:
        if self.callback is not None:
            self.callback(Activity(kind, level, begin_RN, end_RN, active_RN))


class TimelineState:
    """State of the time line between two stages; all times are seconds since it was created."""

    def __init__(self, rounds: int, callback: ActivityCallback | None = None):
        self.totals = _RoundTotals(rounds, callback)
        self.ready: dict[int, np.ndarray] = {0: np.zeros((rounds, 1))}
        """When each node has the model that it hands out or trains, by level."""
        self.round_opened: dict[int, np.ndarray] = {}
        """When the parents' rounds opened, by edge level."""
        self.round_closed: dict[int, np.ndarray] = {}
        """When the parents' last rounds closed, by edge level at which late updates are applied."""
        self.share: dict[int, np.ndarray] = {0: np.ones((rounds, 1))}
        """Weight of each node's time in the mean over its level: the weight of its parent, split
        evenly over the children that take part."""
        self.working: dict[int, np.ndarray] = {0: np.ones((rounds, 1), dtype=bool)}
        """Nodes that take part and, if they are parents, hold rounds of their own, by level."""
        self.phases: dict[int, list[Phase]] = {}
        """Phases of the nodes that begin, until they report, by edge level."""
        self.in_flight: dict[int, InFlightWork] = {}
        """Work in progress, by edge level at which late updates are applied."""

    def begin_round(self, callback: ActivityCallback | None = None) -> float:
        """Reset the totals and return the time at which the new round begins."""
        self.totals = _RoundTotals(1, callback)
        return float(self.seconds_R[0])

    @property
    def seconds_R(self) -> np.ndarray:
        """Time of the root's last aggregation."""
        return self.ready[0][:, 0]


class _UploadTiming(NamedTuple):
    """Times of the children's uploads, in seconds since the state was created (R x N)."""

    ready_RN: np.ndarray
    start_RN: np.ndarray
    upload_end_RN: np.ndarray
    received_RN: np.ndarray
    closed_RN: np.ndarray


class NetworkTimeline:
    """Time line of rounds on one network and tree."""

    def __init__(self, instance: NetworkInstance, wait: Sequence[WaitPolicy] = ()):
        """wait: waiting policy of each edge level, root first; without it parents wait for all."""
        self.instance, self.tree = instance, instance.tree
        self.wait = tuple(wait) or (WAIT_FOR_ALL,) * instance.tree.depth
        self._siblings = [SiblingGroups(self.tree, level) for level in range(1, self.tree.depth + 1)]

    def round_costs(self, stages: Sequence[Stage], rounds: int, callback: ActivityCallback | None = None) -> RoundCosts:
        """Play the stages of global rounds and return their time and energy."""
        state = TimelineState(rounds, callback)
        for stage in stages:
            self.play_stage(state, stage)
        return RoundCosts(state.seconds_R, state.totals.parts, state.totals.joules_R)

    def play_stage(self, state: TimelineState, stage: Stage) -> dict[int, np.ndarray]:
        """Advance the state by a stage; returns the nodes that arrived in time (R x N) by level."""
        tree, ready, share = self.tree, state.ready, state.share
        for level in range(stage.begin, tree.depth + 1):
            siblings, active_RN = self._siblings[level - 1], stage.active[level]
            count_RM = siblings.sum(active_RN.astype(np.float64))
            share[level] = siblings.to_children(share[level - 1] / np.maximum(count_RM, 1)) * active_RN
            if self.wait[level - 1].applies_late_updates:
                # counted when the level's rounds close, for the nodes that are at work then
                share[level] = np.zeros_like(share[level])
            state.round_opened[level], state.working[level] = ready[level - 1], stage.working(level)
            ready[level], state.phases[level] = self._download(stage, level, state)
        done_RN, phases = self._compute(stage, state)
        state.phases[tree.depth] += phases
        arrived = {}
        for level in range(tree.depth, stage.end - 1, -1):
            is_asynchronous = self.wait[level - 1].applies_late_updates
            upload = self._upload_asynchronously if is_asynchronous else self._upload
            arrived[level], done_RN = upload(stage, level, done_RN, state)
        ready[stage.end - 1] = done_RN
        return arrived

    def _download(self, stage: Stage, level: int, state: TimelineState) -> tuple[np.ndarray, list[Phase]]:
        """Send the parents' messages; returns when each child can go on (R x N), and its phases."""
        link, siblings, totals = self.instance.link(level), self._siblings[level - 1], state.totals
        downloads, working_RN = stage.downloads[level], stage.working(level)
        sent_at_RN = state.ready[level - 1][:, self.tree.parents[level]]
        offline_RN = self._offline_time(stage.counter[level]) if level == self.tree.depth else np.zeros((1, 1))
        is_sent_RN = downloads.count_RN > 0
        start_RN = sent_at_RN + offline_RN + downloads.count_RN * link.overhead_s_N
        bytes_RN = downloads.bytes_RN + downloads.count_RN * link.overhead_bytes_N
        # a child that does not take part does not slow its siblings down, nor they it
        transfers = Transfers(start_RN, bytes_RN, link.down_N, link.pipe_down_M, is_sent_RN & working_RN)
        download_end_RN = siblings.transfer_end_times(transfers)
        download_end_RN = np.where(is_sent_RN & ~working_RN, start_RN + bytes_RN / link.down_N, download_end_RN)
        # jitter has even numbers for downloads, and odd ones for uploads
        delay_RN = link.latency_N + link.jitter.sample_per_round(self.instance.seed, 2 * stage.counter[level])
        received_RN = np.where(is_sent_RN, download_end_RN + delay_RN, sent_at_RN + offline_RN)
        totals.add_time(DOWNLOAD, level, state.share[level], received_RN - sent_at_RN - offline_RN)
        if level == self.tree.depth:
            totals.add_time(OFFLINE, level, state.share[level], np.broadcast_to(offline_RN, sent_at_RN.shape))
        totals.joules_R += ((download_end_RN - start_RN) * is_sent_RN * link.down_watts_N).sum(axis=1)
        totals.emit(OFFLINE, level, sent_at_RN, sent_at_RN + offline_RN, working_RN & (offline_RN > 0))
        totals.emit(DOWNLOAD, level, sent_at_RN + offline_RN, received_RN, working_RN & is_sent_RN)
        return received_RN, [Phase(OFFLINE, sent_at_RN + offline_RN), Phase(DOWNLOAD, received_RN)]

    def _offline_time(self, counter_R: np.ndarray) -> np.ndarray:
        """Seconds for which selected leaves are offline."""
        devices, seed = self.instance.devices, self.instance.seed
        if (devices.availability_N == 1).all():
            return np.zeros((1, 1))
        is_offline_RN = devices.offline_chance.sample_per_round(seed, counter_R) >= devices.availability_N
        return is_offline_RN * devices.away.sample_per_round(seed, counter_R)

    def _compute(self, stage: Stage, state: TimelineState) -> tuple[np.ndarray, list[Phase]]:
        """Compute the leaves' local steps; returns when each leaf is done (R x N), and its
        phases."""
        devices, seed, level, totals = self.instance.devices, self.instance.seed, self.tree.depth, state.totals
        ready_RN, share_RN = state.ready[level], state.share[level]
        counter_R, working_RN = stage.counter[level], stage.working(level)
        pause_RN = devices.pause.sample_per_round(seed, counter_R)
        compute_RN = stage.steps_N * devices.step_s_N * devices.slowdown.sample_per_round(seed, counter_R)
        if (devices.dropout_N > 0).any():
            # work is lost at least k times with the probability dropout^k
            chance_RN = np.maximum(devices.loss_chance.sample_per_round(seed, counter_R), np.finfo(np.float64).tiny)
            dropout_N = np.where(devices.dropout_N > 0, devices.dropout_N, 0.5)
            losses_RN = np.floor(np.log(chance_RN) / np.log(dropout_N)) * (devices.dropout_N > 0)
            compute_RN = compute_RN * (1 + losses_RN)
        totals.add_time(OFFLINE, level, share_RN, pause_RN)
        totals.add_time(COMPUTE, level, share_RN, compute_RN)
        totals.compute_RN = compute_RN * working_RN
        totals.joules_R += (totals.compute_RN * devices.watts_N).sum(axis=1)
        start_RN, end_RN = ready_RN + pause_RN, ready_RN + pause_RN + compute_RN
        totals.emit(OFFLINE, level, ready_RN, start_RN, working_RN & (pause_RN > 0))
        totals.emit(COMPUTE, level, start_RN, end_RN, working_RN)
        return end_RN, [Phase(OFFLINE, start_RN), Phase(COMPUTE, end_RN)]

    def _upload(
        self, stage: Stage, level: int, ready_RN: np.ndarray, state: TimelineState
    ) -> tuple[np.ndarray, np.ndarray]:
        """Send the children's updates and aggregate those that arrive in time.

        ready_RN: when each child has finished its work. Returns the children that were aggregated
        (R x N), and when each aggregator has its new model (R x M); an aggregator that receives
        nothing is done as soon as its round closes.
        """
        link, siblings = self.instance.link(level), self._siblings[level - 1]
        uploads, policy = stage.uploads[level], self.wait[level - 1]
        is_sent_RN = uploads.count_RN > 0
        start_RN = ready_RN + uploads.count_RN * link.overhead_s_N
        bytes_RN = uploads.bytes_RN + uploads.count_RN * link.overhead_bytes_N
        transfers = Transfers(start_RN, bytes_RN, link.up_N, link.pipe_up_M, is_sent_RN)
        upload_end_RN = siblings.transfer_end_times(transfers)
        delay_RN = link.latency_N + link.jitter.sample_per_round(self.instance.seed, 2 * stage.counter[level] + 1)
        arrival_RN = upload_end_RN + delay_RN
        has_model_RN = uploads.bytes_RN > 0
        round = close_round(policy, siblings, arrival_RN, is_sent_RN, has_model_RN, state.round_opened[level])
        received_RN = np.where(is_sent_RN, arrival_RN, ready_RN)
        timing = _UploadTiming(ready_RN, start_RN, upload_end_RN, received_RN, siblings.to_children(round.end_RM))
        if not policy.waits_for_all:
            timing = self._stop_late_children(timing, is_sent_RN, level, state)
        aggregation_RM = self._aggregation_time(level, round)
        self._account_upload(timing, round, aggregation_RM, is_sent_RN, level, state)
        return round.arrived_RN, round.end_RM + aggregation_RM

    def _aggregation_time(self, level: int, round: ClosedRound) -> np.ndarray:
        link = self.instance.link(level)
        return np.where(round.count_RM > 0, link.merge_s_M + round.count_RM * link.merge_s_per_child_M, 0.0)

    def _stop_late_children(
        self, timing: _UploadTiming, is_sent_RN: np.ndarray, level: int, state: TimelineState
    ) -> _UploadTiming:
        """End the work and uploads of late children when the round closes."""
        received_RN, upload_end_RN = (
            np.where(is_sent_RN, np.minimum(times_RN, timing.closed_RN), times_RN)
            for times_RN in (timing.received_RN, timing.upload_end_RN)
        )
        ready_RN, start_RN = np.minimum(timing.ready_RN, received_RN), np.minimum(timing.start_RN, upload_end_RN)
        if level == self.tree.depth:
            saved_RN = np.minimum(state.totals.compute_RN, timing.ready_RN - ready_RN) * is_sent_RN
            state.totals.joules_R -= (saved_RN * self.instance.devices.watts_N).sum(axis=1)
        return _UploadTiming(ready_RN, start_RN, upload_end_RN, received_RN, timing.closed_RN)

    def _account_upload(
        self,
        timing: _UploadTiming,
        round: ClosedRound,
        aggregation_RM: np.ndarray,
        is_sent_RN: np.ndarray,
        level: int,
        state: TimelineState,
    ) -> None:
        """Add the time and energy of uploads and aggregation, and emit their activities."""
        link, share, totals = self.instance.link(level), state.share, state.totals
        ready_RN, start_RN, upload_end_RN, received_RN, closed_RN = timing
        totals.add_time(UPLOAD, level, share[level], received_RN - ready_RN)
        totals.add_time(WAIT, level, share[level], np.where(round.arrived_RN, closed_RN - received_RN, 0.0))
        totals.add_time(AGGREGATE, level, share[level - 1], aggregation_RM)
        totals.joules_R += ((upload_end_RN - start_RN) * is_sent_RN * link.up_watts_N).sum(axis=1)
        totals.joules_R += (aggregation_RM * link.merge_watts_M).sum(axis=1)
        totals.emit(UPLOAD, level, ready_RN, received_RN, is_sent_RN)
        totals.emit(WAIT, level, received_RN, closed_RN, round.arrived_RN)
        totals.emit(AGGREGATE, level, round.end_RM, round.end_RM + aggregation_RM, round.count_RM > 0)

    def _upload_asynchronously(
        self, stage: Stage, level: int, ready_RN: np.ndarray, state: TimelineState
    ) -> tuple[np.ndarray, np.ndarray]:
        """Do the same as `_upload` at a level that applies late updates.

        A round closes among all work in progress, whichever stage it began in.
        """
        link, siblings, totals = self.instance.link(level), self._siblings[level - 1], state.totals
        uploads, opened_RM = stage.uploads[level], state.round_opened[level]
        is_leaf_level = level == self.tree.depth
        phases = state.phases[level] if is_leaf_level else [*state.phases[level], Phase(SUBTREE, ready_RN)]
        new = PendingReport(
            ready_RN + uploads.count_RN * link.overhead_s_N,
            uploads.bytes_RN + uploads.count_RN * link.overhead_bytes_N,
            link.latency_N + link.jitter.sample_per_round(self.instance.seed, 2 * stage.counter[level] + 1),
            uploads.bytes_RN > 0,
        )
        opened_RN = siblings.to_children(opened_RM)
        work = InFlightWork.started(state.in_flight.get(level), state.working[level], opened_RN, phases, new)
        state.in_flight[level], report = work, work.report
        transfers = Transfers(report.begin_RN, report.bytes_RN, link.up_N, link.pipe_up_M, work.active_RN)
        upload_end_RN = siblings.transfer_end_times(transfers)
        arrival_RN = upload_end_RN + report.delay_RN
        selected_RN = work.active_RN & siblings.to_children(state.working[level - 1])
        round = close_round(self.wait[level - 1], siblings, arrival_RN, selected_RN, report.has_model_RN, opened_RM)
        aggregation_RM = self._aggregation_time(level, round)

        closed_RN, selected_RM = siblings.to_children(round.end_RM), siblings.sum(selected_RN.astype(float))
        share_RN = siblings.to_children(state.share[level - 1] / np.maximum(selected_RM, 1))
        for kind, begin_RN, end_RN in [*work.intervals(arrival_RN), (WAIT, arrival_RN, closed_RN)]:
            begin_RN, end_RN = np.maximum(begin_RN, opened_RN), np.minimum(end_RN, closed_RN)
            is_positive_RN = selected_RN & (end_RN > begin_RN)
            totals.add_time(kind, level, share_RN, np.where(is_positive_RN, end_RN - begin_RN, 0.0))
        self._emit_uploads(level, state, arrival_RN, closed_RN, selected_RN)
        totals.add_time(AGGREGATE, level, state.share[level - 1], aggregation_RM)
        sending_RN = np.maximum(np.minimum(upload_end_RN, closed_RN) - report.begin_RN, 0.0) * selected_RN
        sending_joules_R = (sending_RN * link.up_watts_N).sum(axis=1)
        totals.joules_R += sending_joules_R + (aggregation_RM * link.merge_watts_M).sum(axis=1)
        totals.emit(AGGREGATE, level, round.end_RM, round.end_RM + aggregation_RM, round.count_RM > 0)
        # a parent that holds no round leaves everything as it is
        until_RM = np.where(selected_RM > 0, round.end_RM, -np.inf)
        remaining_RN = siblings.remaining_bytes(transfers, until_RM)
        work.after_aggregation(round.arrived_RN, remaining_RN, upload_end_RN, siblings.to_children(until_RM))
        state.round_closed[level] = np.maximum(state.round_closed.get(level, opened_RM), until_RM)
        return round.arrived_RN, round.end_RM + aggregation_RM

    def _emit_uploads(
        self, level: int, state: TimelineState, arrival_RN: np.ndarray, end_RN: np.ndarray, active_RN: np.ndarray
    ) -> None:
        """Emit the parts of uploads and waits since the parent's last round closed, until `end_RN`.

        This includes the time in which the parents are busy with their own parents.
        """
        since_RM = state.round_closed.get(level, state.round_opened[level])
        ready_RN, since_RN = state.in_flight[level].bounds_FRN[-1], self._siblings[level - 1].to_children(since_RM)
        for kind, begin_RN, until_RN in ((UPLOAD, ready_RN, arrival_RN), (WAIT, arrival_RN, end_RN)):
            begin_RN, until_RN = np.maximum(begin_RN, since_RN), np.minimum(until_RN, end_RN)
            state.totals.emit(kind, level, begin_RN, until_RN, active_RN & (until_RN > begin_RN))

    def emit_rest(self, state: TimelineState) -> None:
        """Emit uploads and waits that go on after the last stage that was played, up to the present
        time, which is when the root aggregated."""
        for level, work in state.in_flight.items():
            link, report = self.instance.link(level), work.report
            transfers = Transfers(report.begin_RN, report.bytes_RN, link.up_N, link.pipe_up_M, work.active_RN)
            arrival_RN = self._siblings[level - 1].transfer_end_times(transfers) + report.delay_RN
            self._emit_uploads(level, state, arrival_RN, np.full_like(arrival_RN, state.seconds_R[0]), work.active_RN)
