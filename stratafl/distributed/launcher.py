"""Start of a run's ranks on one machine, and their regular end."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch.distributed as dist

from stratafl.base.environment import usable_cores
from stratafl.base.errors import InvalidInput, UserCodeError
from stratafl.base.signals import Interrupted
from stratafl.distributed.communicator import EXIT_PEER_LOST, STARTED_BY, Communicator

LOCALHOST = "127.0.0.1"

RUN_KEY = "stratafl run"
"""Key of the store under which the first rank writes the folder of its run."""

SECONDS_TO_FOLLOW = 5.0
"""Seconds in which the other ranks may end by themselves after one has failed."""


@dataclass
class Rank:
    """Process of a rank."""

    number: int
    process: subprocess.Popen
    log: Any
    """File with its output; None for the first rank, which writes to the terminal."""

    def ending(self) -> str:
        """Description of the end of the process, with the last line of its output."""
        code = self.process.returncode
        ending = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        lines = [] if self.log is None else self._output()
        return f"{ending}: {lines[-1]}" if lines else ending

    def error_report(self) -> str:
        """Output from the last error message on, which includes the lines of a user's own code."""
        lines = self._output()
        first = max((number for number, line in enumerate(lines) if line.startswith("error: ")), default=0)
        return "\n".join(lines[first:])

    def _output(self) -> list[str]:
        self.log.seek(0)
        return self.log.read().decode(errors="replace").rstrip().splitlines()


def launch(count: int, arguments: Sequence[str]) -> int:
    """Run `stratafl` with these arguments on `count` ranks, and return the exit code."""
    # this process hosts the store in which the ranks find each other: so its port is free, and it
    # outlives all ranks
    store = dist.TCPStore(LOCALHOST, 0, is_master=True, wait_for_workers=False)
    ranks: list[Rank] = []
    signals: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        signals.append(number)
        for rank in ranks:
            with contextlib.suppress(OSError):
                rank.process.send_signal(number)

    # the ranks have sessions of their own, so that they get a terminal's Ctrl-C from here only
    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        for number in range(count):
            ranks.append(_start_rank(number, count, store.port, arguments))
        failed = _watch(ranks)
    finally:
        for rank in ranks:
            rank.process.kill()
            rank.process.wait()
        for number, handler in before.items():
            signal.signal(number, handler)
    code = _exit_code(ranks, failed, signals, store)
    for rank in ranks:
        if rank.log is not None:
            rank.log.close()
    return code


def _start_rank(number: int, count: int, port: int, arguments: Sequence[str]) -> Rank:
    environment = {
        "OMP_NUM_THREADS": str(max(1, usable_cores() // count)),
        **_loopback(),
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        "RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": LOCALHOST, "MASTER_PORT": str(port),
        STARTED_BY: str(os.getpid()),
    }  # fmt: skip
    log = None if number == 0 else tempfile.TemporaryFile()  # noqa: SIM115  # closed with the ranks
    process = subprocess.Popen(
        [sys.executable, "-m", "stratafl", *arguments],
        env=environment, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True,
    )  # fmt: skip
    return Rank(number, process, log)


def _loopback() -> dict[str, str]:
    """Environment that makes gloo use the loopback interface: all ranks are on this machine."""
    names = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    return {"GLOO_SOCKET_IFNAME": names[0]} if names else {}


def _watch(ranks: Sequence[Rank]) -> list[Rank]:
    """Wait until all ranks have ended, and return those that failed, the first one first."""
    failed: list[Rank] = []
    deadline = float("inf")
    while any(rank.process.poll() is None for rank in ranks) and time.monotonic() < deadline:
        for rank in ranks:
            if rank.process.poll() and rank not in failed:
                failed.append(rank)
                deadline = min(deadline, time.monotonic() + SECONDS_TO_FOLLOW)
        time.sleep(0.02)
    return failed + [rank for rank in ranks if rank.process.poll() and rank not in failed]


def _exit_code(ranks: Sequence[Rank], failed: Sequence[Rank], signals: Sequence[int], store: dist.Store) -> int:
    if not failed:
        return 0
    first = ranks[0].process.returncode
    if first > 0 and first != EXIT_PEER_LOST:
        return first  # it has printed why
    path = store.get(RUN_KEY).decode() if store.check([RUN_KEY]) else ""
    hint = f"; go on with: stratafl resume {shlex.quote(path)}" if path else ""
    if signals:
        print(f"interrupted{hint}", file=sys.stderr)
        return 128 + signals[0]
    # a rank that ended because another one had died is not the cause
    culprit = next((rank for rank in failed if rank.process.returncode != EXIT_PEER_LOST), failed[0])
    if culprit.process.returncode == UserCodeError.exit_code and culprit.log is not None:
        print(f"{culprit.error_report()}\nrank {culprit.number} ended with this{hint}", file=sys.stderr)
        return UserCodeError.exit_code
    print(f"error: rank {culprit.number} {culprit.ending()}{hint}", file=sys.stderr)
    return EXIT_PEER_LOST


def without_option(arguments: Sequence[str], option: str) -> list[str]:
    """Command line without an option and its value."""
    remaining = [argument for argument in arguments if not argument.startswith(f"{option}=")]
    while option in remaining:
        position = remaining.index(option)
        del remaining[position : position + 2]
    return remaining


@contextmanager
def distributed_session() -> Iterator[Communicator]:
    """Communicator of this process's run; an error that all ranks raise is printed by the first."""
    ranks = Communicator.join()
    try:
        yield ranks
    except (InvalidInput, Interrupted) as error:
        if error is ranks.common_error:
            ranks.leave()
            if not ranks.is_first:
                raise SystemExit(error.exit_code) from None
        raise
    else:
        ranks.leave()
