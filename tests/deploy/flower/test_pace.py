"""Waiting costs little, and states are written with nothing in them twice."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch

from stratafl.deploy.flower.pace import LONGEST, MISSING, SHARE, SHORTEST, Pace, look_sooner_for_parts
from stratafl.deploy.protocol.messages import Parcel
from stratafl.deploy.protocol.node import NodeState
from stratafl.deploy.protocol.upward import Above, Sent
from stratafl.deploy.protocol.wire import encode
from stratafl.deploy.sites.state_file import Durable


def test_a_look_comes_the_later_the_longer_nothing_came(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, pauses = [0.0], []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        clock[0] += seconds

    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(time, "sleep", sleep)
    pace = Pace()
    while clock[0] < 100:
        pace.wait()
    assert pauses[0] == SHORTEST and pauses[-1] == LONGEST and pauses == sorted(pauses)
    assert all(each <= max(SHARE * sum(pauses[:i]), SHORTEST) + 1e-9 for i, each in enumerate(pauses))
    assert len(pauses) < 300
    pace.begin()
    pace.wait()
    assert pauses[-1] == SHORTEST


def test_flower_takes_the_shorter_wait_for_a_missing_part(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("flwr")
    from flwr.supercore.inflatable.inflatable_utils import ObjectUnavailableError, pull_objects

    waits: list[float] = []

    class Event(threading.Event):
        """One that is waited for no longer than it takes to write down how long that would be."""

        def wait(self, timeout: float | None = None) -> bool:
            if timeout is None:
                return super().wait()
            waits.append(timeout)
            return super().wait(0)

    monkeypatch.setattr(threading, "Event", Event)
    look_sooner_for_parts()
    tries: list[str] = []

    def pull(name: str) -> bytes:
        tries.append(name)
        if len(tries) < 3:
            raise ObjectUnavailableError(name)
        return b"part"

    assert pull_objects(["a"], pull) == {"a": b"part"}
    assert len(waits) == 2 and max(waits) < 4 * MISSING, "Flower's own waits are one second and two"


def test_a_state_holds_the_same_rows_once(tmp_path: Path) -> None:
    x_1P = torch.randn(1, 1000)
    start = Parcel(x_1P, torch.zeros(1, 0), {"control": x_1P.clone()})
    kept = NodeState(above=Above(0, 0, {"z": x_1P}, start, None, x_1P, Sent(1, {"z": x_1P}, x_1P)))
    assert len(encode(kept, once=True)) < 0.4 * len(encode(kept))
    durable = Durable(tmp_path, "run")
    durable.write(kept)
    assert encode(durable.read()) == encode(kept)
    durable.close()
