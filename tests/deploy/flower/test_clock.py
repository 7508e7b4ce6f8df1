"""Sites whose clocks are wrong, or jump: they take part, and what is wrong is said by name, size
and direction."""

from __future__ import annotations

import asyncio
import datetime
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr")

import httpx
from cryptography import x509
from flwr.supercore import date

from stratafl import InvalidInput
from stratafl.deploy.flower import clock
from stratafl.deploy.flower.clock import OURS, THEIRS, ParentClock, Stamp, check_certificates, told
from stratafl.deploy.sites.provision import Authority
from tests.deploy.real import Run

SITE: Any = SimpleNamespace(name="0/1", parent="edge:9092")
WRONG_CLOCK = '''
"""A host's clock that is off by what a file says, at every moment: seconds."""
import datetime, os, time

right, right_ns = time.time, time.time_ns

def off():
    try:
        with open(os.environ["CLOCK_IS_OFF"]) as file:
            return float(file.read() or 0)
    except OSError:
        return 0.0

class Wrong(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return cls.fromtimestamp(time.time(), tz)

    @classmethod
    def utcnow(cls):
        return cls.now(datetime.UTC).replace(tzinfo=None)

time.time = lambda: right() + off()
time.time_ns = lambda: right_ns() + int(off() * 10**9)
datetime.datetime = Wrong
'''


# -- what a child learns ---------------------------------------------------------------------------


def answer(theirs: float, host: float | None = None, status: int = 200) -> httpx.Response:
    return httpx.Response(status, headers={THEIRS: f"{theirs:.3f} {theirs if host is None else host:.3f}"})


@pytest.mark.parametrize("off", [-7200.0, -8.0, 0.0, 8.0, 7200.0, 1e9])
def test_the_parent_s_time_is_learned_from_its_answers(off: float) -> None:
    said: list[str] = []
    parent = ParentClock(SITE, said.append)
    for _ in range(3):
        parent.learn(time.monotonic() - 0.1, answer(time.time() - off))
        assert abs(parent.now().timestamp() - (time.time() - off)) < 0.2
    assert len(said) == (off != 0)
    if off:
        assert "the clock of 0/1's host is" in said[0] and "edge:9092" in said[0]
        assert told(off) in said[0] and ("ahead of" if off > 0 else "behind") in said[0]


def test_a_slow_answer_says_little_and_is_not_mistaken_for_a_wrong_clock() -> None:
    said: list[str] = []
    parent = ParentClock(SITE, said.append)
    assert not parent.learn(time.monotonic() - 60.0, answer(time.time() - 30.0))
    assert abs(parent.now().timestamp() - time.time()) < 0.1 and not said
    parent.learn(time.monotonic() - 60.0, answer(time.time() - 3660.0))
    assert "60 min ahead" in said[0]  # at least


def test_a_clock_that_is_put_right_is_said_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    right, said = time.time, []
    monkeypatch.setattr(time, "time", lambda: right() - 7200.0)
    parent = ParentClock(SITE, said.append)
    assert parent.learn(time.monotonic(), answer(right()))
    monkeypatch.setattr(time, "time", right)
    assert abs(parent.now().timestamp() - right()) < 0.1
    assert not parent.learn(time.monotonic(), answer(right()))
    assert len(said) == 2 and "2 h behind" in said[0] and "agrees" in said[1]


@pytest.mark.parametrize("stamp", ["", "soon", "1", "nan nan", "inf 0", "1 2 3"])
def test_an_answer_without_a_time_is_nothing_to_learn_from(stamp: str) -> None:
    parent = ParentClock(SITE, pytest.fail)  # type: ignore[arg-type]
    assert not parent.learn(time.monotonic(), httpx.Response(200, headers={THEIRS: stamp}))
    assert abs(parent.now().timestamp() - time.time()) < 0.1


