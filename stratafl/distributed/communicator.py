"""Collectives between the processes of a run, and a watchdog that ends them when one dies."""

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
"""Exit code of a rank that ends because another one has died."""

STARTED_BY = "STRATAFL_STARTED_BY"
"""Environment variable of ranks that `stratafl run --nproc` has started.

That process watches them, and reports which rank has failed and why.
"""

SECONDS_TO_LEAVE = 10.0
"""Longest wait for another rank at the end of a run, or for the watchdog to end this process."""

PEER_LOST_MESSAGE = "another process of this run is gone"

COLLECTIVE_TIMEOUT = timedelta(days=7)
"""A rank waits for the others as long as they train: the watchdog notices when one has died."""

RENDEZVOUS_TIMEOUT = timedelta(minutes=5)
"""Longest wait for all ranks to start."""

FAILURE_KEY = "stratafl last word"
"""Key of the store under which a rank writes why it fails."""

SECONDS_TO_ASK = 2.0
"""Longest wait for an answer of the store."""

CHUNK_BYTES = 64 << 20
"""Bytes sent at a time: a tensor on a GPU is copied through the memory of the host."""

Members = tuple[int, ...]
"""Ranks of a process group, in ascending order."""


class Watchdog:
    """Ends this process when another rank has died, instead of waiting for it forever.

    Every rank waits for a message of the previous one, which is sent at a regular end only.
    """

    def __init__(self, rank: int, count: int, group: dist.ProcessGroup):
        self.rank, self.count, self.group = rank, count, group
        self.on_peer_lost: Callable[[], str] = lambda: ""
        """Function called before this process ends; it returns an addition to the message."""
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()
        if STARTED_BY in os.environ:
            threading.Thread(target=_follow_starter, daemon=True).start()

    def close(self) -> None:
        """Tell the next rank that this one ends regularly, and wait for the previous one."""
        with contextlib.suppress(RuntimeError):
            dist.send(torch.ones(1), (self.rank + 1) % self.count, group=self.group)
        self._thread.join(SECONDS_TO_LEAVE)

    def _listen(self) -> None:
        try:
            dist.recv(torch.zeros(1), (self.rank - 1) % self.count, group=self.group)
        except RuntimeError:
            self._end_process()

    def _end_process(self) -> None:
        try:
            addition = self.on_peer_lost()
            if self.rank == 0 and STARTED_BY not in os.environ:
                print(f"error: {PEER_LOST_MESSAGE}{addition}", file=sys.stderr, flush=True)
        finally:
            # the main thread may hang in a collective or be in the middle of anything: the run can
            # be resumed from its last checkpoint, as after a kill
            os._exit(EXIT_PEER_LOST)


def _follow_starter() -> None:
    """Stop this process when the one that started it has ended, which closes our standard input."""
    with contextlib.suppress(OSError):
        while os.read(0, 1):
            pass
    os.kill(os.getpid(), signal.SIGTERM)


def _rendezvous() -> tuple[dist.Store, int, int]:
    """Store that all ranks share, number of this rank, and number of ranks."""
    if STARTED_BY in os.environ:
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.TCPStore(*address, timeout=RENDEZVOUS_TIMEOUT)
        return store, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return next(dist.rendezvous("env://", timeout=RENDEZVOUS_TIMEOUT))


