"""Executor that trains in the tests' own process, since another one takes seconds to begin."""

from __future__ import annotations

from pathlib import Path

from stratafl.sweeps import RunTask
from stratafl.sweeps.task import main

OPTION = f"{Path(__file__)}:Inline"
"""Value of --executor."""


class Ended:
    """A job that has ended before anybody can ask."""

    def __init__(self, code: int):
        self.code = code

    def exit_code(self) -> int | None:
        return self.code

    def stop(self) -> None:
        raise AssertionError("it has ended")


class Inline:
    slots = 1

    def submit(self, task: RunTask, slot: int) -> Ended:
        return Ended(main(task.file))
