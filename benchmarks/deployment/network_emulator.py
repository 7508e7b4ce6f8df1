"""Several hosts on one machine, joined by slow links that may lose packets.

Each host is a network namespace with a TUN device. A process of its own holds the other ends: it
passes every IP packet on after a delay, as fast as the link between the two hosts takes it, or
drops it. So TCP meets what it would meet on such a link, retransmissions and all, without the
kernel's own emulation (netem), which not every kernel has.

    python network_emulator.py SETTINGS

with the settings as JSON, see `EmulatedNetwork`. It needs root; on SIGUSR1 it writes its counts to
stdout, on SIGTERM likewise before it ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import itertools
import json
import os
import random
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

TUN = "/dev/net/tun"
SET_INTERFACE, IS_TUN, NO_PACKET_INFO = 0x400454CA, 0x0001, 0x1000
NEW_NET = 0x40000000
DEVICE, LARGEST = "link0", 65535
FOLDER = Path("/run/netns")
AT_ONCE, URGENT = 32, -15
LONGEST_QUEUE = 2.0
"""Seconds of sending that may wait before a line; what comes then is dropped."""


class NotPermitted(Exception):
    """This machine does not permit it, and why."""


def _ip(*arguments: str) -> None:
    ran = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if ran.returncode:
        raise NotPermitted(f"ip {' '.join(arguments)}: {ran.stderr.strip()}")


def _enter(namespace: int) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    if library.setns(namespace, NEW_NET):
        raise NotPermitted(f"setns: {os.strerror(ctypes.get_errno())}")


def _open_device(namespace: str, address: str) -> int:
    """The other end of a namespace's way out."""
    with open("/proc/self/ns/net") as here, open(FOLDER / namespace) as there:
        _enter(there.fileno())
        try:
            end = os.open(TUN, os.O_RDWR | os.O_NONBLOCK)
            request = struct.pack("16sH22x", DEVICE.encode(), IS_TUN | NO_PACKET_INFO)
            fcntl.ioctl(end, SET_INTERFACE, request)
        except OSError as problem:
            raise NotPermitted(f"{TUN}: {problem.strerror}") from None
        finally:
            _enter(here.fileno())
    _ip("-n", namespace, "addr", "add", f"{address}/24", "dev", DEVICE)
    _ip("-n", namespace, "link", "set", DEVICE, "up")
    return end


@dataclass(frozen=True)
class LinkConfig:
    """Delay, bandwidth and loss of an emulated link."""

    delay: float
    """Seconds one way."""
    mbit_s: float | None = None
    """10^6 bits of IP packets per second; no limit unless given."""
    loss: float = 0.0
    """The share of packets that is dropped."""


class PacketForwarder:
    """Passes packets between the devices until it is told to stop."""

    def __init__(
        self, hosts: Mapping[str, str], usual: LinkConfig, between: Mapping[tuple[str, str], LinkConfig], seed: int
    ):
        """hosts: addresses by namespace; between: pairs of addresses whose line is not the usual
        one, either way."""
        self.random, self.usual = random.Random(seed), usual
        packed = {tuple(map(socket.inet_aton, pair)): line for pair, line in between.items()}
        self.lines = packed | {(to, source): line for (source, to), line in packed.items()}
        self.ends = {socket.inet_aton(address): _open_device(name, address) for name, address in hosts.items()}
        self.free: dict[tuple[bytes, bytes], float] = {}
        """By the hosts of a packet: since when, or from when on, the line between them is idle."""
        self.on_their_way: list[tuple[float, int, float, int, bytes]] = []
        self._order = itertools.count()
        self.counts: Counter[str] = Counter(passed=0, dropped=0, overflowed=0, bytes=0)
        self.least_delay, self.latest = float("inf"), 0.0
        self.going, self.asked = True, False

    def run(self) -> dict[str, Any]:
        while self.going:
            due = self.on_their_way[0][0] - time.monotonic() if self.on_their_way else 0.2
            ready, _, _ = select.select(list(self.ends.values()), [], [], max(due, 0.0))
            for end in ready:
                self.take_all(end)
            while self.on_their_way and self.on_their_way[0][0] <= time.monotonic():
                self.give(*heapq.heappop(self.on_their_way))
            if self.asked:
                self.asked = False
                print(json.dumps(self.told()), flush=True)
        return self.told()

    def told(self) -> dict[str, Any]:
        least = None if self.least_delay == float("inf") else self.least_delay
        return {**self.counts, "least_delay": least, "latest": self.latest}

    def take_all(self, end: int) -> None:
        """What waits at a device; not more at once than keeps the others from waiting."""
        with contextlib.suppress(BlockingIOError):
            for _ in range(AT_ONCE):
                self.take(os.read(end, LARGEST))

    def take(self, packet: bytes) -> None:
        source, to = packet[12:16], packet[16:20]
        if packet[0] >> 4 != 4 or to not in self.ends:
            return  # what the kernel says to all neighbours
        line, now = self.lines.get((source, to), self.usual), time.monotonic()
        leaves = now
        if line.mbit_s is not None:
            begins = max(now, self.free.get((source, to), now))
            if begins - now > LONGEST_QUEUE:
                self.counts["overflowed"] += 1
                return
            leaves = self.free[source, to] = begins + len(packet) * 8 / (line.mbit_s * 1e6)
        if self.random.random() < line.loss:
            self.counts["dropped"] += 1
        else:
            due = leaves + line.delay
            heapq.heappush(self.on_their_way, (due, next(self._order), now, self.ends[to], packet))

    def give(self, due: float, order: int, taken: float, to: int, packet: bytes) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(to, packet)
        self.counts["passed"] += 1
        self.counts["bytes"] += len(packet)
        now = time.monotonic()
        self.least_delay, self.latest = min(self.least_delay, now - taken), max(self.latest, now - due)


