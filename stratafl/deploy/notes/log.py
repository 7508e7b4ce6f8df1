"""Lines of a log: time with its offset from UTC, level and one printable text; and files that stay
small.

What a process warns of also goes on its board, so that it is told further up (see
stratafl.deploy.news.entries): of an error, only what may leave the site.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from datetime import datetime
from pathlib import Path

from stratafl.base import files
from stratafl.base.errors import InvalidInput, error_message, escape_control, one_line
from stratafl.deploy.notes import boards
from stratafl.deploy.notes.outward import outward

INFO, WARNING, ERROR = logging.INFO, logging.WARNING, logging.ERROR
LARGEST = 5 << 20
"""Bytes of a log; then it begins anew, and the one before is kept as NAME.1."""
LAST, LONGEST = 4, 400
"""Warnings that are on the board, and characters of each."""

_last: deque[tuple[int, str]] = deque(maxlen=LAST)
_number = 0
_problem = "", 0.0
"""What stands in the way of this process, and since when."""


def say(text: str, level: int = INFO) -> None:
    """Into the log; that it cannot be written, as the disk is full, ends nobody."""
    begin = f"{datetime.now().astimezone().isoformat(timespec='seconds')} {logging.getLevelName(level)}"
    with contextlib.suppress(OSError):
        for each in filter(None, text.splitlines()):
            print(begin, escape_control(each), file=sys.stderr, flush=True)


def warn(text: str, problem: BaseException | None = None) -> None:
    """Something an operator may have to look after, and the error behind it."""
    say(_joined(text, problem, error_message), WARNING)
    _note(_joined(text, problem, outward))


def fail(text: str, problem: BaseException | None = None) -> None:
    """Why this process cannot do its work now, until it says that it can. All of the error goes
    into the log."""
    global _problem
    say(_joined(text, problem, error_message), ERROR)
    if problem is not None:
        explain(problem)
    short = one_line(_joined(text, problem, outward), LONGEST)
    if short != _problem[0]:
        _problem = short, time.monotonic()
    boards.own.put(problem=short, since=_problem[1], well=False)


def explain(problem: BaseException) -> None:
    """Where an error comes from, with all of its text; a complaint of ours alone says so itself."""
    if problem.__cause__ is not None or not isinstance(problem, InvalidInput):
        say("".join(traceback.format_exception(problem)), ERROR)


def _joined(text: str, problem: BaseException | None, words: Callable[[BaseException], str]) -> str:
    return ": ".join(filter(None, (text, "" if problem is None else words(problem))))


def well() -> None:
    """Note that this process does its work, with nothing in its way."""
    global _problem
    _problem = "", 0.0
    boards.own.put(problem="", well=True)


def _note(text: str) -> None:
    """Note a warning, unless it is the same text again, which is not news."""
    global _number
    short = one_line(text, LONGEST)
    if short not in (each for _, each in _last):
        _number += 1
        _last.append((_number, short))
        boards.own.put(said=list(_last))


class Handler(logging.Handler):
    """What loggers have to tell, said as everything else is."""

    def __init__(self, travels: bool):
        super().__init__(INFO)
        self._travels = travels

    def emit(self, record: logging.LogRecord) -> None:
        say(self.format(_worded(record, error_message)), record.levelno)
        for each in record.args if isinstance(record.args, tuple) else ():
            if isinstance(each, BaseException):
                explain(each)
        if self._travels and record.levelno >= WARNING:
            _note(_worded(record, outward).getMessage())


def _worded(record: logging.LogRecord, words: Callable[[BaseException], str]) -> logging.LogRecord:
    """A record in whose message errors are told in these words."""
    if not isinstance(record.args, tuple):
        return record
    args = tuple(words(each) if isinstance(each, BaseException) else each for each in record.args)
    return logging.makeLogRecord({**vars(record), "args": args})


def listen(*names: str, travels: bool = False) -> None:
    """Have these loggers write lines as ours are, in this process and from now on. `travels`: their
    warnings travel to the parent as ours do."""
    for name in names:
        logger = logging.getLogger(name)
        logger.handlers[:] = [Handler(travels)]
        logger.setLevel(INFO)
        logger.propagate = False


def keep_small(logs: Iterable[Path], largest: int = LARGEST) -> None:
    """Copy and cut what has grown too large: whoever writes it goes on at its end, which is then
    its beginning."""
    for path in logs:
        with contextlib.suppress(OSError):
            if path.stat().st_size > largest and not path.is_symlink():
                _keep(path)
                os.truncate(path, 0)


def _keep(path: Path) -> None:
    """Keep a copy of a log as NAME.1; where there is no room for it, the one before stays."""
    partial = path.with_name(f".{path.name}{files.PARTIAL}")
    try:
        with open(path, "rb") as source, files.create_anew(partial, files.PRIVATE) as copy:
            shutil.copyfileobj(source, copy)
        os.replace(partial, path.with_name(f"{path.name}.1"))
    except OSError:
        files.remove_tree(partial)
