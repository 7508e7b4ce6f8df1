"""Real sites in one process, over the real link with a grid in memory: who works with something
else is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

import stratafl
from stratafl.deploy.protocol.messages import PROTOCOL, Reply
from stratafl.deploy.protocol.wire import encode, receive_reply
from stratafl.deploy.sites.assemble import reference_simulation
from stratafl.deploy.sites.fingerprint import differences, made_of
from stratafl.experiment.experiment import Experiment
from tests.deploy.sites.one_process import OneProcess

pytestmark = pytest.mark.usefixtures("in_a_task")


def test_those_who_work_with_the_same_end_where_the_simulation_does(tmp_path: Path) -> None:
    tree = OneProcess(tmp_path, "2x2", [2, 2])
    tree.run()
    assert [line["refused"] for line in tree.rounds] == [[]] * 4
    assert tree.difference() < 1e-6


def test_a_leaf_with_another_config_is_refused_by_name_and_the_rest_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = OneProcess(tmp_path)
    tree.edit("1", "lr = 0.3", "lr = 0.25")
    tree.edit("1", "rounds = 4", "rounds = 4\nseed = 9")
    tree.run()
    assert [(line["refused"], line["absent"]) for line in tree.rounds] == [(["1"], [])] * 4
    said = [line for line in capsys.readouterr().err.splitlines() if "1 is refused" in line]
    assert len(said) == 1, "it is said once, not in every round"
    assert "client.lr is 0.25 there and 0.3 here; seed is 9 there and 0 here" in said[0]
    assert tree.difference(without=1) < 1e-6


def test_a_leaf_below_an_aggregator_is_named_to_the_root(tmp_path: Path) -> None:
    tree = OneProcess(tmp_path, "2x2", [2, 2])
    tree.edit("0/1", "batch_size = 20", "batch_size = 10")
    tree.run()
    assert [set(line["refused"]) for line in tree.rounds] == [{"0/1"}] * 4


def test_a_whole_group_with_another_config_is_refused(tmp_path: Path) -> None:
    tree = OneProcess(tmp_path, "2x2", [2, 2])
    for name in ("0", "0/0", "0/1"):
        tree.edit(name, "lr = 0.3", "lr = 0.1")
    tree.run()
    assert [line["refused"] for line in tree.rounds] == [["0"]] * 4


def test_another_protocol_is_refused_and_another_version_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = OneProcess(tmp_path)
    made_of = tree.open("2").job.made_of
    tree.close()
    changed = {"1": {"made_of": {**made_of, "stratafl": "9.9"}}, "2": {"made_of": {**made_of, "protocol": "9"}}}
    tree.run(**changed)
    assert [line["refused"] for line in tree.rounds] == [["2"]] * 4
    assert f"protocol is 9 there and {PROTOCOL} here" in capsys.readouterr().err


def test_a_version_with_one_more_key_works_with_one_that_has_not_got_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree, to_table = OneProcess(tmp_path), Experiment.to_table
    older = made_of(tmp_path, tree.experiment, {})

    def with_one_more(experiment: Experiment) -> dict[str, Any]:
        table = to_table(experiment)
        return {**table, "client": {**table["client"], "novel": None}}

    monkeypatch.setattr(Experiment, "to_table", with_one_more)
    assert made_of(tmp_path, tree.experiment, {}) == older


def test_one_that_speaks_another_protocol_is_told_who_it_is_from(tmp_path: Path) -> None:
    tree = OneProcess(tmp_path)
    here = tree.open("root")
    newer = encode(Reply("job", "1", 3, protocol=PROTOCOL + 1)).replace(b"fingerprint", b"sealedprint")
    reply = receive_reply(newer, here.job, frozenset({"model"}))
    assert (reply.job, reply.site, reply.fingerprint, reply.report) == ("job", "1", "", None)
    assert f"protocol is {PROTOCOL + 1} there and {PROTOCOL} here" in differences(here.job.made_of, reply.made_of)
    tree.close()


def test_one_that_was_put_right_takes_part_again(tmp_path: Path) -> None:
    reached = 'evaluation.stop_when = "accuracy >= 0.01"'  # by whatever is evaluated first
    tree = OneProcess(tmp_path, options=reached)
    tree.edit("1", "lr = 0.3", "lr = 0.25")
    tree.run()
    tree.edit("1", "lr = 0.25", "lr = 0.3")
    for name in tree.folders:
        tree.edit(name, reached, "")
    tree.run()
    assert [line["refused"] for line in tree.rounds] == [["1"], [], [], []]


def test_a_site_s_own_config_is_not_that_of_another_tree(tmp_path: Path) -> None:
    tree = OneProcess(tmp_path)
    tree.edit("2", 'shape = "3"', 'shape = "2"')
    with pytest.raises(stratafl.InvalidInput, match="'2'"):
        tree.open("2")


@pytest.mark.parametrize(
    "evaluation",
    ["every = 3", 'stop_when = "accuracy >= 0.6"', 'every = 2, stop_when = "accuracy >= 0.4"'],
)
def test_it_is_evaluated_and_stopped_when_the_simulation_is(tmp_path: Path, evaluation: str) -> None:
    tree = OneProcess(tmp_path, "2x2", [2, 5], options=f"evaluation = {{ {evaluation} }}")
    tree.run()
    history = reference_simulation(tree.experiment).run().history
    assert [line["round"] for line in tree.rounds] == [result.round for result in history]
    for line, result in zip(tree.rounds, history, strict=True):
        assert line["metrics"] == pytest.approx(result.metrics, abs=1e-4)
    assert "stop_when" not in evaluation or len(history) < 4, "the run ends early"
    assert tree.difference() < 1e-6


def test_a_root_that_is_started_again_after_it_reached_its_accuracy_does_no_more(tmp_path: Path) -> None:
    tree = OneProcess(tmp_path, "2x2", [2, 5], options='evaluation.stop_when = "accuracy >= 0.5"')
    tree.run()
    done = len(tree.rounds)
    (tree.folders["root"] / "model.safetensors").unlink()
    tree.run()
    assert len(tree.rounds) == done < 4
    assert tree.difference() < 1e-6
