"""How callers are counted, what is said of them, and who is let in, without a connection."""

from __future__ import annotations

import asyncio
import datetime
from base64 import b64encode
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr")

from cryptography.hazmat.primitives.asymmetric import ec
from flwr.proto.runtime_pb2 import AcquireTaskRequest
from flwr.supercore.auth import create_superexec_auth_metadata, derive_auth_secret
from flwr.supercore.primitives.asymmetric import public_key_to_bytes, sign_message

from stratafl.deploy.door import places
from stratafl.deploy.door.callers import ACQUIRE, METHOD, OWN, Children, OwnProcesses, Unknown
from stratafl.deploy.door.doors import AT_ONCE, ENVELOPE, FLEET, LARGEST_HEAD, RESERVE, RUNTIME, Doors
from stratafl.deploy.door.gate import Limits
from stratafl.deploy.door.places import Allowance, Refusals, place_of


@pytest.mark.parametrize(
    ("host", "place"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2:ffff::1", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("", "somewhere unknown"),
    ],
)
def test_an_address_counts_as_its_network(host: str, place: str) -> None:
    assert place_of(host) == place


def test_an_allowance_is_used_up_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    allowance = Allowance(2.0, 5, lambda: clock[0])
    assert [allowance.take("a") for _ in range(7)] == [True] * 5 + [False] * 2
    assert allowance.take("b"), "another's is its own"
    clock[0] = 1.0
    assert [allowance.take("a") for _ in range(3)] == [True, True, False]
    monkeypatch.setattr(places, "MOST", 10)
    for number in range(1000):
        allowance.take(number)
    assert len(allowance) == 10


def test_refusals_are_said_and_not_in_a_flood(capsys: pytest.CaptureFixture[str]) -> None:
    clock = [0.0]
    refusals = Refusals(lambda: clock[0])
    for _ in range(1000):
        refusals.add("192.0.2.7", "no key")
    for number in range(1000):
        refusals.add(f"192.0.2.{number}", "no \x1b[31mkey")
    refusals.tell()
    said = capsys.readouterr().err.splitlines()
    assert said[0].endswith("WARNING refused 192.0.2.7: no key") and len(said) <= places.LINES
    clock[0] += places.EVERY
    refusals.tell()
    (total,) = capsys.readouterr().err.splitlines()
    assert "192.0.2.7, 999 times: no key" in total and total.isprintable()
    clock[0] += places.EVERY
    refusals.tell()
    assert capsys.readouterr().err == "", "there was nothing new"


@pytest.mark.parametrize("descriptors", [100, 900, 20_000])
@pytest.mark.parametrize("callers", [1, 2, 30, 100])
def test_places_are_fewer_than_descriptors_and_enough(callers: int, descriptors: int) -> None:
    limits = Limits.of(callers, descriptors)
    assert 0 < limits.at_a_place < limits.strangers
    assert limits.of_a_caller >= 4
    if descriptors >= 6 * callers:
        assert limits.strangers + callers * limits.of_a_caller <= descriptors
    if descriptors == 20_000:
        assert limits.at_a_place >= 64 + 4 * callers and limits.of_a_caller == 32


class Key:
    def __init__(self) -> None:
        self.key = ec.generate_private_key(ec.SECP384R1())
        self.public = public_key_to_bytes(self.key.public_key())
        self.name = b64encode(self.public).decode()

    def headers(self, ahead: float = 0.0) -> dict[str, str]:
        stamp = (datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=ahead)).isoformat()
        signature = b64encode(sign_message(self.key, stamp.encode())).decode()
        return {"flwr-public-key": self.name, "flwr-timestamp": stamp, "flwr-signature": signature}


PARIS, OTHER = Key(), Key()
CHILDREN = Children({PARIS.name: ("paris", PARIS.public)})
NAIVE = datetime.datetime.now().isoformat()


def test_a_child_is_known_by_its_signature() -> None:
    assert CHILDREN.name("", PARIS.headers(), None) == "paris"
    assert CHILDREN.name("", PARIS.headers(-200), None) == "paris"


@pytest.mark.parametrize(
    ("headers", "why"),
    [
        ({}, "no key"),
        (OTHER.headers(), "a key that is no child's"),
        ({**OTHER.headers(), "flwr-public-key": PARIS.name}, "without its signature"),
        ({**PARIS.headers(), "flwr-signature": "???"}, "without its signature"),
        ({**PARIS.headers(), "flwr-timestamp": "tomorrow"}, "without its signature"),
        ({**PARIS.headers(), "flwr-timestamp": "é"}, "without its signature"),
        ({**PARIS.headers(), "flwr-timestamp": NAIVE,
          "flwr-signature": b64encode(sign_message(PARIS.key, NAIVE.encode())).decode()}, "without its signature"),
        ({"flwr-public-key": PARIS.name}, "without its signature"),
    ],
)  # fmt: skip
def test_a_stranger_is_told_from_a_child(headers: dict[str, str], why: str) -> None:
    with pytest.raises(Unknown, match=why):
        CHILDREN.name("", headers, None)


