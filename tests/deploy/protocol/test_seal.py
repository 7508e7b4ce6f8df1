"""What a site takes for a message of its parent, or a parent for one of its child."""

from __future__ import annotations

from pathlib import Path

import pytest

from stratafl import InvalidInput
from stratafl.deploy.protocol import seal
from stratafl.deploy.protocol.messages import Bundle
from stratafl.deploy.protocol.wire import encode
from stratafl.deploy.sites.assemble import Assembled
from tests.deploy.trees import Deployed, Written, simulation

KEY, OTHER = seal.new_key(), seal.new_key()


def test_what_was_sealed_opens() -> None:
    request = seal.WORK.seal_request(KEY, b"request")
    assert seal.WORK.open_request(KEY, request) == b"request"
    assert seal.WORK.open_reply(KEY, request, seal.WORK.seal_reply(KEY, request, b"reply")) == b"reply"


@pytest.mark.parametrize("place", [0, 3, -1, -seal.SEAL])
def test_an_altered_message_is_refused(place: int) -> None:
    altered = bytearray(seal.WORK.seal_request(KEY, b"request"))
    altered[place] ^= 1
    with pytest.raises(InvalidInput, match="altered or forged"):
        seal.WORK.open_request(KEY, bytes(altered))


def test_another_site_s_message_is_refused() -> None:
    with pytest.raises(InvalidInput, match="seal"):
        seal.WORK.open_request(OTHER, seal.WORK.seal_request(KEY, b"request"))
    with pytest.raises(InvalidInput, match="seal"):
        seal.WORK.open_request(KEY, b"")


def test_a_reply_fits_only_its_request() -> None:
    first, second = (seal.WORK.seal_request(KEY, data) for data in (b"first", b"second"))
    replayed = seal.WORK.seal_reply(KEY, first, b"reply")
    with pytest.raises(InvalidInput, match="seal"):
        seal.WORK.open_reply(KEY, second, replayed)
    # nor is a request a reply, although both ends have the same key
    with pytest.raises(InvalidInput, match="seal"):
        seal.WORK.open_reply(KEY, first, first)


def test_a_replayed_request_of_an_earlier_round_changes_nothing(tmp_path: Path) -> None:
    deployed = Deployed(simulation("mtgc", 1))
    leaf, sent = deployed.nodes["0"], []
    handle = leaf.handle
    leaf.handle = lambda bundle: sent.append(bundle) or handle(bundle)
    deployed.run()
    leaf.handle = handle
    (tmp_path / "up.key").write_bytes(KEY)
    here = Assembled(tmp_path, None, None, deployed.job, Written(), None)  # type: ignore[arg-type]
    sealed = here.sealed(leaf, lambda: None)
    before = encode(deployed.kept["0"])
    rounds = [bundle for bundle in sent if bundle.begin is not None]
    with pytest.raises(InvalidInput, match="over"):
        sealed(seal.WORK.seal_request(KEY, encode(rounds[0])))
    with pytest.raises(InvalidInput, match="seal"):
        sealed(encode(rounds[-1]))
    assert encode(deployed.kept["0"]) == before
    request = seal.WORK.seal_request(KEY, encode(rounds[-1]))
    assert sealed(request) == sealed(request)
    assert encode(deployed.kept["0"]) == before
    with pytest.raises(InvalidInput, match="site"):
        sealed(seal.WORK.seal_request(KEY, encode(Bundle("test", "1"))))
