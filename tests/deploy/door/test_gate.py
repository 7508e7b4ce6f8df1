"""What strangers can do to a SuperLink and to a tree: open connections that are soon closed, and
nothing else."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from cryptography.hazmat.primitives.asymmetric import ec
from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE

from stratafl.deploy.sites.site import Site
from tests.deploy.door.strangers import LIMIT, Child, SuperLink, connected, head, poured, provisioned, trusting

pytestmark = pytest.mark.deploy
CHILDREN = 31
STOPPED = 7
"""Seconds, after which a connection that nobody used is closed."""
ROOM = 64 << 20
"""Bytes that a SuperLink may grow by, whatever strangers send: connections, and the garbage of many
short ones."""


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    while Child.made:
        Child.made.pop().connection.close()


@pytest.fixture(scope="module")
def link(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SuperLink]:
    with SuperLink(provisioned(tmp_path_factory.mktemp("gate"), str(CHILDREN), 15000)) as started:
        yield started


def wrong_key(link: SuperLink) -> list[str]:
    """Headers as a child would send them, with somebody else's key."""
    stranger = Child(link.root, link.port, key=ec.generate_private_key(ec.SECP384R1()))
    return [f"{name}: {value}" for name, value in stranger.headers().items()]


def stolen_name(link: SuperLink) -> list[str]:
    """A child's own key, and somebody else's signature."""
    own = Child(link.root, link.port)
    return [f"{name}: {value}" for name, value in {**own.headers(), "flwr-signature": "bm8="}.items()]


def old(link: SuperLink) -> list[str]:
    return [f"{name}: {value}" for name, value in Child(link.root, link.port).headers(-3600).items()]


def nobody(link: SuperLink) -> list[str]:
    return [f"content-type: {PROTOBUF_MEDIA_TYPE}"]


def guessed(link: SuperLink) -> list[str]:
    return [*nobody(link), "flwr-task-token: guessed"]


@pytest.mark.parametrize(
    ("door", "who", "how", "times"),
    [
        ("fleet", nobody, "announced", 3),
        ("fleet", nobody, "chunked", 3),
        ("fleet", nobody, "fitting", 200),
        ("fleet", wrong_key, "announced", 3),
        ("fleet", wrong_key, "chunked", 3),
        ("fleet", wrong_key, "fitting", 200),
        ("fleet", stolen_name, "fitting", 20),
        ("fleet", old, "fitting", 20),
        ("runtime", nobody, "chunked", 3),
        ("runtime", guessed, "fitting", 20),
    ],
)
def test_nothing_of_a_stranger_s_body_is_read(
    link: SuperLink, door: str, who: Callable[[SuperLink], list[str]], how: str, times: int
) -> None:
    """Fitting: of the size of this run's messages."""
    size = link.site.largest if how == "fitting" else 300 << 20
    length = "transfer-encoding: chunked" if how == "chunked" else f"content-length: {size}"
    port = link.port if door == "fleet" else link.site.runtime_port
    first = head(f"/v1/{door}/push-object", length, *who(link))
    with link.watched() as grown, ThreadPoolExecutor(16) as threads:
        said = list(threads.map(lambda _: poured(link, port, first, size, how == "chunked"), range(times)))
    assert grown[0] < ROOM, f"{grown[0] >> 20} MB"
    assert {each[:12] for each in said} <= {b"", b"HTTP/1.1 401"}


def test_a_refusal_is_answered_with_the_parent_s_time(link: SuperLink) -> None:
    """So that a child can tell that its clock is wrong, and by how much."""
    child = Child(link.root, link.port)
    child.connection.request("POST", "/v1/fleet/pull-messages", b"", child.headers(-7200))
    with child.connection.getresponse() as response:
        assert response.status == 401 and response.getheader("date")
    assert "a request of 0 signed 7200 s ago: clocks differ" in link.log.read_text()


@pytest.mark.parametrize("path", ["/v1/fleet/../control/start-run", "/v1/fleet%2f..%2fcontrol/start-run"])
def test_a_child_reaches_no_other_interface(link: SuperLink, path: str) -> None:
    assert Child(link.root, link.port).ask(path, b"")[0] in (403, 404)


def test_many_children_at_one_address_are_never_refused(link: SuperLink) -> None:
    """All come at once, look as often as they can, and come again on new connections."""
    children = [Child(link.root, link.port, str(number)) for number in range(CHILDREN - 1)]

    def live(child: Child) -> Counter[int]:
        child.activate()
        seen: Counter[int] = Counter()
        until = time.monotonic() + 6
        while time.monotonic() < until:
            seen[child.look()] += 1
            if seen.total() % 5 == 0:
                child.connection.close()
                child.connect()
            time.sleep(0.02)
        return seen

    with ThreadPoolExecutor(CHILDREN) as threads:
        seen = list(threads.map(live, children))
    assert all(set(each) == {200} for each in seen), seen
    assert min(each.total() for each in seen) > 5


