"""Several hosts on one machine, joined by a slow link that loses packets.

Each host is a network namespace with a TUN device. A process of its own holds the other ends: it
passes every IP packet on after a delay, or drops it. So TCP meets what it would meet on such a
link, retransmissions and all, without the kernel's own emulation (netem), which not every kernel
has.

    python link.py DELAY LOSS SEED NAMESPACE=ADDRESS ...

It needs to be root; SIGTERM ends it with its counts on stdout.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
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
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TUN = "/dev/net/tun"
SET_INTERFACE, IS_TUN, NO_PACKET_INFO = 0x400454CA, 0x0001, 0x1000
NEW_NET = 0x40000000
DEVICE, LARGEST = "link0", 65535
FOLDER = Path("/run/netns")


class Refused(Exception):
    """This machine does not permit it, and why."""


def _ip(*arguments: str) -> None:
    ran = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if ran.returncode:
        raise Refused(f"ip {' '.join(arguments)}: {ran.stderr.strip()}")


def _enter(namespace: int) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    if library.setns(namespace, NEW_NET):
        raise Refused(f"setns: {os.strerror(ctypes.get_errno())}")


def _open_device(namespace: str, address: str) -> int:
    """The other end of a namespace's way out."""
    with open("/proc/self/ns/net") as here, open(FOLDER / namespace) as there:
        _enter(there.fileno())
        try:
            end = os.open(TUN, os.O_RDWR | os.O_NONBLOCK)
            request = struct.pack("16sH22x", DEVICE.encode(), IS_TUN | NO_PACKET_INFO)
            fcntl.ioctl(end, SET_INTERFACE, request)
        except OSError as problem:
            raise Refused(f"{TUN}: {problem.strerror}") from None
        finally:
            _enter(here.fileno())
    _ip("-n", namespace, "addr", "add", f"{address}/24", "dev", DEVICE)
    _ip("-n", namespace, "link", "set", DEVICE, "up")
    return end


class Link:
    """Passes packets between the devices until it is told to stop."""

    def __init__(self, delay: float, loss: float, seed: int, hosts: dict[str, str]):
        self.delay, self.loss, self.random = delay, loss, random.Random(seed)
        self.ends = {socket.inet_aton(address): _open_device(name, address) for name, address in hosts.items()}
        self.on_their_way: deque[tuple[float, int, bytes]] = deque()
        self.counts: dict[str, Any] = {"passed": 0, "dropped": 0, "bytes": 0, "least_delay": None}
        self.going = True

    def run(self) -> dict[str, Any]:
        while self.going:
            due = self.on_their_way[0][0] - time.monotonic() if self.on_their_way else 0.2
            ready, _, _ = select.select(list(self.ends.values()), [], [], max(due, 0.0))
            for end in ready:
                self.take(os.read(end, LARGEST))
            while self.on_their_way and self.on_their_way[0][0] <= time.monotonic():
                self.give(*self.on_their_way.popleft())
        return self.counts

    def take(self, packet: bytes) -> None:
        to = self.ends.get(packet[16:20])
        if packet[0] >> 4 != 4 or to is None:
            return  # what the kernel says to all neighbours
        if self.random.random() < self.loss:
            self.counts["dropped"] += 1
        else:
            self.on_their_way.append((time.monotonic() + self.delay, to, packet))

    def give(self, due: float, to: int, packet: bytes) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(to, packet)
        self.counts["passed"] += 1
        self.counts["bytes"] += len(packet)
        took = time.monotonic() - due + self.delay
        least = self.counts["least_delay"]
        self.counts["least_delay"] = took if least is None else min(took, least)


class Hosts:
    """Namespaces and the link between them, for the length of a block."""

    def __init__(self, names: Sequence[str], *, delay: float, loss: float, seed: int):
        self.addresses = {name: f"10.77.0.{number}" for number, name in enumerate(names, 1)}
        self._namespaces = {name: f"strata{os.getpid()}-{number}" for number, name in enumerate(names, 1)}
        self._settings = [str(delay), str(loss), str(seed)]
        self._link: subprocess.Popen[str] | None = None

    def __enter__(self) -> Hosts:
        for needed, there in (("ip", shutil.which("ip")), (TUN, os.path.exists(TUN))):
            if not there:
                raise Refused(f"there is no {needed}")
        try:
            for namespace in self._namespaces.values():
                _ip("netns", "add", namespace)
                _ip("-n", namespace, "link", "set", "lo", "up")
            joined = [f"{self._namespaces[name]}={address}" for name, address in self.addresses.items()]
            command = [sys.executable, "-P", __file__, *self._settings, *joined]
            self._link = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            assert self._link.stdout is not None
            said = self._link.stdout.readline().strip()
            if said != "ready":
                raise Refused(said or "the link ended at once")
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

    def on(self, name: str, command: Sequence[str]) -> list[str]:
        """A command as it is run on a host."""
        return ["ip", "netns", "exec", self._namespaces[name], *command]

    def retransmitted(self, name: str) -> int:
        """TCP segments that a host had to send again, by its kernel's own count."""
        said = subprocess.run(self.on(name, ["cat", "/proc/net/snmp"]), capture_output=True, text=True, check=True)
        names, values = (line.split() for line in said.stdout.splitlines() if line.startswith("Tcp:"))
        return int(values[names.index("RetransSegs")])


def main() -> None:
    delay, loss, seed, *hosts = sys.argv[1:]
    try:
        link = Link(float(delay), float(loss), int(seed), dict(host.split("=") for host in hosts))
    except Refused as problem:
        print(problem, flush=True)
        sys.exit(1)

    def stop(number: int, frame: object) -> None:
        link.going = False

    signal.signal(signal.SIGTERM, stop)
    print("ready", flush=True)
    print(json.dumps(link.run()), flush=True)


if __name__ == "__main__":
    main()