class EmulatedNetwork:
    """Namespaces and the link between them, for the length of a block."""

    def __init__(
        self,
        names: Sequence[str],
        usual: LinkConfig,
        between: Mapping[tuple[str, str], LinkConfig] | None = None,
        seed: int = 0,
    ):
        """between: pairs of hosts whose line is not the usual one, either way."""
        self.addresses = {name: f"10.77.0.{number}" for number, name in enumerate(names, 1)}
        self._namespaces = {name: f"strata{os.getpid()}-{number}" for number, name in enumerate(names, 1)}
        self._settings = {
            "hosts": {self._namespaces[name]: address for name, address in self.addresses.items()},
            "usual": asdict(usual),
            "between": [[*map(self.addresses.__getitem__, pair), asdict(o)] for pair, o in (between or {}).items()],
            "seed": seed,
        }
        self._link: subprocess.Popen[str] | None = None

    def __enter__(self) -> EmulatedNetwork:
        for needed, there in (("ip", shutil.which("ip")), (TUN, os.path.exists(TUN))):
            if not there:
                raise NotPermitted(f"there is no {needed}")
        try:
            for namespace in self._namespaces.values():
                _ip("netns", "add", namespace)
                _ip("-n", namespace, "link", "set", "lo", "up")
            command = [sys.executable, "-P", __file__, json.dumps(self._settings)]
            self._link = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            assert self._link.stdout is not None
            said = self._link.stdout.readline().strip()
            if said != "ready":
                raise NotPermitted(said or "the link ended at once")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *problem: object) -> None:
        if self._link is not None and self._link.poll() is None:
            self.cut()
        for namespace in self._namespaces.values():
            if (FOLDER / namespace).exists():
                _ip("netns", "del", namespace)

    def cut(self) -> dict[str, Any]:
        """End the link; what went over it."""
        assert self._link is not None and self._link.stdout is not None
        self._link.terminate()
        said = self._link.stdout.read()
        self._link.wait()
        self._link.stdout.close()
        return json.loads(said) if said else {}

    def counts(self) -> dict[str, Any]:
        """What went over it so far."""
        assert self._link is not None and self._link.stdout is not None
        self._link.send_signal(signal.SIGUSR1)
        told: dict[str, Any] = json.loads(self._link.stdout.readline())
        return told

    def on(self, name: str, command: Sequence[str]) -> list[str]:
        """A command as it is run on a host."""
        return ["ip", "netns", "exec", self._namespaces[name], *command]

    def retransmitted(self, name: str) -> int:
        """TCP segments that a host had to send again, by its kernel's own count."""
        said = subprocess.run(self.on(name, ["cat", "/proc/net/snmp"]), capture_output=True, text=True, check=True)
        names, values = (line.split() for line in said.stdout.splitlines() if line.startswith("Tcp:"))
        return int(values[names.index("RetransSegs")])


def main() -> None:
    settings = json.loads(sys.argv[1])
    between = {(one, other): LinkConfig(**line) for one, other, line in settings["between"]}
    try:
        link = PacketForwarder(settings["hosts"], LinkConfig(**settings["usual"]), between, settings["seed"])
    except NotPermitted as problem:
        print(problem, flush=True)
        sys.exit(1)
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, URGENT)  # what it is late by would count as the link's

    def stop(number: int, frame: object) -> None:
        link.going = False

    def tell(number: int, frame: object) -> None:
        link.asked = True

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGUSR1, tell)
    print("ready", flush=True)
    print(json.dumps(link.run()), flush=True)


if __name__ == "__main__":
    main()
