"""Collectives between the processes of a run, and a watchdog that ends it when one dies."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from stratafl.base.errors import InvalidInput, UserCodeError

EXIT_PEER_LOST = 3
"""The exit code of a rank that lost another one."""

STARTED_BY = "STRATAFL_STARTED_BY"
"""Set for ranks that `stratafl run --nproc` started: it watches them, and knows better which one is
gone and why."""

SECONDS_TO_LEAVE = 10.0

PEER_LOST_MESSAGE = "another process of this run is gone"


class Lifeline:
    """Connects the ranks of a run, so that none waits for ever for one that died."""

    def __init__(self, rank: int, count: int, group: dist.ProcessGroup):
        self.rank, self.count, self.group = rank, count, group
        self.on_loss: Callable[[], str] = lambda: ""
        """What to do before this process ends, too; it may have something to add to the message."""
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()
        if STARTED_BY in os.environ:
            threading.Thread(target=_follow_starter, daemon=True).start()

    def part(self) -> None:
        """Say farewell, and wait until the one before did."""
        with contextlib.suppress(RuntimeError):
            dist.send(torch.ones(1), (self.rank + 1) % self.count, group=self.group)
        self._thread.join(SECONDS_TO_LEAVE)

    def _listen(self) -> None:
        try:
            dist.recv(torch.zeros(1), (self.rank - 1) % self.count, group=self.group)
        except RuntimeError:
            self._lost()

    def _lost(self) -> None:
        try:
            more = self.on_loss()
            if self.rank == 0 and STARTED_BY not in os.environ:
                print(f"error: {PEER_LOST_MESSAGE}{more}", file=sys.stderr, flush=True)
        finally:
            # the main thread may hang in a collective, or in the middle of anything: as after a
            # kill, the run goes on from its last checkpoint
            os._exit(EXIT_PEER_LOST)


def _follow_starter() -> None:
    """Stop when whoever started this process is no more: its end of our standard input is then
    closed."""
    with contextlib.suppress(OSError):
        while os.read(0, 1):
            pass
    os.kill(os.getpid(), signal.SIGTERM)


COLLECTIVE_TIMEOUT = timedelta(days=7)
"""A rank waits for the others as long as they train; one that is gone is noticed by the
lifeline."""

RENDEZVOUS_TIMEOUT = timedelta(minutes=5)
"""How long ranks look for each other at first."""

FAILURE_KEY = "stratafl last word"
"""The name under which a rank says why it ends."""

SECONDS_TO_ASK = 2.0

CHUNK_BYTES = 64 << 20
"""Bytes sent in one go: what a GPU holds goes through the host's memory."""

Members = tuple[int, ...]


def _found() -> tuple[dist.Store, int, int]:
    """The store all ranks share, this one's number, and how many there are."""
    if STARTED_BY in os.environ:
        place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        return dist.TCPStore(*place, timeout=RENDEZVOUS_TIMEOUT), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return next(dist.rendezvous("env://", timeout=RENDEZVOUS_TIMEOUT))