class Communicator:
    """Communicator of the ranks of a run; with one rank, every collective is the identity.

    All ranks must call the collectives in the same order.
    """

    def __init__(self, rank: int = 0, count: int = 1, local_rank: int = 0, store: dist.Store | None = None):
        self.rank, self.count, self.local_rank, self.store = rank, count, local_rank, store
        self.bytes_sent: Counter[str] = Counter()
        """Bytes this rank has sent or put into sums, by kind: rows, numbers, values, state."""
        self.common_error: BaseException | None = None
        """Error that all ranks raise, so that they can end regularly."""
        self.watchdog: Watchdog | None = None
        self._requested: list[Members] = []
        self._groups: dict[Members, dist.ProcessGroup | None] = {}

    @staticmethod
    def join() -> Communicator:
        """Connect the ranks started by torchrun or by `stratafl run --nproc`.

        A process that was not started by them is the only rank.
        """
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return Communicator()
        on_gpus = torch.cuda.is_available() and dist.is_nccl_available()
        store, rank, count = _rendezvous()
        backend = "cpu:gloo,cuda:nccl" if on_gpus else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=count, timeout=COLLECTIVE_TIMEOUT)
        ranks = Communicator(rank, count, int(os.environ.get("LOCAL_RANK", "0")), store)
        ranks.watchdog = Watchdog(rank, count, dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT))
        return ranks

    def leave(self) -> None:
        """Disconnect from the other ranks; a collective call."""
        if self.watchdog is not None:
            self.watchdog.close()
            dist.destroy_process_group()

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that prints and writes files."""
        return self.rank == 0

    def device(self, device: torch.device) -> torch.device:
        """Device of this rank: its own GPU if the run's device is a GPU."""
        if self.count == 1 or device.type != "cuda":
            return device
        if self.local_rank >= torch.cuda.device_count():
            raise InvalidInput("ranks", self.local_rank + 1, f"one GPU each, and there are {torch.cuda.device_count()}")
        own_gpu = torch.device("cuda", self.local_rank)
        torch.cuda.set_device(own_gpu)
        return own_gpu

    # -- values ------------------------------------------------------------------------------------

    def all_gather(self, value: Any) -> list[Any]:
        """Gather the values of all ranks, in their order; values are what JSON can hold."""
        if self.count == 1:
            return [value]
        text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.count)]
        with self._communicating():
            dist.all_gather(lengths, torch.tensor([len(text)]))
            longest = max(int(length) for length in lengths)
            texts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.count)]
            dist.all_gather(texts, torch.cat([text, text.new_zeros(longest - len(text))]))
        self.bytes_sent["values"] += longest
        return [json.loads(text[: int(length)].numpy().tobytes()) for text, length in zip(texts, lengths, strict=True)]

    def broadcast_first(self, value: Any) -> Any:
        """Value of the first rank, on all ranks."""
        return self.all_gather(value if self.is_first else None)[0]

    @contextmanager
    def raise_together(self) -> Iterator[None]:
        """Raise an `InvalidInput` of any rank in all of them.

        The code in the block must not wait for other ranks.
        """
        error: InvalidInput | None = None
        try:
            yield
        except InvalidInput as raised:
            error = raised
        is_users = isinstance(error, UserCodeError)
        errors = self.all_gather(None if error is None else [error.field, error.allowed, is_users and str(error)])
        for rank, values in enumerate(errors):
            if values is not None and error is None:
                field, allowed, message = values
                where = f"on rank {rank}"
                error = InvalidInput(field, where, allowed)
                if message:
                    error = UserCodeError(field, where, allowed, message=f"{message} ({where})")
        if error is not None:
            self.common_error = error
            raise error

    def check_equal(self, field: str, value: Any) -> None:
        """Raise `InvalidInput` if a rank has another value than the first."""
        first, *others = self.all_gather(value)
        different = [rank for rank, other in enumerate(others, 1) if other != first]
        if different:
            self.common_error = InvalidInput(field, f"on rank {different[0]}", "is not what the first rank has")
            raise self.common_error

    # -- failures ----------------------------------------------------------------------------------

    def record_failure(self, reason: str) -> None:
        """Tell the other ranks why this one is about to end, which they cannot know otherwise."""
        if self.store is not None:
            self.store.set(FAILURE_KEY, reason)

    def failure_reason(self) -> str:
        """Reason that a rank which has ended has recorded, or ""."""
        reasons: list[str] = []

        def ask(store: dist.Store) -> None:
            if store.check([FAILURE_KEY]):
                reasons.append(store.get(FAILURE_KEY).decode())

        if self.store is not None:
            # another thread may be using the store, waiting forever for the rank that has died
            thread = threading.Thread(target=ask, args=(self.store,), daemon=True)
            thread.start()
            thread.join(SECONDS_TO_ASK)
        return reasons[0] if reasons else ""

    # -- sums --------------------------------------------------------------------------------------

    def request_group(self, members: Members) -> None:
        """Request a process group for sums, which `create_groups` creates.

        All ranks must request the same groups in the same order.
        """
        if members not in self._requested and members not in self._groups:
            self._requested.append(members)

    def create_groups(self) -> None:
        """Create the requested process groups; a collective call."""
        for members in self._requested:
            is_world = len(members) == self.count
            self._groups[members] = dist.group.WORLD if is_world else dist.new_group(list(members), COLLECTIVE_TIMEOUT)
        self._requested.clear()

    def all_reduce_rows(self, rows: Sequence[tuple[Members, Tensor]]) -> None:
        """Sum each row over the ranks of its group, in place, in the same order on all ranks."""
        with self._communicating():
            # all sums are started before any is waited for: ranks of several groups cannot deadlock
            sums = [dist.all_reduce(row, group=self._groups[members], async_op=True) for members, row in rows]
            for pending in sums:
                pending.wait()
        self.bytes_sent["rows"] += sum(row.nbytes for _, row in rows)

    def all_reduce_numbers(self, values: np.ndarray, members: Members) -> np.ndarray:
        """Sums of values over the ranks of a group, in float64."""
        sums = torch.tensor(values, dtype=torch.float64)
        with self._communicating():
            dist.all_reduce(sums, group=self._groups[members])
        self.bytes_sent["numbers"] += sums.nbytes
        return sums.numpy()

    def broadcast_row(self, row: Tensor, members: Members) -> None:
        """Copy the row of a group's first member to the others, in place."""
        with self._communicating():
            dist.broadcast(row, members[0], group=self._groups[members])
        self.bytes_sent["rows"] += row.nbytes * (self.rank == members[0])

    # -- point to point ----------------------------------------------------------------------------

    def send(self, tensor: Tensor, destination: int, kind: str = "state") -> None:
        """Send the bytes of a tensor to a rank that receives one of the same size."""
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        with self._communicating():
            for chunk in flat.split(CHUNK_BYTES):
                dist.send(chunk.cpu(), destination)
        self.bytes_sent[kind] += flat.nbytes

    def receive(self, out: Tensor, source: int) -> Tensor:
        """Receive the bytes of a tensor into `out`, which is on the host."""
        with self._communicating():
            for chunk in out.reshape(-1).view(torch.uint8).split(CHUNK_BYTES):
                dist.recv(chunk, source)
        return out

    @contextmanager
    def _communicating(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError:
            # most likely another rank has died, and the watchdog is about to end this process, with
            # a better message
            time.sleep(SECONDS_TO_LEAVE)
            raise
