"""Commands about sites' folders, and somebody who holds one as a supervisor does."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from typer.testing import CliRunner

from stratafl.cli.main import app

HOLD = """
import pathlib, signal, sys, time
from stratafl.runs.format import RunLock
if sys.argv[2] == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
lock = RunLock(pathlib.Path(sys.argv[1]))
print("held", flush=True)
time.sleep(600)
"""


def deploy(*words: object) -> tuple[int, str]:
    """The exit code of a command, and what it printed or raised."""
    ran = CliRunner().invoke(app, ["deploy", *map(str, words)], env={"COLUMNS": "200"})
    raised = ran.exception if not isinstance(ran.exception, SystemExit) else None
    return ran.exit_code, ran.output + str(raised or "")


@contextlib.contextmanager
def running(folder: Path, deaf: bool = False) -> Iterator[subprocess.Popen[str]]:
    """A process that holds a site's lock until it is asked to end; one that is deaf does not hear
    that."""
    command = [sys.executable, "-c", HOLD, str(folder), "deaf" if deaf else "hears"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
