"""Participation and traffic of a run's rounds, without training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from stratafl.base.topology import Tree
from stratafl.core.participation import Participation, sample_participants
from stratafl.core.schedule import Schedule
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
"""Numbers in the matrices of rounds that are looked at side by side, about."""

GRADIENT_ROUND_OFFSET = 1 << 40
"""Added to the counter of a round for the exchange of gradients before it, which is a round of
messages of its own."""


@dataclass(frozen=True, eq=False)
class Workload:
    """What of a run decides who takes part and what is sent."""

    tree: Tree
    schedule: Schedule
    participation: tuple[Participation, ...]
    """Root first."""
    seed: int
    sizes: MessageSizes
    steps_N: np.ndarray
    """Of each leaf between two meetings."""
    samples_N: np.ndarray
    """That each leaf takes in one step."""
    rounds: int
    wait: tuple[WaitPolicy, ...] = ()
    """Whom parents wait for, root first; for all unless given."""

    @property
    def waits_by_time(self) -> bool:
        """Whether a clock decides who takes part."""
        return any(not each.is_all for each in self.wait)

    def counts_late(self, level: int) -> bool:
        """Whether late work counts at an edge level."""
        return bool(self.wait) and self.wait[level - 1].counts_late

    @property
    def goes_on(self) -> bool:
        """Whether work goes on from one global round to the next."""
        return any(each.counts_late for each in self.wait)

    @property
    def is_steady(self) -> bool:
        """Whether the same nodes take part in every round."""
        return not self.waits_by_time and all(
            each is None or each == "all" or (type(each) is float and each == 1) for each in self.participation
        )


@dataclass(frozen=True, eq=False)
class LevelTraffic:
    """What was sent over one edge level up to the end of a round, for several rounds (R)."""

    messages_up: np.ndarray
    messages_down: np.ndarray
    bytes_up: np.ndarray
    bytes_down: np.ndarray


@dataclass(frozen=True, eq=False)
class RoundBlock:
    """Some rounds in a row of a run: each has a row, or all are like the one that there is."""

    first: int
    """Counted from 0."""
    rounds: int
    stages: tuple[Stage, ...]
    sent: tuple[LevelTraffic, ...]
    """In each of these rounds, as the run's own account has it; root's edge level first."""
    spent: tuple[RoundCosts, ...] = ()
    """What each took, where that cannot be told from its stages alone."""

    def many(self, schedule: Schedule, rounds: range) -> tuple[Stage, ...]:
        """The stages of its one round as often as it is repeated, for some of the repetitions:
        what is drawn anew each time is another's."""
        return tuple(
            replace(
                stage,
                active={level: _repeated(rows, rounds) for level, rows in stage.active.items()},
                down={
                    level: Messages(*(_repeated(rows, rounds) for rows in each)) for level, each in stage.down.items()
                },
                up={level: Messages(*(_repeated(rows, rounds) for rows in each)) for level, each in stage.up.items()},
                counter={
                    level: first + schedule.meetings[level] * np.arange(rounds.start, rounds.stop)
                    for level, first in stage.counter.items()
                },
            )
            for stage in self.stages
        )


ByLevel = dict[int, np.ndarray]

RowStage = tuple[int, int, ByLevel, dict[int, tuple], dict[int, tuple], dict[int, int], ByLevel | None]
"""The fields of a `Stage` without its steps, of one round."""


