"""Emulation of several hosts on one machine, with slow links between them that may lose packets.

Each host is a network namespace with a TUN device. Another process holds the other ends of the
devices: it forwards every IP packet after a delay, at the bandwidth of the link between the two
hosts, or drops it. So TCP behaves as on such a link, with retransmissions, and without the kernel's
own emulation (netem), which not every kernel has.

    python network_emulator.py SETTINGS

SETTINGS is JSON, see `EmulatedNetwork`. This needs root. On SIGUSR1, and on SIGTERM before it ends,
the process writes its counters to stdout.
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
"""Longest queue of a link, in seconds of sending; packets beyond it are dropped."""


class NotPermitted(Exception):
    """Reason why this machine does not permit the emulation."""


def _ip(*arguments: str) -> None:
    ran = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if ran.returncode:
        raise NotPermitted(f"ip {' '.join(arguments)}: {ran.stderr.strip()}")


def _enter(namespace: int) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    if library.setns(namespace, NEW_NET):
        raise NotPermitted(f"setns: {os.strerror(ctypes.get_errno())}")


def _open_device(namespace: str, address: str) -> int:
    """Create the TUN device of a namespace, and return its other end."""
    with open("/proc/self/ns/net") as own_namespace, open(FOLDER / namespace) as other_namespace:
        _enter(other_namespace.fileno())
        try:
            end = os.open(TUN, os.O_RDWR | os.O_NONBLOCK)
            request = struct.pack("16sH22x", DEVICE.encode(), IS_TUN | NO_PACKET_INFO)
            fcntl.ioctl(end, SET_INTERFACE, request)
        except OSError as problem:
            raise NotPermitted(f"{TUN}: {problem.strerror}") from None
        finally:
            _enter(own_namespace.fileno())
    _ip("-n", namespace, "addr", "add", f"{address}/24", "dev", DEVICE)
    _ip("-n", namespace, "link", "set", DEVICE, "up")
    return end


@dataclass(frozen=True)
class LinkConfig:
    """Delay, bandwidth and loss of an emulated link."""

    delay: float
    """Seconds one way."""
    mbit_s: float | None = None
    """10^6 bits of IP packets per second; None for no limit."""
    loss: float = 0.0
    """Share of packets that are dropped."""


class PacketForwarder:
    """Forwards packets between the devices until `going` is False."""

    def __init__(
        self, hosts: Mapping[str, str], usual: LinkConfig, between: Mapping[tuple[str, str], LinkConfig], seed: int
    ):
        """Open the devices.

        hosts: addresses by namespace. usual: link between two hosts. between: links of pairs of
        addresses that have another one, in both directions.
        """
        self.random, self.usual = random.Random(seed), usual
        packed = {tuple(map(socket.inet_aton, pair)): link for pair, link in between.items()}
        self.links = packed | {(to, source): link for (source, to), link in packed.items()}
        self.ends = {socket.inet_aton(address): _open_device(name, address) for name, address in hosts.items()}
        self.free: dict[tuple[bytes, bytes], float] = {}
        """Time from which the link is idle, by source and destination."""
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
                print(json.dumps(self.summary()), flush=True)
        return self.summary()

    def summary(self) -> dict[str, Any]:
        least = None if self.least_delay == float("inf") else self.least_delay
        return {**self.counts, "least_delay": least, "latest": self.latest}

    def take_all(self, end: int) -> None:
        """Read the packets waiting at a device, at most `AT_ONCE`, so that others need not wait."""
        with contextlib.suppress(BlockingIOError):
            for _ in range(AT_ONCE):
                self.take(os.read(end, LARGEST))

    def take(self, packet: bytes) -> None:
        source, to = packet[12:16], packet[16:20]
        if packet[0] >> 4 != 4 or to not in self.ends:
            return  # the kernel's multicast to all neighbours
        link, arrival = self.links.get((source, to), self.usual), time.monotonic()
        leaves = arrival
        if link.mbit_s is not None:
            begins = max(arrival, self.free.get((source, to), arrival))
            if begins - arrival > LONGEST_QUEUE:
                self.counts["overflowed"] += 1
                return
            leaves = self.free[source, to] = begins + len(packet) * 8 / (link.mbit_s * 1e6)
        if self.random.random() < link.loss:
            self.counts["dropped"] += 1
        else:
            due = leaves + link.delay
            heapq.heappush(self.on_their_way, (due, next(self._order), arrival, self.ends[to], packet))

    def give(self, due: float, order: int, arrival: float, to: int, packet: bytes) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(to, packet)
        self.counts["passed"] += 1
        self.counts["bytes"] += len(packet)
        now = time.monotonic()
        self.least_delay, self.latest = min(self.least_delay, now - arrival), max(self.latest, now - due)


class EmulatedNetwork:
    """Context manager for namespaces and the links between them."""

    def __init__(
        self,
        names: Sequence[str],
        usual: LinkConfig,
        between: Mapping[tuple[str, str], LinkConfig] | None = None,
        seed: int = 0,
    ):
        """Prepare hosts of these names.

        usual: link between two hosts. between: links of pairs of hosts that have another one, in
        both directions.
        """
        self.addresses = {name: f"10.77.0.{number}" for number, name in enumerate(names, 1)}
        self._namespaces = {name: f"strata{os.getpid()}-{number}" for number, name in enumerate(names, 1)}
        self._settings = {
            "hosts": {self._namespaces[name]: address for name, address in self.addresses.items()},
            "usual": asdict(usual),
            "between": [
                [*map(self.addresses.__getitem__, pair), asdict(link)] for pair, link in (between or {}).items()
            ],
            "seed": seed,
        }
        self._link: subprocess.Popen[str] | None = None

    def __enter__(self) -> EmulatedNetwork:
        for name, exists in (("ip", shutil.which("ip")), (TUN, os.path.exists(TUN))):
            if not exists:
                raise NotPermitted(f"there is no {name}")
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
        """Stop forwarding, and return the counters."""
        assert self._link is not None and self._link.stdout is not None
        self._link.terminate()
        said = self._link.stdout.read()
        self._link.wait()
        self._link.stdout.close()
        return json.loads(said) if said else {}

    def counts(self) -> dict[str, Any]:
        """Counters so far."""
        assert self._link is not None and self._link.stdout is not None
        self._link.send_signal(signal.SIGUSR1)
        counts: dict[str, Any] = json.loads(self._link.stdout.readline())
        return counts

    def on(self, name: str, command: Sequence[str]) -> list[str]:
        """Command line that runs a command on a host."""
        return ["ip", "netns", "exec", self._namespaces[name], *command]

    def retransmitted(self, name: str) -> int:
        """TCP segments that a host has sent again, counted by its kernel."""
        said = subprocess.run(self.on(name, ["cat", "/proc/net/snmp"]), capture_output=True, text=True, check=True)
        names, values = (line.split() for line in said.stdout.splitlines() if line.startswith("Tcp:"))
        return int(values[names.index("RetransSegs")])


def main() -> None:
    settings = json.loads(sys.argv[1])
    between = {(one, other): LinkConfig(**link) for one, other, link in settings["between"]}
    try:
        link = PacketForwarder(settings["hosts"], LinkConfig(**settings["usual"]), between, settings["seed"])
    except NotPermitted as problem:
        print(problem, flush=True)
        sys.exit(1)
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, URGENT)  # a late packet would count as the link's delay

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
