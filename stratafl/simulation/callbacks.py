"""Callbacks of a run, such as experiment trackers: called at its beginning, after every round, and
at its end.

A tracker never ends a run: where one fails, this is logged once, and the run goes on without it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from stratafl.base.errors import InvalidInput, describe_exception, error_message, escape_control
from stratafl.base.signals import Interrupted
from stratafl.metrics.records import ClockedRound, DeployedRound, RoundResult

METHODS = ("on_begin", "on_round", "on_end")
LOG = logging.getLogger("stratafl")
DONE, INTERRUPTED, FAILED = "done", "interrupted", "failed"


class Tracker(Protocol):
    """A callback of a run; a tracker may leave out methods that it does not need."""

    def on_begin(self, config: Mapping[str, Any]) -> None:
        """The run begins, or goes on; config: its settings as plain data."""
        ...

    def on_round(self, record: RoundResult) -> None:
        """A global round is done."""
        ...

    def on_end(self, summary: Mapping[str, Any]) -> None:
        """The run is over; summary: its `status` ("done", "interrupted" or "failed"), the `reason`
        where it is not done, its `rounds`, and the `final` metrics."""
        ...


def _warn(text: str) -> None:
    LOG.warning("%s", escape_control(f"stratafl: {text}"))


@contextmanager
def tracking(
    trackers: Sequence[Tracker], config: Mapping[str, Any], say: Callable[[str], None] = _warn
) -> Iterator[Callable[[RoundResult], None]]:
    """Call trackers around a run; yields the function to call with the record of every round."""
    for tracker in trackers:
        if not any(callable(getattr(tracker, method, None)) for method in METHODS):
            raise InvalidInput("callbacks", tracker, f"must have at least one of the methods {', '.join(METHODS)}")
    alive, last = list(trackers), list[RoundResult]()

    def notify(method: str, value: object) -> None:
        for tracker in list(alive):
            try:
                getattr(tracker, method, lambda value: None)(value)
            except Interrupted:
                raise
            except (Exception, SystemExit) as problem:
                alive.remove(tracker)
                say(f"{type(tracker).__name__} failed, and the run goes on without it: {describe_exception(problem)}")

    def on_round(record: RoundResult) -> None:
        last[:] = [record]
        notify("on_round", record)

    def end(status: str, reason: str = "") -> None:
        rounds, final = (last[0].round, last[0].metrics) if last else (0, {})
        notify("on_end", {"status": status, "reason": reason, "rounds": rounds, "final": dict(final)})

    notify("on_begin", config)
    try:
        yield on_round
    except (Interrupted, KeyboardInterrupt, GeneratorExit):
        end(INTERRUPTED, "it was stopped")
        raise
    except BaseException as problem:
        end(FAILED, error_message(problem))
        raise
    end(DONE)


def to_scalars(record: RoundResult) -> dict[str, float]:
    """Numbers of a record, by names with a group in front, as trackers expect them."""
    scalars = {f"test/{name}": value for name, value in record.metrics.items()}
    for node, metrics in record.nodes.items():
        scalars |= {f"node {node}/{name}": value for name, value in metrics.items()}
    for level, quantities in record.drift.items():
        scalars |= {f"level {level}/{name}": value for name, value in quantities.items()}
    if isinstance(record, DeployedRound):
        scalars["run/absent"] = len(record.absent)
    if isinstance(record, ClockedRound):
        scalars |= {"run/late": len(record.late), "run/seconds on the network": record.clock_total}
    return scalars | {
        "run/lr": record.lr,
        "run/bytes per client": record.bytes_per_client,
        "run/seconds per round": record.seconds,
        "run/refused": len(record.refused),
    }
