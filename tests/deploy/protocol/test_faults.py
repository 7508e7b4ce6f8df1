"""Nodes that die, come back, are late or send nonsense."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from stratafl import InvalidInput
from stratafl.deploy.protocol.job import Patience
from stratafl.deploy.protocol.messages import PROTOCOL, Bundle, Reply
from stratafl.deploy.protocol.node import NodeState
from stratafl.deploy.protocol.wire import decode, encode
from stratafl.deploy.sites import state_file as durable_module
from stratafl.deploy.sites.state_file import STATE, Durable
from tests.deploy.protocol.fallible import FallibleTree, undisturbed
from tests.deploy.trees import normed, simulation
from tests.flat import client_options


@pytest.mark.parametrize(
    "rules", ["mtgc", "scaffold", "feddyn", "momentum", {"name": "mtgc", "restart": "keep"}], ids=str
)
@pytest.mark.parametrize("name", ["0", "0/1", "root"])
def test_a_restart_between_rounds_changes_nothing(name: str, rules: Any) -> None:
    tree = FallibleTree(simulation(rules, 2))
    tree.root.greet()
    for _ in range(tree.job.rounds):
        tree.root.one_round()
        tree.restart(name)
    assert torch.equal(tree.model(), undisturbed(rules))


@pytest.mark.parametrize("saves", range(1, 9))
def test_what_stays_with_a_leaf_outlives_its_death_after_any_save(saves: int) -> None:
    def tree() -> FallibleTree:
        chain = client_options(0.05, momentum=0.5, optimizer_state="keep")
        return FallibleTree(simulation("mtgc", 2, model=normed, local_parameters="batch_norm", leaf=chain, batch=None))

    dying, whole = tree(), tree()
    left = dying.die("0/1", after=saves)
    dying.run()
    whole.run()
    assert left == [0]
    assert torch.equal(dying.model(), whole.model())
    mine, theirs = dying.own("0/1"), whole.own("0/1")
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert not torch.equal(mine["local.model"], dying.trainer.initial_local["local.model"])


@pytest.mark.parametrize("rules", ["mtgc", "scaffold"])
def test_a_bundle_that_comes_twice_is_trained_once(rules: str) -> None:
    """The parent died after it asked: restarted, it asks again."""
    tree = FallibleTree(simulation(rules, 2))
    tree.root.greet()
    tree.root.one_round()
    root = decode(encode(tree.kept["root"]), NodeState)
    tree.root.one_round()
    after = tree.model()
    tree.kept["root"] = root
    tree.restart("root")
    tree.root.one_round()
    assert torch.equal(tree.model(), after)
    leaves = [tree.nodes[name] for name in tree.job.tree.names[2]]
    meetings = 2 * tree.job.every[1] // tree.job.every[2]
    assert [leaf.calls - 1 for leaf in leaves] == [meetings] * 5


@pytest.mark.parametrize("name", ["0", "0/0", "0/0/1"])
@pytest.mark.parametrize("saves", range(1, 9))
def test_a_node_that_dies_after_any_save_goes_on_from_there(name: str, saves: int) -> None:
    tree = FallibleTree(simulation("mtgc", 3))
    left = tree.die(name, after=saves)
    tree.run()
    assert left == [0]
    assert torch.equal(tree.model(), undisturbed("mtgc", 3))


@pytest.mark.parametrize("when", ["before", "after"])
def test_who_dies_is_left_out_and_corrections_still_sum_to_zero(when: str) -> None:
    tree = FallibleTree(simulation("mtgc", 2))
    tree.root.greet()
    tree.root.one_round()
    tree.nodes["1/2"].when = when
    refused, absent = tree.root.one_round()
    assert refused == () and absent == ("1/2", "1/2")
    tree.restart("1/2")
    assert tree.root.one_round() == ((), ())
    tree.root.end()
    assert torch.isfinite(tree.model()).all()
    for parent in range(2):
        assert tree.weighted_sum(2, parent).abs().max() < 1e-5
    assert tree.weighted_sum(1, 0).abs().max() < 1e-5


def test_an_answer_that_was_missed_is_given_after_the_restart() -> None:
    """A leaf whose report counted dies before it learns so: its correction must still move."""
    tree = FallibleTree(simulation("mtgc", 1))
    tree.root.greet()
    tree.root.one_round()
    tree.nodes["2"].when = "before"
    tree.root.one_round()
    tree.restart("2")
    tree.root.one_round()
    tree.root.end()
    assert tree.weighted_sum(1, 0).abs().max() < 1e-5
    assert tree.correction(1, 2).abs().max() > 0  # type: ignore[union-attr]


def test_an_aggregator_s_death_costs_its_subtree_the_round() -> None:
    tree = FallibleTree(simulation("mtgc", 2))
    tree.root.greet()
    tree.root.one_round()
    tree.nodes["0"].when = "before"
    assert tree.root.one_round() == ((), ("0",))
    tree.restart("0")
    assert tree.root.one_round() == ((), ())
    tree.root.end()
    assert tree.root.round == 3
    assert tree.weighted_sum(1, 0).abs().max() < 1e-5


def test_fewer_than_the_least_number_of_children_leave_the_model_as_it_was() -> None:
    tree = FallibleTree(simulation("mtgc", 2), patience=Patience(min_children=2))
    tree.root.greet()
    for name in ("1/0", "1/1"):
        tree.nodes[name].when = "before"
    # one child of group 1 is too few, so the group has nothing to bring, so the root hears one of
    # two
    before = tree.model()
    refused, absent = tree.root.one_round()
    assert set(absent) == {"1/0", "1/1"} and refused == ()
    assert torch.equal(tree.model(), before)


def test_an_update_that_is_not_finite_is_refused_and_named() -> None:
    tree = FallibleTree(simulation("mtgc", 2))
    tree.root.greet()
    leaf = tree.nodes["1/1"]
    handle = leaf.handle

    def poisoned(bundle: Bundle) -> Reply:
        reply = handle(bundle)
        if reply.report is None:
            return reply
        message = {"model": torch.full_like(reply.report.message["model"], float("nan"))}
        return dataclasses.replace(reply, report=dataclasses.replace(reply.report, message=message))

    leaf.handle = poisoned
    refused, absent = tree.root.one_round()
    assert refused == ("1/1", "1/1") and absent == ()
    assert torch.isfinite(tree.model()).all()
    leaf.handle = handle
    assert tree.root.one_round() == ((), ())


def test_messages_of_another_run_version_site_or_round_are_refused() -> None:
    tree = FallibleTree(simulation("mtgc", 2))
    sent: list[Bundle] = []
    leaf = tree.nodes["0/0"]
    handle = leaf.handle
    leaf.handle = lambda bundle: sent.append(bundle) or handle(bundle)
    tree.root.greet()
    tree.root.one_round()
    tree.root.one_round()
    old, last = sent[1], sent[-1]
    for changes, named in [({"job": "x"}, "job"), ({"protocol": PROTOCOL + 1}, "protocol"), ({"site": "0/1"}, "site")]:
        with pytest.raises(InvalidInput, match=named):
            handle(dataclasses.replace(last, **changes))
    with pytest.raises(InvalidInput, match="over"):
        handle(old)
    assert last.begin is not None
    with pytest.raises(InvalidInput, match="multiples"):
        handle(dataclasses.replace(last, begin=dataclasses.replace(last.begin, step=last.begin.step + 1)))


def test_a_state_on_disk_is_the_state(tmp_path: Path) -> None:
    tree = FallibleTree(simulation("scaffold", 2))
    tree.root.greet()
    tree.root.one_round()
    for name, kept in tree.kept.items():
        durable = Durable(tmp_path / name.replace("/", "_"), "run 1")
        assert durable.read() is None
        durable.write(kept)
        assert encode(durable.read()) == encode(kept)
        durable.close()


def test_a_damaged_or_foreign_state_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = FallibleTree(simulation("mtgc", 1))
    tree.root.greet()
    durable = Durable(tmp_path / "a", "run 1")
    durable.write(tree.kept["root"])
    monkeypatch.setattr(durable_module, "PATIENCE", 0.1)
    with pytest.raises(InvalidInput, match="is writing it"):
        Durable(tmp_path / "a", "run 1")
    durable.close()
    foreign = Durable(tmp_path / "a", "run 2")
    with pytest.raises(InvalidInput, match="another run"):
        foreign.read()
    path = tmp_path / "a" / STATE
    data = bytearray(path.read_bytes())
    data[-50] ^= 1
    path.write_bytes(data)
    with pytest.raises(InvalidInput, match="checksum"):
        foreign.read()
    os.truncate(path, 10)
    with pytest.raises(InvalidInput, match="checksum"):
        foreign.read()
    foreign.close()