class ReplayedRound:
    """One global round as it is replayed: per stage and level who took part and what went over."""

    def __init__(self) -> None:
        self.stages: list[RowStage] = []
        self.sent: list[tuple[np.ndarray, ...]] = []
        self.spent: RoundCosts | None = None
        """What it took, where a clock was there."""
        self.asked: dict[tuple[int, int], np.ndarray] = {}
        """By level and the number of its round: who was to take part."""
        self.came: dict[tuple[int, int], np.ndarray] = {}
        """Likewise, who of them was heard in time; also below a node that was late itself."""

    def take_part(self, story: Workload) -> dict[tuple[int, int], np.ndarray]:
        """Likewise, who took part: who came in time, or begins work that counts whenever it comes,
        with all its ancestors."""
        found: dict[tuple[int, int], np.ndarray] = {}
        schedule, tree = story.schedule, story.tree
        for level, number in sorted(self.came):
            found[level, number] = (self.asked if story.counts_late(level) else self.came)[level, number]
            if level > 1:
                above = number * schedule.meetings[level - 1] // schedule.meetings[level]
                found[level, number] = found[level, number] & found[level - 1, int(above)][tree.parents[level]]
        return found


class WorkloadReplay:
    """The state of a replay: the account, who takes part, how many rounds each level has begun."""

    def __init__(self, story: Workload, clock: NetworkTimeline | None = None):
        """clock: what decides who is late; without it nobody is."""
        self.story, self.tree, self.clock = story, story.tree, clock
        self.traffic, self.top = CommunicationMeter(story.tree), 0
        self.begun = [0] * (story.tree.depth + 1)
        self.active = [np.ones(n, dtype=bool) for n in story.tree.sizes]
        self.busy = [np.zeros(n, dtype=bool) for n in story.tree.sizes]
        """By level at which late work counts: whose is under way."""
        self.moved = [np.zeros(n, dtype=bool) for n in story.tree.sizes]
        """By level: who has a model to report, which an aggregator without anybody has not."""
        self.walk = TimelineState(1)

    def round(self, watch: ActivityCallback | None = None) -> ReplayedRound:
        """The next one."""
        if not self.story.goes_on:
            self.walk = TimelineState(1)
        row, depth, walk = ReplayedRound(), self.tree.depth, self.walk
        began = walk.begin_round(watch)
        totals = [np.zeros((4, size), dtype=np.int64) for size in self.tree.sizes]
        # answers to the last meeting are in the account already, and belong to the round before
        self._add(totals, sign=-1)
        for event in self.story.schedule.events():
            begin, fresh = max(self.top, 1), self._fresh()
            self._begin(restarting=bool(fresh))
            active = {level: self.active[level] for level in range(begin, depth + 1)}
            counter = {level: self.begun[level] - 1 for level in range(begin, depth + 1)}
            if fresh:
                down = self._taken("down", range(begin, depth + 1), totals)
                self._restart(fresh)
                up = self._taken("up", range(fresh[0], depth + 1), totals)
                early = {level: count + GRADIENT_ROUND_OFFSET for level, count in counter.items()}
                early |= {level: self.begun[level] - 1 + GRADIENT_ROUND_OFFSET for level in range(fresh[0], depth + 1)}
                # what is owed above the gradients' levels travels with the models
                for level in range(begin, fresh[0]):
                    down[level] = _joined(down[level], self._taken("down", range(level, level + 1), totals)[level])
                row.stages.append((begin, fresh[0], active, down, up, early, None))
                self._clocked(row, walk)
                begin = fresh[0]
                active = {level: self.active[level] for level in range(begin, depth + 1)}
                counter = {level: self.begun[level] - 1 for level in range(begin, depth + 1)}
            down = self._taken("down", range(begin, depth + 1), totals)
            self._work(event.top_level)
            up = {level: self._reports(level) for level in range(event.top_level, depth + 1)}
            counter |= {level: self.begun[level] - 1 for level in range(event.top_level, depth + 1)}
            row.stages.append((begin, event.top_level, active, down, up, counter, None))
            came = self._clocked(row, walk)
            for level in range(depth, event.top_level - 1, -1):
                self._meet(level, came[level] & self.moved[level], relayed=level > event.top_level)
                self.busy[level] = self.busy[level] & ~came[level]
            self._taken("up", range(event.top_level, depth + 1), totals)
            has_correction = [False, *(self.story.sizes.edge(level).has_correction for level in range(1, depth + 1))]
            from_above = ModelFromAbove(top_level=event.top_level, has_correction=has_correction)
            self.traffic.on_model_from_above(from_above)
            self.top = event.top_level
        self._add(totals, sign=1)
        row.sent = [tuple(total.sum(axis=1)) for total in totals]
        if self.clock is not None:
            row.spent = RoundCosts(walk.seconds_R - began, walk.sums.parts, walk.sums.joules_R)
        if self.story.waits_by_time:
            present = row.take_part(self.story)
            row.stages = [
                (*stage[:2], {level: present[level, stage[5][level]] for level in stage[2]}, *stage[3:6], stage[2])
                for stage in row.stages
            ]
        return row

    def _reports(self, level: int) -> tuple[np.ndarray, np.ndarray]:
        """What children are about to send, whether it comes in time or not: of one without a model,
        that there is none."""
        count_N = self.active[level].astype(np.int64)
        return count_N, count_N * self.moved[level] * self.story.sizes.edge(level).report

    def _work(self, top: int) -> None:
        """Let the nodes work, up to those whose children meet at the edge level `top`; of children
        with models one at least is heard."""
        leaves = self.tree.depth
        self.moved[leaves] = self.moved[leaves] | self.active[leaves]
        for level in range(leaves, top - 1, -1):
            works_N = (self.active[level] | self.busy[level]) & self.moved[level]
            self.moved[level - 1][self.tree.parents[level][works_N]] = True

    def _clocked(self, row: ReplayedRound, walk: TimelineState) -> ByLevel:
        """Let the last stage pass on the clock: by level that meets, who is heard in time."""
        begin, end, active, _, _, counter, _ = row.stages[-1]
        came = {level: self.active[level] for level in range(end, self.tree.depth + 1)}
        if self.clock is not None:
            stage = _stage(self.story, row.stages[-1:])
            came = {level: came_1N[0] for level, came_1N in self.clock.advance(walk, stage).items()}
        row.asked |= {(level, counter[level]): active[level] for level in range(begin, self.tree.depth + 1)}
        row.came |= {(level, counter[level]): came_N for level, came_N in came.items()}
        return came

    def state(self) -> tuple:
        """What the next round depends on where everybody takes part."""
        saved = self.traffic.saved()
        arrays = [*saved["stale"], *saved["owed"], *saved["down"]["bytes"], *saved["up"]["bytes"]]
        return self.top, *(array.tobytes() for array in arrays)

    def _fresh(self) -> list[int]:
        levels = range(max(self.top + 1, 1), self.tree.depth + 1)
        return [level for level in levels if self.story.sizes.edge(level).from_gradient]

    def _begin(self, restarting: bool) -> None:
        story = self.story
        for level in range(max(self.top, 1), self.tree.depth + 1):
            drawing = story.participation[level - 1], self.tree, level, self.begun[level], story.seed
            drawn_N = sample_participants(*drawing, self.busy[level])
            self.active[level] = drawn_N & self.active[level - 1][self.tree.parents[level]]
            self.moved[level] = self.moved[level] & ~self.active[level]
            if story.counts_late(level):
                self.busy[level] = self.busy[level] | self.active[level]
            self.begun[level] += 1
            began = RoundBegan(
                level=level,
                active_N=self.active[level],
                broadcast_bytes=story.sizes.edge(level).parcel,
                model_bytes=story.sizes.model,
                restarts_from_gradients=restarting,
            )
            self.traffic.on_round_begin(began)

    def _restart(self, fresh: Sequence[int]) -> None:
        sent = {level: self.active[level] for level in range(fresh[0], self.tree.depth + 1)}
        exchanged = GradientsExchanged(
            top_level=self.top,
            restarted_levels=fresh,
            sent=sent,
            active=self.active,
            model_bytes=self.story.sizes.model,
        )
        self.traffic.on_gradient_restart(exchanged)

    def _meet(self, level: int, came_N: np.ndarray, relayed: bool) -> None:
        edge = self.story.sizes.edge(level)
        counts = SyncCounts(
            reported_N=came_N,
            accepted_N=came_N,
            upload_bytes=edge.report,
            broadcast_bytes=edge.parcel,
            is_answered=edge.is_answered_below if relayed else edge.is_answered,
        )
        self.traffic.on_sync(LevelSynchronized(level=level, counts=counts, models=None))

    def _direction(self, way: str) -> LinkCounts:
        communication = self.traffic.communication
        return communication.up if way == "up" else communication.down

    def _taken(self, way: str, levels: range, totals: list[np.ndarray]) -> dict[int, tuple]:
        """What the account has of these levels; it begins anew there."""
        direction, found, place = self._direction(way), {}, 0 if way == "up" else 1
        for level in levels:
            found[level] = direction.messages[level], direction.bytes[level]
            totals[level][place] += direction.messages[level]
            totals[level][place + 2] += direction.bytes[level]
            direction.messages[level] = np.zeros_like(direction.messages[level])
            direction.bytes[level] = np.zeros_like(direction.bytes[level])
        return found

    def _add(self, totals: list[np.ndarray], sign: int) -> None:
        """Count what was answered and will be taken in the next round."""
        for way, place in (("up", 0), ("down", 1)):
            direction = self._direction(way)
            for level, total in enumerate(totals):
                total[place] += sign * direction.messages[level]
                total[place + 2] += sign * direction.bytes[level]


