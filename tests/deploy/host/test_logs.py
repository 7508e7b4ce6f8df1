"""Lines of logs, and files that stay small."""

from __future__ import annotations

import logging
import os
import re
import sys
import time
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from stratafl.deploy.host.processes import Forked
from stratafl.deploy.notes import boards, log
from stratafl.deploy.notes.boards import Board
from stratafl.deploy.notes.log import INFO, WARNING

LINE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d\d:\d\d (DEBUG|INFO|WARNING|ERROR) .*\S.*")


@pytest.fixture(autouse=True)
def board(monkeypatch: pytest.MonkeyPatch) -> Board:
    fresh = Board()
    monkeypatch.setattr(boards, "own", fresh)
    log._last.clear()
    return fresh


def test_every_line_has_date_time_and_level_and_steers_no_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    log.say("round 1")
    log.warn("paris/0 is refused: \x1b[2J\x07")
    log.fail("first\nsecond\n\n")
    lines = capfd.readouterr().err.split("\n")[:-1]
    assert len(lines) == 4 and all(LINE.fullmatch(each) and each.isprintable() for each in lines)
    assert [each.split()[1] for each in lines] == ["INFO", "WARNING", "ERROR", "ERROR"]


def test_lines_of_two_time_zones_tell_the_same_moment(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    began = time.time() // 1
    for zone in ("IST-5:30", "EST5"):
        with monkeypatch.context() as patch:
            patch.setenv("TZ", zone)
            time.tzset()
            log.say("x")
        time.tzset()
    times = [datetime.fromisoformat(each.split()[0]) for each in capfd.readouterr().err.splitlines()]
    assert [each.utcoffset() for each in times] == [timedelta(hours=5, minutes=30), timedelta(hours=-5)]
    assert all(began <= each.timestamp() <= time.time() for each in times)


def test_what_is_warned_of_is_on_the_board_once_and_of_bounded_length(board: Board) -> None:
    for number in range(100):
        log.warn(f"{number} " + "x" * 10**5)
        log.warn("again and again")
    found = (board.read() or {})["said"]
    assert len(found) == log.LAST and len({number for number, _ in found}) == log.LAST
    assert all(len(text) <= log.LONGEST for _, text in found)
    log.fail("no room")
    first = board.read() or {}
    log.fail("no room")
    assert first == board.read() and first["problem"] == "no room"
    log.well()
    assert (board.read() or {})["problem"] == ""


def test_loggers_write_as_we_do_and_only_what_matters_is_told_further(
    board: Board, capfd: pytest.CaptureFixture[str]
) -> None:
    log.listen("stratafl_test", travels=True)
    log.listen("flower_test")
    logging.getLogger("flower_test").error("noise")
    logger = logging.getLogger("stratafl_test.inner")
    logger.info("started")
    logger.warning("odd")
    try:
        raise OSError("gone")
    except OSError:
        logger.exception("failed")
    said = capfd.readouterr().err
    assert "INFO started" in said and "WARNING odd" in said and "ERROR OSError: gone" in said
    assert all(LINE.fullmatch(each) for each in said.splitlines())
    assert [text for _, text in (board.read() or {})["said"]] == ["odd", "failed"]


def test_a_log_that_cannot_be_written_ends_nobody(tmp_path: Path, board: Board) -> None:
    def work() -> None:
        full = os.open("/dev/full", os.O_WRONLY)
        for to in (1, 2):
            os.dup2(full, to)
        boards.use(board, board)
        log.warn("x")
        log.fail("no room")
        os._exit(7)

    assert Forked(work, tmp_path / "log", tmp_path).wait(20) == 7
    assert (board.read() or {})["problem"] == "no room"


def test_a_log_is_cut_while_it_is_written_and_the_one_before_is_kept(tmp_path: Path) -> None:
    path, count = tmp_path / "node.log", 400

    def work() -> None:
        sys.stderr = os.fdopen(2, "w", closefd=False)  # not what this test runner has put there
        for number in range(count):
            log.say(f"line {number:06} " + "x" * 60)
            time.sleep(0.002)

    process, largest = Forked(work, path, tmp_path), 10_000
    sizes = []
    while process.poll() is None:
        log.keep_small([path], largest)
        sizes.append(path.stat().st_size if path.exists() else 0)
        time.sleep(0.01)
    assert process.returncode == 0 and max(sizes) < 2 * largest
    kept = tmp_path / "node.log.1"
    assert kept.stat().st_mode & 0o777 == path.stat().st_mode & 0o777 == 0o600
    lines = kept.read_text().splitlines() + path.read_text().splitlines()
    assert all(LINE.fullmatch(each) for each in lines) and f"line {count - 1:06}" in lines[-1]
    assert {each.name for each in tmp_path.iterdir()} == {"node.log", "node.log.1"}


def test_nothing_is_cut_that_is_a_link(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("x" * 1000)
    (tmp_path / "node.log").symlink_to(tmp_path / "other")
    log.keep_small([tmp_path / "node.log"], 10)
    assert (tmp_path / "other").stat().st_size == 1000


@pytest.mark.parametrize(("level", "word"), [(INFO, "INFO"), (WARNING, "WARNING")])
def test_the_level_is_in_words(level: int, word: str, capsys: pytest.CaptureFixture[str]) -> None:
    log.say("x", level)
    assert f" {word} x\n" in capsys.readouterr().err