def test_flower_s_clock_does_not_jump(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(vars(date), "datetime", datetime)
    right = time.time
    clock.run_steadily()
    for off in (-7200.0, 8.0, 1e6):
        monkeypatch.setattr(time, "time", lambda: right() + off)
        assert abs(date.now().timestamp() - right()) < 0.1 and date.now().tzinfo == datetime.UTC
    monkeypatch.setattr(time, "time", lambda: 0.0)
    clock.run_steadily()
    assert date.now().year >= 2025


# -- what a parent hears ---------------------------------------------------------------------------


def heard(*clocks: tuple[str, str, int]) -> list[str]:
    """What is said of requests with a key and a clock, answered with a status."""
    said: list[str] = []
    stamp, sent = Stamp({"key": "0/1"}, said.append), []

    async def send(event: Any) -> None:
        sent.append(event)

    for key, ours, status in clocks:
        headers = [(b"flwr-public-key", key.encode()), (OURS.encode(), ours.encode())]
        start = {"type": "http.response.start", "status": status, "headers": []}
        asyncio.run(stamp({"headers": headers}, send)(start))  # type: ignore[arg-type]
    for event in sent:
        ((name, value),) = event["headers"]
        assert name == THEIRS.encode() and len(value.split()) == 2
    return said


def test_a_parent_says_whose_clock_is_off_and_not_too_often() -> None:
    (line,) = heard(*[("key", str(8.0 + i), 200) for i in range(100)])
    assert "0/1" in line and "8 s ahead of" in line
    assert not heard(("key", "1.0", 200), ("key", "nan", 200), ("key", "x", 200), ("key", "-9", 401), ("no", "9", 200))


# -- certificates ----------------------------------------------------------------------------------


def test_certificates_have_room_for_clocks_that_are_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority = Authority.new("test")
    (tmp_path / "ca.pem").write_bytes(authority.pem)
    server = x509.load_pem_x509_certificate(authority.sign("a", ["a"])[0])
    right = time.time()
    for now in (1.0, right - 1e6, right, right + 4 * 365 * 86400):
        monkeypatch.setattr(time, "time", lambda: now)
        check_certificates(tmp_path, "0/1")
        assert server.not_valid_before_utc.timestamp() <= now <= server.not_valid_after_utc.timestamp()
    monkeypatch.setattr(time, "time", lambda: right + 6 * 365 * 86400)
    with pytest.raises(InvalidInput, match=r"the clock of 0/1's host .* 36. days ahead of"):
        check_certificates(tmp_path, "0/1")


# -- real sites ------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Run]]:
    """A tree in which the clocks of some sites are off by what their file says."""
    (tmp_path / "wrong").mkdir()
    (tmp_path / "wrong" / "sitecustomize.py").write_text(WRONG_CLOCK)
    path = os.environ.get("PYTHONPATH", "")
    made: list[Run] = []

    def make(off: dict[str, float], **settings: Any) -> Run:
        run = Run(tmp_path, 23000 + os.getpid() % 900, **settings)
        made.append(run)
        run.start(*(name for name in run.folders if name not in off))
        for name, seconds in off.items():
            (tmp_path / name.replace("/", "_")).write_text(str(seconds))
            monkeypatch.setenv("CLOCK_IS_OFF", str(tmp_path / name.replace("/", "_")))
            monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'wrong'}:{path}")
            run.start(name)
            monkeypatch.setenv("PYTHONPATH", path)
        return run

    yield make
    for each in made:
        each.close()


def said_by(run: Run, site: str, name: str) -> str:
    return (run.folders[site] / "logs" / f"{name}.log").read_text()


@pytest.mark.deploy
def test_sites_with_wrong_clocks_take_part(run: Callable[..., Run]) -> None:
    """With a deadline: who is not let in is left out."""
    off = {"0": 8.0, "1": -8.0, "2": 7200.0, "3": -7200.0}
    made = run(off, shape="5", periods=[2], rounds=3, deadline=60)
    made.wait()
    assert [line["absent"] + line["refused"] for line in made.rounds] == [[]] * 3
    assert made.difference() < 1e-6
    parent = said_by(made, "root", "superlink")
    for name, size in {"0": "[78] s ahead of", "1": "[78] s behind", "2": "2 h ahead of", "3": "2 h behind"}.items():
        assert re.search(f"the clock of {name}'s host is {size} that of", said_by(made, name, "supernode"))
        assert re.search(f"the clock of {name}'s host is {size} this one's", parent)
        assert "ended" not in said_by(made, name, "site")
    assert "the clock of 4's host" not in parent


@pytest.mark.deploy
def test_clocks_that_jump_change_nothing(run: Callable[..., Run], tmp_path: Path) -> None:
    """A parent's as a child's, in both directions, while they work."""
    made = run({"root": 0.0, "0": 0.0}, shape="2", periods=[2], rounds=12, deadline=60)
    for number, (site, seconds) in enumerate([("0", 7200.0), ("root", 9000.0), ("0", -600.0), ("root", -7200.0)]):
        made.wait(lambda: len(made.rounds) > 2 * number)
        (tmp_path / site).write_text(str(seconds))
    made.wait()
    assert [line["round"] for line in made.rounds] == list(range(1, 13))
    assert all(line["absent"] == line["refused"] == [] for line in made.rounds)
    assert made.difference() < 1e-6
    for site in ("root", "0", "1"):
        assert "ended" not in said_by(made, site, "site")