def test_a_flood_of_requests_leaves_a_child_its_turn(link: SuperLink) -> None:
    child, over = Child(link.root, link.port, str(CHILDREN - 1)), threading.Event()
    child.activate()
    tried: Counter[str] = Counter()

    def flood(number: int) -> None:
        while not over.is_set():
            try:
                with link.tls(timeout=2.0) as stream:
                    stream.sendall(head("/v1/fleet/pull-messages", "content-length: 0"))
                    tried[stream.recv(12).decode()] += 1
            except OSError:
                tried["closed"] += 1

    with ThreadPoolExecutor(6) as threads:
        flooding = [threads.submit(flood, number) for number in range(6)]
        slowest, until = 0.0, time.monotonic() + 6
        while time.monotonic() < until:
            began = time.monotonic()
            assert child.look() == 200
            slowest = max(slowest, time.monotonic() - began)
        over.set()
        for each in flooding:
            each.result()
    assert slowest < 3.0 and tried["HTTP/1.1 401"] and not tried["HTTP/1.1 200"], tried
    lines = [line for line in link.log.read_text().splitlines() if " WARNING refused " in line]
    assert 0 < len(lines) < 60 and "127.0.0.1" in lines[-1], "it is said, and not for each"


def ended_within(stream: socket.socket, seconds: float, feed: bytes = b"") -> float:
    """Seconds until the other side has ended a connection that gets a byte now and then."""
    began = time.monotonic()
    stream.settimeout(0.3)
    while time.monotonic() - began < seconds:
        try:
            if feed:
                stream.sendall(feed)
            if not stream.recv(1000):
                break
        except TimeoutError:
            continue
        except OSError:
            break
    return time.monotonic() - began


def test_what_takes_too_long_is_ended(tmp_path: Path) -> None:
    settings = "STRANGER=2", "HEAD=2", "WINDOW=2", "LEAST=3072"
    with SuperLink(provisioned(tmp_path, "2", 8), *settings) as link:
        child = Child(link.root, link.port)
        child.activate()
        signed = [f"{name}: {value}" for name, value in child.headers().items()]
        plain = [connected(link.port) for _ in range(2)]
        plain[1].sendall(b"\x16\x03\x01")  # the first bytes of a handshake
        streams = [link.tls() for _ in range(4)]
        streams[1].sendall(b"POST /v1/fleet/pull-messages HTTP/1.1\r\nx: ")
        streams[2].sendall(head("/v1/fleet/push-object", "content-length: 5000", *signed))
        streams[3].sendall(head("/v1/fleet/pull-messages", "content-length: 0", *signed))
        time.sleep(0.5)
        streams[3].recv(1000)
        streams[3].sendall(b"POST /v1/fleet/pull-messages HTTP/1.1\r\nx: ")
        feeds = {plain[0]: b"", plain[1]: b"", streams[0]: b"", **dict.fromkeys(streams[1:], b"y")}
        with ThreadPoolExecutor(8) as threads:
            took = list(threads.map(lambda each: ended_within(each[0], 15, each[1]), feeds.items()))
        assert all(each < 10 for each in took), took
        assert child.look() == 200
        for stream in (*plain, *streams):
            stream.close()


def test_long_headers_are_refused(link: SuperLink) -> None:
    with link.watched() as grown, link.tls(timeout=5.0) as stream:
        with contextlib.suppress(OSError):
            stream.sendall(b"POST /v1/fleet/pull-messages HTTP/1.1\r\nx: ")
            for _ in range(1000):
                stream.sendall(bytes([120]) * (1 << 16))
        with contextlib.suppress(OSError):
            assert stream.recv(12) in (b"", b"HTTP/1.1 400")
    assert grown[0] < ROOM


def within(seconds: float, ask: Callable[[], int | None]) -> int | None:
    """The answer, asked for again on a new connection, as Flower's client does, but not for longer
    than this."""
    give_up = time.monotonic() + seconds
    while True:
        try:
            return ask()
        except OSError:
            Child.made[-1].connection.close()
            assert time.monotonic() < give_up


def opened(link: SuperLink, number: int, tls: bool) -> list[socket.socket]:
    held: list[socket.socket] = []
    for _ in range(number):
        with contextlib.suppress(OSError):
            held.append(connected(link.port, link.root if tls else None))
    return held


