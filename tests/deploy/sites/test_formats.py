"""What other versions of stratafl have stored: it is read by a rule, or refused by name."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from safetensors.torch import load, save

from stratafl import InvalidInput
from stratafl.base import files
from stratafl.deploy.host import newsroom
from stratafl.deploy.news.entries import Entry
from stratafl.deploy.protocol import wire
from stratafl.deploy.protocol.messages import Reply
from stratafl.deploy.protocol.node import NodeState
from stratafl.deploy.sites.provision import DeploymentTopology, check_made_from
from stratafl.deploy.sites.site import TOPOLOGY, Site
from stratafl.deploy.sites.state_file import DIGEST, STATE, Damaged, Durable, stored
from tests.deploy.sites.one_process import OneProcess

pytestmark = pytest.mark.usefixtures("in_a_task")


def test_a_run_that_the_first_version_began_ends_where_the_simulation_does(tmp_path: Path) -> None:
    tree = OneProcess.begun(tmp_path)
    check_made_from(tree.folders["root"], DeploymentTopology.load(tmp_path / "topology.toml"))
    before = tree.rounds
    tree.run()
    assert [line["round"] for line in before] == [1, 2]
    assert [line["round"] for line in tree.rounds] == [1, 2, 3, 4] and tree.rounds[:2] == before
    assert all(line["refused"] == line["absent"] == [] for line in tree.rounds)
    assert tree.difference() < 1e-6


def changed(path: Path, **fields: Any) -> None:
    """Write a table with other fields: those that are None are left out."""
    table = {**files.read_json(path), **fields}
    files.write_json(path, {name: value for name, value in table.items() if value is not None})


def test_a_site_of_another_version_is_read(tmp_path: Path) -> None:
    folder = OneProcess(tmp_path).folders["1"]
    site = Site.load(folder)
    assert files.read_json(folder / "site.json")["format"] == 1
    changed(folder / "site.json", format=None, frozen=None, zone="eu")
    assert Site.load(folder) == site
    changed(folder / "site.json", job=None, parent=None)
    with pytest.raises(InvalidInput, match=r"must have job, parent$"):
        Site.load(folder)


@pytest.mark.parametrize("number", [2, "1", True])
def test_a_site_of_another_format_is_refused(tmp_path: Path, number: object) -> None:
    folder = OneProcess(tmp_path).folders["1"]
    changed(folder / "site.json", format=number)
    with pytest.raises(InvalidInput, match=f"format {number!r}, and this version of stratafl reads 1"):
        Site.load(folder)


def with_state(folder: Path, fields: dict[str, Any]) -> Path:
    """A folder with a state in which these fields are others."""
    durable = Durable(folder, "run")
    durable.write(NodeState(line="{}"))
    durable.close()
    head, _, data = (folder / STATE).read_bytes()[:-DIGEST].partition(b"\n")
    plain = json.loads(json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]["message"])
    body = head + b"\n" + save(load(data), metadata={"message": json.dumps({**plain, **fields})})
    (folder / STATE).write_bytes(body + hashlib.sha256(body).digest())
    return folder


def test_a_state_of_another_version_is_read(tmp_path: Path) -> None:
    folder = with_state(tmp_path / "state", {"hint": [1], "more": {"deep": None}})
    assert stored(folder, "run") == NodeState(line="{}")


def test_a_state_of_another_format_is_refused_and_not_to_be_set_aside(tmp_path: Path) -> None:
    folder = with_state(tmp_path / "state", {"_format": 2})
    with pytest.raises(InvalidInput, match="format = 2: must be 1 for this version") as problem:
        stored(folder, "run")
    assert not isinstance(problem.value, Damaged) and str(folder / STATE) in str(problem.value)


def test_messages_go_by_their_protocol_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A version that stores states in another form speaks with those that do not."""
    with monkeypatch.context() as patch:
        patch.setattr(wire, "FORMAT", wire.FORMAT + 1)
        reply, state = wire.encode(Reply("job", "1", 3)), wire.encode(NodeState())
    assert wire.decode(reply, Reply) == Reply("job", "1", 3)
    with pytest.raises(wire.OtherFormat):
        wire.decode(state, NodeState)


def test_a_topology_of_another_version_is_gone_on_with(tmp_path: Path) -> None:
    tree = OneProcess(tmp_path)
    planned, root = DeploymentTopology.load(tmp_path / "topology.toml"), tree.folders["root"]
    assert files.read_json(root / TOPOLOGY)["format"] == 1
    config = files.read_json(root / TOPOLOGY)["config"]
    del config["samples"], config["config"]["aggregation"]["update_factor"]
    config |= {"regions": ["eu"]}
    config["config"]["client"]["novel"] = 3
    config["config"]["novel"] = {"a": 1}
    changed(root / TOPOLOGY, format=None, config=config)
    check_made_from(root, planned)
    config["config"]["client"]["lr"] = 0.2
    config["config"]["model"]["params"]["bias"] = True
    changed(root / TOPOLOGY, config=config)
    with pytest.raises(
        InvalidInput, match=r"client.lr was 0.2 and is 0.3; config.model.params.bias was true and is null"
    ):
        check_made_from(root, planned)
    changed(root / TOPOLOGY, format=2)
    with pytest.raises(InvalidInput, match="format 2"):
        check_made_from(root, planned)


def test_rounds_that_a_later_version_recorded_are_kept(tmp_path: Path) -> None:
    """In the record, and in the root's state, which has the last one."""
    tree = OneProcess.begun(tmp_path)
    root = tree.folders["root"]
    before = tree.rounds
    (root / "rounds.jsonl").write_text("".join(json.dumps({**line, "novel": 1}) + "\n" for line in before))
    durable = Durable(root / "state", Site.load(root).job)
    kept = durable.read()
    assert kept is not None
    kept.line = json.dumps({**json.loads(kept.line), "novel": 1})
    durable.write(kept)
    durable.close()
    tree.run()
    assert [line["round"] for line in tree.rounds] == [1, 2, 3, 4]
    assert [line["metrics"] for line in tree.rounds[:2]] == [line["metrics"] for line in before]


def test_news_of_another_format_are_none(tmp_path: Path) -> None:
    table = {"at": 0.0, "sites": {"root": {**Entry(took_part=True).as_dict(), "novel": 1}}, "novel": 2}
    files.write_json(tmp_path / newsroom.NEWS, table)
    assert newsroom.read(tmp_path) == {"root": Entry(took_part=True)}
    changed(tmp_path / newsroom.NEWS, format=2)
    assert newsroom.read(tmp_path) == {}
