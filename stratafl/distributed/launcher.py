"""Start a run's processes on one machine, and join them in one."""

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
"""The name under which the first rank tells where its run is kept."""

SECONDS_TO_FOLLOW = 5.0
"""Seconds that the others may take to end by themselves after one rank failed."""


@dataclass
class Rank:
    """A rank as a process that was started here."""

    number: int
    process: subprocess.Popen
    log: Any
    """What it said, where nobody reads it: only the first rank has the terminal."""

    def how(self) -> str:
        """How it ended."""
        code = self.process.returncode
        if code < 0:
            return f"was ended by {signal.Signals(-code).name}"
        return f"ended with exit code {code}"

    def last_words(self) -> str:
        if self.log is None:
            return ""
        lines = self._said()
        return f": {lines[-1]}" if lines else ""

    def complaint(self) -> str:
        """What it said of the user's own code, and all below that."""
        lines = self._said()
        first = max((number for number, each in enumerate(lines) if each.startswith("error: ")), default=0)
        return "\n".join(lines[first:])

    def _said(self) -> list[str]:
        self.log.seek(0)
        return self.log.read().decode(errors="replace").rstrip().splitlines()


def launch(count: int, arguments: Sequence[str]) -> int:
    """Run `stratafl` with these arguments on so many ranks; the exit code."""
    # this process keeps the store the ranks find each other by, so that its port is free and it
    # outlives them all
    store = dist.TCPStore(LOCALHOST, 0, is_master=True, wait_for_workers=False)
    ranks: list[Rank] = []
    signals: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        signals.append(number)
        for rank in ranks:
            with contextlib.suppress(OSError):
                rank.process.send_signal(number)

    # in sessions of their own, the ranks get a terminal's Ctrl-C from here, once
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
    """All ranks are on this machine, and need no other network."""
    names = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    return {"GLOO_SOCKET_IFNAME": names[0]} if names else {}


def _watch(ranks: Sequence[Rank]) -> list[Rank]:
    """Wait until all have ended; those that failed, the first to do so first."""
    failed: list[Rank] = []
    give_up = float("inf")
    while any(rank.process.poll() is None for rank in ranks) and time.monotonic() < give_up:
        for rank in ranks:
            if rank.process.poll() and rank not in failed:
                failed.append(rank)
                give_up = min(give_up, time.monotonic() + SECONDS_TO_FOLLOW)
        time.sleep(0.02)
    return failed + [rank for rank in ranks if rank.process.poll() and rank not in failed]


def _exit_code(ranks: Sequence[Rank], failed: Sequence[Rank], signals: Sequence[int], store: dist.Store) -> int:
    if not failed:
        return 0
    first = ranks[0].process.returncode
    if first > 0 and first != EXIT_PEER_LOST:
        return first  # and it said why
    path = store.get(RUN_KEY).decode() if store.check([RUN_KEY]) else ""
    go_on = f"; go on with: stratafl run --resume {shlex.quote(path)}" if path else ""
    if signals:
        print(f"interrupted{go_on}", file=sys.stderr)
        return 128 + signals[0]
    # one that only followed another's end has nothing to tell
    culprit = next((rank for rank in failed if rank.process.returncode != EXIT_PEER_LOST), failed[0])
    if culprit.process.returncode == UserCodeError.exit_code and culprit.log is not None:
        print(f"{culprit.complaint()}\nrank {culprit.number} ended with this{go_on}", file=sys.stderr)
        return UserCodeError.exit_code
    print(f"error: rank {culprit.number} {culprit.how()}{culprit.last_words()}{go_on}", file=sys.stderr)
    return EXIT_PEER_LOST


def without_option(arguments: Sequence[str], option: str) -> list[str]:
    """A command line less an option and its value."""
    kept = [argument for argument in arguments if not argument.startswith(f"{option}=")]
    while option in kept:
        place = kept.index(option)
        del kept[place : place + 2]
    return kept


@contextmanager
def distributed_session() -> Iterator[Communicator]:
    """What all ranks raise together, only the first one goes on to tell."""
    ranks = Communicator.join()
    try:
        yield ranks
    except (InvalidInput, Interrupted) as problem:
        if problem is ranks.agreed_on:
            ranks.leave()
            if not ranks.is_first:
                raise SystemExit(problem.exit_code) from None
        raise
    else:
        ranks.leave()