class Communicator:
    """All of them, seen from one. Without others, every answer is one's own."""

    def __init__(self, rank: int = 0, count: int = 1, local_rank: int = 0, store: dist.Store | None = None):
        self.rank, self.count, self.local_rank, self.store = rank, count, local_rank, store
        self.given: Counter[str] = Counter()
        """Bytes this rank handed to the others or to sums with them, by kind: rows, numbers,
        values, state."""
        self.agreed_on: BaseException | None = None
        """What all ranks raise together, and so can part on."""
        self.lifeline: Lifeline | None = None
        self._wanted: list[Members] = []
        self._circles: dict[Members, dist.ProcessGroup | None] = {}

    @staticmethod
    def join() -> Communicator:
        """Join the ranks that torchrun, or `stratafl run --nproc`, started with this one; alone
        where nobody did."""
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return Communicator()
        on_gpus = torch.cuda.is_available() and dist.is_nccl_available()
        store, rank, count = _found()
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpus else "gloo",
            store=store,
            rank=rank,
            world_size=count,
            timeout=COLLECTIVE_TIMEOUT,
        )
        ranks = Communicator(rank, count, int(os.environ.get("LOCAL_RANK", "0")), store)
        ranks.lifeline = Lifeline(rank, count, dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT))
        return ranks

    def leave(self) -> None:
        """Part in peace; all ranks must do so."""
        if self.lifeline is not None:
            self.lifeline.part()
            dist.destroy_process_group()

    @property
    def is_first(self) -> bool:
        """Whether this is the one that prints and writes."""
        return self.rank == 0

    def device(self, wanted: torch.device) -> torch.device:
        """This rank's own GPU, where GPUs are wanted."""
        if self.count == 1 or wanted.type != "cuda":
            return wanted
        if self.local_rank >= torch.cuda.device_count():
            raise InvalidInput("ranks", self.local_rank + 1, f"one GPU each, and there are {torch.cuda.device_count()}")
        mine = torch.device("cuda", self.local_rank)
        torch.cuda.set_device(mine)
        return mine

    # -- values ------------------------------------------------------------------------------------

    def all(self, value: Any) -> list[Any]:
        """What each rank says, in their order: plain data."""
        if self.count == 1:
            return [value]
        mine = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.count)]
        with self._talking():
            dist.all_gather(lengths, torch.tensor([len(mine)]))
            longest = max(int(length) for length in lengths)
            texts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.count)]
            dist.all_gather(texts, torch.cat([mine, mine.new_zeros(longest - len(mine))]))
        self.given["values"] += longest
        return [json.loads(text[: int(length)].numpy().tobytes()) for text, length in zip(texts, lengths, strict=True)]

    def first(self, value: Any) -> Any:
        """What the first rank says; what the others say does not matter."""
        return self.all(value if self.is_first else None)[0]

    @contextmanager
    def together(self) -> Iterator[None]:
        """What is wrong with the input on one rank is wrong on all: nobody goes on without the
        others.

        What is inside must not wait for other ranks.
        """
        problem: InvalidInput | None = None
        try:
            yield
        except InvalidInput as mine:
            problem = mine
        is_users = isinstance(problem, UserCodeError)
        found = self.all(None if problem is None else [problem.field, problem.allowed, is_users and str(problem)])
        for rank, theirs in enumerate(found):
            if theirs is not None and problem is None:
                field, allowed, told = theirs
                where = f"on rank {rank}"
                problem = InvalidInput(field, where, allowed)
                if told:
                    problem = UserCodeError(field, where, allowed, message=f"{told} ({where})")
        if problem is not None:
            self.agreed_on = problem
            raise problem

    def leave_word(self, why: str) -> None:
        """Tell the others why this rank is about to end, which they would not hear otherwise."""
        if self.store is not None:
            self.store.set(FAILURE_KEY, why)

    def last_word(self) -> str:
        """Why a rank that is gone has ended, if it said so."""
        heard: list[str] = []

        def ask(store: dist.Store) -> None:
            if store.check([FAILURE_KEY]):
                heard.append(store.get(FAILURE_KEY).decode())

        if self.store is not None:
            # whoever else is talking to the store may wait for the one that is gone, for ever
            asking = threading.Thread(target=ask, args=(self.store,), daemon=True)
            asking.start()
            asking.join(SECONDS_TO_ASK)
        return heard[0] if heard else ""

    def same(self, what: str, value: Any) -> None:
        """Refuse to go on where a rank has another value than the first."""
        first, *others = self.all(value)
        different = [rank for rank, theirs in enumerate(others, 1) if theirs != first]
        if different:
            self.agreed_on = InvalidInput(what, f"on rank {different[0]}", "is not what the first rank has")
            raise self.agreed_on

    # -- sums --------------------------------------------------------------------------------------

    def circle(self, members: Members) -> None:
        """Ask for a circle of ranks that can add up rows; all ranks must ask for the same ones in
        the same order."""
        if members not in self._wanted and members not in self._circles:
            self._wanted.append(members)

    def connect(self) -> None:
        """Make the circles that were asked for; all ranks must do so at the same moment."""
        for members in self._wanted:
            everybody = len(members) == self.count
            self._circles[members] = (
                dist.group.WORLD if everybody else dist.new_group(list(members), COLLECTIVE_TIMEOUT)
            )
        self._wanted.clear()

    def add_rows(self, rows: Sequence[tuple[Members, Tensor]]) -> None:
        """Add up each row over the ranks of its circle, in place; all must come in the same
        order."""
        with self._talking():
            # none waits before it has given all it has
            waiting = [dist.all_reduce(row, group=self._circles[circle], async_op=True) for circle, row in rows]
            for each in waiting:
                each.wait()
        self.given["rows"] += sum(row.nbytes for _, row in rows)

    def add_numbers(self, values: np.ndarray, members: Members) -> np.ndarray:
        """Sums over a circle."""
        sums = torch.tensor(values, dtype=torch.float64)
        with self._talking():
            dist.all_reduce(sums, group=self._circles[members])
        self.given["numbers"] += sums.nbytes
        return sums.numpy()

    def spread_row(self, row: Tensor, members: Members) -> None:
        """Give the first member's row to the others of its circle, in place."""
        with self._talking():
            dist.broadcast(row, members[0], group=self._circles[members])
        self.given["rows"] += row.nbytes * (self.rank == members[0])

    # -- from one to another -----------------------------------------------------------------------

    def send(self, tensor: Tensor, to: int, kind: str = "state") -> None:
        """Send a tensor's bytes; the other rank must have room of the same size."""
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        with self._talking():
            for piece in flat.split(CHUNK_BYTES):
                dist.send(piece.cpu(), to)
        self.given[kind] += flat.nbytes

    def receive(self, room: Tensor, source: int) -> Tensor:
        """Fill the room, which is on the host."""
        with self._talking():
            for piece in room.reshape(-1).view(torch.uint8).split(CHUNK_BYTES):
                dist.recv(piece, source)
        return room

    @contextmanager
    def _talking(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError:
            # most likely another rank is gone, and the lifeline is about to end this one with a
            # better word
            time.sleep(SECONDS_TO_LEAVE)
            raise