def _repeated(rows_1N: np.ndarray, rounds: range) -> np.ndarray:
    return np.broadcast_to(rows_1N, (len(rounds), rows_1N.shape[1]))


def _joined(one: tuple, other: tuple) -> tuple:
    """Two messages to the same nodes that travel as one: the bytes of both."""
    return np.maximum(one[0], other[0]), one[1] + other[1]


def leaf_steps(
    held_N: Sequence[int] | np.ndarray, batch: int | None, schedule: Schedule, passes: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Each leaf's steps between two meetings, and the samples in one of them, from how many samples
    it has; passes: whether the lowest period is in passes over these."""
    held_N, period = np.asarray(held_N, dtype=np.int64), schedule.periods[-1]
    samples_N = held_N if batch is None else np.minimum(batch, np.where(held_N > 0, held_N, batch))
    if not passes:
        return np.full(len(held_N), period), samples_N
    return np.array([period * steps_per_epoch(max(int(held), 1), batch) for held in held_N]), samples_N


def block_size(story: Workload) -> int:
    """How many rounds are looked at side by side."""
    return max(1, BLOCK_VALUES // (sum(story.tree.sizes) * int(story.schedule.meetings[-1])))


def replay_rounds(story: Workload, clock: NetworkTimeline | None = None) -> Iterator[RoundBlock]:
    """The run's rounds in chunks; where all of them are alike from some round on, these are said
    once, with how many they are. A clock is needed only where somebody can be late."""
    machine = WorkloadReplay(story, clock if story.waits_by_time else None)
    size = block_size(story)
    rows: list[ReplayedRound] = []
    first, before = 0, None
    for round in range(story.rounds):
        rows.append(machine.round())
        if story.is_steady:
            state = machine.state()
            if state == before:
                if rows[:-1]:
                    yield _chunk(story, rows[:-1], first)
                yield replace(_chunk(story, rows[-1:], round), rounds=story.rounds - round)
                return
            before = state
        if len(rows) == size:
            yield _chunk(story, rows, first)
            first, rows = round + 1, []
    if rows:
        yield _chunk(story, rows, first)


def _chunk(story: Workload, rows: Sequence[ReplayedRound], first: int) -> RoundBlock:
    """Rounds beside each other."""
    stages = [_stage(story, [row.stages[number] for row in rows]) for number in range(len(rows[0].stages))]
    sent = []
    for level in range(1, story.tree.depth + 1):
        counts = np.array([row.sent[level] for row in rows], dtype=np.float64).reshape(-1, 4).T
        sent.append(LevelTraffic(*counts))
    spent = tuple(row.spent for row in rows if row.spent is not None) if story.goes_on else ()
    return RoundBlock(first, len(rows), tuple(stages), tuple(sent), spent)


def _stage(story: Workload, same: Sequence[RowStage]) -> Stage:
    """The same stage of several rounds."""
    begin, end, *_, asked = same[0]
    below, above = range(begin, story.tree.depth + 1), range(end, story.tree.depth + 1)
    counters = {level: np.array([each[5][level] for each in same]) for level in same[0][5]}
    is_look = bool(counters[story.tree.depth][0] >= GRADIENT_ROUND_OFFSET)
    return Stage(
        begin=begin,
        end=end,
        active={level: np.stack([each[2][level] for each in same]) for level in below},
        down={level: _messages([each[3][level] for each in same]) for level in below},
        up={level: _messages([each[4][level] for each in same]) for level in above},
        counter=counters,
        steps_N=np.ones_like(story.steps_N) if is_look else story.steps_N,
        asked=None
        if asked is None
        else {level: np.stack([(each[6] or {})[level] for each in same]) for level in below},
    )


def _messages(parts: Sequence[tuple]) -> Messages:
    return Messages(*(np.stack([part[n] for part in parts]).astype(np.float64) for n in (0, 1)))


def trace_round(story: Workload, round: int, clock: NetworkTimeline, watch: ActivityCallback) -> None:
    """Let somebody see what every node does in one global round, counted from 0, with times from
    its beginning."""
    if not story.goes_on:
        clock.spent(_stages_of(story, round, clock), 1, watch)
        return
    machine, seen = WorkloadReplay(story, clock), list[Activity]()
    for _ in range(round):
        machine.round(seen.append)
        now = machine.walk.seconds_R[0]
        seen = [each for each in seen if (each.end_RN > now)[each.who_RN].any()]
    began = float(machine.walk.seconds_R[0])
    machine.round(seen.append)
    clock.see_rest(machine.walk)
    ended = float(machine.walk.seconds_R[0])
    for each in seen:
        # what began before, or goes on afterwards, is cut off
        begin_RN, end_RN = (np.broadcast_to(times, each.who_RN.shape) for times in (each.begin_RN, each.end_RN))
        is_now_RN = (begin_RN <= ended) & ((begin_RN >= began) | (end_RN > began))
        span = np.clip((begin_RN - began, end_RN - began), 0.0, ended - began)
        watch(each._replace(begin_RN=span[0], end_RN=span[1], who_RN=each.who_RN & is_now_RN))


def _stages_of(story: Workload, round: int, clock: NetworkTimeline) -> tuple[Stage, ...]:
    """Those of one global round, counted from 0."""
    for chunk in replay_rounds(replace(story, rounds=round + 1), clock):
        place = round - chunk.first
        if len(chunk.sent[0].bytes_up) < chunk.rounds:
            return chunk.many(story.schedule, range(place, place + 1))
        if place < chunk.rounds:
            return tuple(_row_of(stage, place) for stage in chunk.stages)
    raise AssertionError("a story has all its rounds")


def _row_of(stage: Stage, row: int) -> Stage:
    one = slice(row, row + 1)
    return replace(
        stage,
        active={level: rows[one] for level, rows in stage.active.items()},
        down={level: Messages(*(rows[one] for rows in each)) for level, each in stage.down.items()},
        up={level: Messages(*(rows[one] for rows in each)) for level, each in stage.up.items()},
        counter={level: rows[one] for level, rows in stage.counter.items()},
        asked=None if stage.asked is None else {level: rows[one] for level, rows in stage.asked.items()},
    )