@pytest.mark.parametrize("tls", [False, True], ids=["tcp", "tls"])
def test_a_child_gets_in_where_idle_connections_would_take_all_descriptors(tmp_path: Path, tls: bool) -> None:
    """Which it cannot have more of than 1,024."""
    with SuperLink(provisioned(tmp_path, "2", 8), descriptors=1024) as link:
        child = Child(link.root, link.port)
        child.activate()
        with link.watched() as grown:
            held = opened(link, 1050, tls)
            # where the kernel's queue was full, a new connection is tried again after 1, 3 and 7 s
            assert within(20, child.look) == 200
            within(20, Child(link.root, link.port, "1").activate)
            descriptors = len(os.listdir(f"/proc/{link.process.pid}/fd"))
        for each in held:
            each.close()
        assert descriptors < 400 and grown[0] < ROOM, (descriptors, grown)


@contextlib.contextmanager
def descriptors(most: int) -> Iterator[int]:
    """As many for this process meanwhile; the limit that no process can go beyond."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < most:
        pytest.skip("this process may not open so many connections itself")
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    try:
        yield hard
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextlib.contextmanager
def crowd(root: Path) -> Iterator[threading.Event]:
    """Idle connections to the root's port, more and more of them; set when there are thousands."""
    crowded, over, held = threading.Event(), threading.Event(), list[socket.socket]()
    port = int(Site.load(root).public.rsplit(":", 1)[1])

    def gather() -> None:
        enough = time.monotonic() + 20
        for number in range(2100):
            if time.monotonic() < enough or number >= 1050:
                with contextlib.suppress(OSError):
                    held.append(connected(port, root if number < 1050 else None))
        crowded.set()
        while not over.wait(0.05):
            with contextlib.suppress(OSError):
                held.append(connected(port))

    crowding = threading.Thread(target=gather)
    crowding.start()
    try:
        yield crowded
    finally:
        over.set()
        crowding.join()
        for stream in held:
            stream.close()


def stop_for_a_while(site: Path) -> None:
    """Stop a site's SuperNode until it has lost its connections."""
    supervisor = int((site / "lock").read_text())
    *_, supernode = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
    os.kill(int(supernode), signal.SIGSTOP)
    time.sleep(STOPPED)
    os.kill(int(supernode), signal.SIGCONT)


def answer_of_the_inner_port(root: Path) -> int:
    """What the leaf's SuperNode says to strangers there."""
    inner = http.client.HTTPSConnection("127.0.0.1", Site.load(root.parent / "0").inner_port, context=trusting(root))
    inner.request("POST", "/v1/runtime/pull-task-input", iter([b"x"] * 9), {"content-type": PROTOBUF_MEDIA_TYPE})
    status = inner.getresponse().status
    inner.close()
    return status


def longest_pause(rounds: Callable[[], int], crowded: threading.Event, leaf: Path) -> float:
    """Seconds between two rounds at the most, until five are done after the leaf was stopped."""
    longest, last, done = 0.0, time.monotonic(), rounds()
    stopped_at: int | None = None
    while time.monotonic() - last < 25 and (stopped_at is None or done < stopped_at + 5):
        time.sleep(0.05)
        if rounds() > done:
            longest, last, done = max(longest, time.monotonic() - last), time.monotonic(), rounds()
        if crowded.is_set() and stopped_at is None:
            stop_for_a_while(leaf)
            stopped_at = done = rounds()
            last = time.monotonic()
    return max(longest, time.monotonic() - last)


def test_a_tree_goes_on_among_idle_connections(tmp_path: Path) -> None:
    """With a soft limit of 1,024 descriptors, from its leaf's own address; and the leaf, which has
    connections from before, is stopped until it has lost them, and has to come in again."""
    root = provisioned(tmp_path, "1", 8)
    record = root / "rounds.jsonl"

    def rounds() -> int:
        return len(record.read_text().splitlines()) if record.exists() else 0

    command = [sys.executable, "-m", "stratafl", "deploy", "up", str(tmp_path / "topology.toml"), "--local"]
    with descriptors(4096) as hard:
        running = subprocess.Popen(
            [*command, "--out", str(root.parent)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard)),
        )  # fmt: skip
        try:
            began = time.monotonic()
            while rounds() < 2:
                assert time.monotonic() - began < LIMIT and running.poll() is None
                time.sleep(0.1)
            answered = answer_of_the_inner_port(root)
            with crowd(root) as crowded:
                longest = longest_pause(rounds, crowded, root.parent / "0")
        finally:
            running.send_signal(signal.SIGINT)
            running.wait(LIMIT)
    assert longest < 10, longest
    assert answered == 401, "what a SuperNode says to strangers, on its inner port"
    told = [json.loads(line) for line in record.read_text().splitlines()]
    assert not any(each.get("absent") or each.get("refused") for each in told)