@pytest.mark.parametrize(("ahead", "why"), [(60, "paris signed (60|59) s ahead"), (-3600, "paris signed 360. s ago")])
def test_a_child_whose_time_is_another_is_told_so(ahead: float, why: str) -> None:
    with pytest.raises(Unknown, match=f"{why}: clocks differ"):
        CHILDREN.name("", PARIS.headers(ahead), None)


def test_who_has_shown_a_key_need_not_sign_again_on_its_connection() -> None:
    assert CHILDREN.name("", {"flwr-public-key": PARIS.name}, "paris") == "paris"
    with pytest.raises(Unknown):
        CHILDREN.name("", {"flwr-public-key": PARIS.name}, "rome")


def test_a_site_s_own_process_is_known_by_its_secret_or_its_task() -> None:
    tokens = {"good": 1}
    own = OwnProcesses(b"secret", lambda: SimpleNamespace(get_task_by_token=tokens.get))

    def signed(secret: bytes) -> dict[str, str]:
        derived = derive_auth_secret(secret)
        return create_superexec_auth_metadata(auth_secret=derived, method=METHOD, request=AcquireTaskRequest())

    assert own.name(ACQUIRE, signed(b"secret"), None) == OWN
    assert own.name(f"{RUNTIME}push-object", {"flwr-task-token": "good"}, None) == OWN
    tokens.clear()
    assert own.name(f"{RUNTIME}push-object", {"flwr-task-token": "good"}, None) == OWN, "Flower asks again itself"
    for path, headers in (
        (ACQUIRE, signed(b"guessed")),
        (ACQUIRE, {}),
        (ACQUIRE, {**signed(b"secret"), "flwr-superexec-ts": "9" * 5000}),
        (ACQUIRE, {"flwr-task-token": "good"}),
        (f"{RUNTIME}push-object", signed(b"secret")),
        (f"{RUNTIME}push-object", {"flwr-task-token": "bad"}),
    ):
        with pytest.raises(Unknown):
            own.name(path, headers, OWN)


NEWS = "/v1/stratafl/news"


def scope(path: str, headers: dict[str, str], port: int = 1) -> dict[str, Any]:
    given = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    return {"type": "http", "method": "POST", "server": ("127.0.0.1", port), "path": path, "headers": given,
            "client": ("192.0.2.7", 5)}  # fmt: skip


def doors() -> Doors:
    own = OwnProcesses(b"secret", lambda: SimpleNamespace(get_task_by_token={}.get))
    return Doors(None, {1: FLEET, 2: RUNTIME}, 1000, {1: CHILDREN, 2: own}, {NEWS: 500})


@pytest.mark.parametrize(
    ("path", "headers", "port", "status"),
    [
        (NEWS, {"content-length": "500"}, 1, 0),
        (NEWS, {"content-length": "501"}, 1, 413),
        (NEWS, {"transfer-encoding": "chunked"}, 1, 413),
        (NEWS, {"content-length": "5"}, 2, 403),
        (NEWS + "/more", {"content-length": "5"}, 1, 403),
        (FLEET, {"content-length": "5"}, 1, 401),
        (FLEET, {**PARIS.headers(), "content-length": "5"}, 1, 0),
        (FLEET, {**PARIS.headers(), "content-length": str(1001 + ENVELOPE)}, 1, 413),
        (FLEET, {**PARIS.headers(), "transfer-encoding": "chunked"}, 1, 0),
        (FLEET, {**PARIS.headers(), "x": "y" * LARGEST_HEAD}, 1, 431),
        (RUNTIME, PARIS.headers(), 1, 403),
        (RUNTIME, PARIS.headers(), 2, 401),
        (FLEET, PARIS.headers(), 3, 403),
    ],
)
def test_a_request_is_judged_by_its_headers(path: str, headers: dict[str, str], port: int, status: int) -> None:
    assert doors().judge(scope(path, headers, port)).status == status


def test_a_caller_has_an_allowance_of_requests() -> None:
    door, asked = doors(), scope(FLEET, PARIS.headers())
    statuses = [door.judge(asked, "paris").status for _ in range(int(RESERVE) + 500)]
    assert statuses[: int(RESERVE)] == [0] * int(RESERVE) and 503 in statuses


def test_a_caller_s_messages_on_their_way_are_bounded() -> None:
    """So that nobody's are more in memory than those of the run, however many connections he
    has."""
    inside: list[int] = []
    door = doors()

    async def waits(scope: Any, receive: Any, send: Any) -> None:
        inside.append(1)
        await over.wait()

    async def main() -> list[int]:
        statuses: list[int] = []

        async def send(event: Any) -> None:
            statuses.extend([event["status"]] if "status" in event else [])

        full = {**PARIS.headers(), "content-length": str(1000 + ENVELOPE)}
        tasks = [asyncio.create_task(door(scope(FLEET, full), no_more, send)) for _ in range(10)]
        await asyncio.sleep(0.05)
        over.set()
        await asyncio.gather(*tasks)
        assert len(inside) == AT_ONCE
        await door(scope(FLEET, full), no_more, send)
        assert len(inside) == AT_ONCE + 1, "they are through, and there is room again"
        return statuses

    async def no_more() -> Any:
        return {"type": "http.disconnect"}

    over = asyncio.Event()
    door._inside = waits
    assert asyncio.run(main()) == [503] * (10 - AT_ONCE)
