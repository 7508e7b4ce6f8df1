"""How long a parent waits for a child, and how often it asks one that refuses, by a clock that runs
as fast as it is looked at."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr")

from cryptography.hazmat.primitives.asymmetric import ec
from flwr.supercore.task_identity import TaskIdentity

from stratafl.deploy.flower.inbox import RECORD
from stratafl.deploy.flower.process import LONGEST_PAUSE, GridLink
from stratafl.deploy.protocol import seal
from stratafl.deploy.protocol.messages import Bundle, Reply
from stratafl.deploy.protocol.wire import encode
from stratafl.deploy.sites.provision import _ssh_public as ssh_public
from stratafl.deploy.sites.provision import flower_key
from tests.deploy.trees import Deployed, simulation

HOUR, DAY = 3600.0, 86400.0


class Clock:
    """Time that passes while somebody waits, and only then."""

    def __init__(self) -> None:
        self.now, self.least = 1000.0, 0.0
        """Seconds; the second, those that any wait takes at least."""

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += max(seconds, self.least)


class Grid:
    """The way to one child, which answers what it is asked from a certain time on."""

    def __init__(self, clock: Clock, public: bytes, answer: Callable[[bytes], dict[str, Any] | None]):
        self.clock, self.public, self.answer = clock, flower_key(public), answer
        self.asked: list[float] = []
        self.came_up = "first"
        self.lifetime, self.request = 0.0, b""

    def get_nodes(self) -> list[Any]:
        facts = {"public_key": self.public, "node_id": 1, "status": "online", "last_activated_at": self.came_up}
        return [SimpleNamespace(**facts)]

    def push_messages(self, messages: list[Any]) -> list[str]:
        self.request = messages[0].content[RECORD]["data"]
        self.lifetime = messages[0].metadata.ttl
        self.asked.append(self.clock.now)
        return [str(len(self.asked))]

    def look(self, numbers: Any) -> list[Any]:
        content = self.answer(self.request)
        message = SimpleNamespace(has_error=lambda: False, content={RECORD: content})
        return [] if content is None else [(number, message) for number in numbers]

    def withdraw(self, numbers: Any) -> None: ...

    def hurry(self, until: float) -> None: ...


REFUSAL = {"refused": True, "data": b"no room on the disk"}
KEY = seal.new_key()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    for name in ("monotonic", "sleep"):
        monkeypatch.setattr(time, name, getattr(made, name))
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)
    return made


@pytest.fixture(scope="module")
def deployed() -> Deployed:
    return Deployed(simulation("hfedavg", 1))


def linked(deployed: Deployed, clock: Clock, answer: Callable[[bytes], dict[str, Any] | None]) -> tuple[Grid, GridLink]:
    public = ssh_public(ec.generate_private_key(ec.SECP384R1()))
    grid: Any = Grid(clock, public, answer)
    return grid, GridLink(grid, deployed.job, 1, {"0": KEY}, {"0": public})


def asked(deployed: Deployed) -> dict[str, Bundle]:
    return {"0": deployed.root.down.greetings()["0"]}


def replied(deployed: Deployed, request: bytes) -> dict[str, Any]:
    reply = encode(Reply(deployed.job.name, "0", 7))
    return {"refused": False, "data": seal.WORK.seal_reply(KEY, request, reply)}


def test_without_a_deadline_a_child_is_never_late(deployed: Deployed, clock: Clock) -> None:
    grid, link = linked(deployed, clock, lambda request: replied(deployed, request) if clock.now > 9 * DAY else None)
    clock.least = HOUR
    came = link.ask(asked(deployed), None)
    assert isinstance(came["0"], Reply) and clock.now > 9 * DAY
    assert grid.asked == [1000.0] and math.isfinite(grid.lifetime) and grid.lifetime > 365 * DAY


def test_a_child_that_refuses_is_asked_ever_less_often(deployed: Deployed, clock: Clock) -> None:
    grid, link = linked(deployed, clock, lambda request: REFUSAL)
    came = link.ask(asked(deployed), HOUR)
    pauses = [after - before for before, after in zip(grid.asked, grid.asked[1:], strict=False)]
    assert not came and clock.now >= HOUR
    for pause, least in zip(pauses, (1, 2, 4, 8, 16, 32, *[LONGEST_PAUSE] * 100), strict=False):
        assert least <= pause < least + 1
    assert len(grid.asked) < HOUR / LONGEST_PAUSE + 10


def test_the_pause_of_a_child_that_refuses_outlives_a_round(deployed: Deployed, clock: Clock) -> None:
    """In each it is asked at once, as what it is asked for is new."""
    grid, link = linked(deployed, clock, lambda request: REFUSAL)
    for _ in range(30):
        link.ask(asked(deployed), 10.0)
    assert len(grid.asked) < 30 + 5


def test_a_child_that_begins_anew_is_asked_at_once(deployed: Deployed, clock: Clock) -> None:
    grid, link = linked(deployed, clock, lambda request: REFUSAL)
    link.ask(asked(deployed), HOUR)
    grid.asked.clear()

    def begin_anew(request: bytes) -> dict[str, Any]:
        grid.came_up = "again"
        return REFUSAL

    grid.answer = begin_anew
    link.ask(asked(deployed), LONGEST_PAUSE / 2)
    first, second = grid.asked
    assert second - first < 3


def test_a_reply_ends_the_long_pauses(deployed: Deployed, clock: Clock) -> None:
    grid, link = linked(deployed, clock, lambda request: REFUSAL)
    link.ask(asked(deployed), HOUR)
    grid.answer = lambda request: replied(deployed, request)
    assert "0" in link.ask(asked(deployed), 10.0)
    grid.asked.clear()
    grid.answer = lambda request: REFUSAL
    link.ask(asked(deployed), 5.0)
    assert len(grid.asked) == 3
