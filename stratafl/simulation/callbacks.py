"""Whoever follows a run from outside, such as an experiment tracker: told when it begins, after
every round, and when it ends.

A tracker never ends a run: one that fails is said once, and the run goes on without it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from stratafl.base.errors import InvalidInput, describe_exception, error_message, escape_control
from stratafl.base.signals import Interrupted
from stratafl.metrics.records import ClockedRound, DeployedRound, RoundResult

MOMENTS = ("on_begin", "on_round", "on_end")
DONE, INTERRUPTED, FAILED = "done", "interrupted", "failed"


class Tracker(Protocol):
    """What follows a run; a tracker may leave out the moments that it does not care for."""

    def on_begin(self, config: Mapping[str, Any]) -> None:
        """The run begins, or goes on: what it was set up from, as plain data."""
        ...

    def on_round(self, record: RoundResult) -> None:
        """A global round is done."""
        ...

    def on_end(self, summary: Mapping[str, Any]) -> None:
        """The run is over: its `status` ("done", "interrupted" or "failed"), the `reason` where it
        is not done, its `rounds`, and the `final` metrics."""
        ...


def _say(text: str) -> None:
    print(escape_control(f"stratafl: {text}"), file=sys.stderr)


@contextmanager
def tracking(
    trackers: Sequence[Tracker], config: Mapping[str, Any], say: Callable[[str], None] = _say
) -> Iterator[Callable[[RoundResult], None]]:
    """Let trackers follow what is done in here: what it gives is to be called with every round's
    record."""
    for each in trackers:
        if not any(callable(getattr(each, moment, None)) for moment in MOMENTS):
            raise InvalidInput("callbacks", each, f"must have at least one of the methods {', '.join(MOMENTS)}")
    alive, last = list(trackers), list[RoundResult]()

    def tell(moment: str, value: object) -> None:
        for each in list(alive):
            try:
                getattr(each, moment, lambda value: None)(value)
            except Interrupted:
                raise
            except (Exception, SystemExit) as problem:
                alive.remove(each)
                say(f"{type(each).__name__} failed, and the run goes on without it: {describe_exception(problem)}")

    def follow(record: RoundResult) -> None:
        last[:] = [record]
        tell("on_round", record)

    def end(status: str, why: str = "") -> None:
        rounds, final = (last[0].round, last[0].metrics) if last else (0, {})
        tell("on_end", {"status": status, "reason": why, "rounds": rounds, "final": dict(final)})

    tell("on_begin", config)
    try:
        yield follow
    except (Interrupted, KeyboardInterrupt, GeneratorExit):
        end(INTERRUPTED, "it was stopped")
        raise
    except BaseException as problem:
        end(FAILED, error_message(problem))
        raise
    end(DONE)


def to_scalars(record: RoundResult) -> dict[str, float]:
    """A record's numbers by names that trackers group them by."""
    found = {f"test/{name}": value for name, value in record.metrics.items()}
    for node, metrics in record.nodes.items():
        found |= {f"node {node}/{name}": value for name, value in metrics.items()}
    for level, quantities in record.drift.items():
        found |= {f"level {level}/{name}": value for name, value in quantities.items()}
    if isinstance(record, DeployedRound):
        found["run/absent"] = len(record.absent)
    if isinstance(record, ClockedRound):
        found |= {"run/late": len(record.late), "run/seconds on the network": record.clock_total}
    return found | {
        "run/lr": record.lr,
        "run/bytes per client": record.bytes_per_client,
        "run/seconds per round": record.seconds,
        "run/refused": len(record.refused),
    }
