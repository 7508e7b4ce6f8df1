"""One global round of a run on the clock, for somebody who wants to see what every node does."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from stratafl.clock.model.replay import Replay, Story, replay
from stratafl.clock.model.timeline import Clock, Interval, Messages, Observer, Stage


def watched(story: Story, round: int, clock: Clock, watch: Observer) -> None:
    """Let somebody see what every node does in one global round, counted from 0, with times from
    its beginning."""
    if not story.goes_on:
        clock.spent(_stages_of(story, round, clock), 1, watch)
        return
    machine, seen = Replay(story, clock), list[Interval]()
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


def _stages_of(story: Story, round: int, clock: Clock) -> tuple[Stage, ...]:
    """Those of one global round, counted from 0."""
    for chunk in replay(replace(story, rounds=round + 1), clock):
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
