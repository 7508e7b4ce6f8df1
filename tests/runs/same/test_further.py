"""A run that is done goes further: to the same bits as one that was as long from the start, or not
at all where its rounds would have been others."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from stratafl import InvalidInput, Simulation
from stratafl.core.optimizer import cosine
from stratafl.experiment.experiment import Experiment
from stratafl.runs import read_run
from stratafl.runs.session import RunSession, extended
from stratafl.sweeps import run_all
from tests.commands import command
from tests.flat import client_options, simulate
from tests.runs.conftest import contents
from tests.runs.stopped import CONFIG
from tests.sweeps.inline import Inline


def study(**changes: Any) -> Simulation:
    random = torch.Generator().manual_seed(5)
    inputs = torch.randn(40, 4, generator=random)
    targets = (inputs @ torch.randn(4, 3, generator=random)).argmax(dim=1)
    parts = [range(10 * client, 10 * client + 10) for client in range(4)]
    options = {
        "method": "mtgc",
        "periods": [2, 2],
        "rounds": 2,
        "batch": 5,
        "test": (inputs, targets),
        "keep_state": True,
        **changes,
    }
    return simulate(lambda: nn.Linear(4, 3), (inputs, targets), parts, "2x2", engine="loop", **options)


def short(rounds: int = 2, keep_state: bool = True) -> Experiment:
    return Experiment.from_table({**CONFIG, "rounds": rounds, "storage": {"keep_state": keep_state}})


def bits(run: Path) -> dict[str, Any]:
    """Files of a run, without its provenance, which has its first length."""
    result = contents(run)
    return {**result, "state": {key: value for key, value in result["state"].items() if key != "inputs"}}


def done(folder: Path, **run: Any) -> Path:
    return RunSession.start(short(**run), "study", folder).run().path


# -- from Python -----------------------------------------------------------------------------------


def test_more_rounds_go_on_to_the_same_bits(tmp_path: Path) -> None:
    study(save=tmp_path / "x").run()
    study(save=tmp_path / "x", rounds=4).run()
    study(save=tmp_path / "whole", rounds=4).run()
    assert bits(tmp_path / "x") == bits(tmp_path / "whole")
    run = read_run(tmp_path / "x")
    assert (run.total, run.config["rounds"]) == (4, 4)
    assert run.continued[0]["extended"] == ["rounds was 2 and is 4"] and "changed" not in run.continued[0]


@pytest.mark.parametrize(
    ("first", "then", "said"),
    [
        ({"rounds": 3}, {"rounds": 2}, "has 3 rounds already, more than rounds = 2"),
        (
            {"leaf": client_options(cosine(0.1, rounds=2))},
            {"rounds": 4, "leaf": client_options(cosine(0.1, rounds=4))},
            "rounds was 2 and",
        ),
        ({}, {"rounds": 4, "precision": "bf16"}, "its products were computed in fp32; here: bf16"),
        ({}, {"rounds": 4, "stop_when": "accuracy >= 0.01"}, "reached what it is to stop at in round 1 of 2 already"),
    ],
)
def test_what_would_have_been_another_run_is_refused(
    first: dict[str, Any], then: dict[str, Any], said: str, tmp_path: Path
) -> None:
    study(save=tmp_path / "x", **first).run()
    before = (tmp_path / "x" / "rounds.jsonl").read_bytes()
    with pytest.raises(InvalidInput, match=said):
        study(save=tmp_path / "x", **then)
    assert (tmp_path / "x" / "rounds.jsonl").read_bytes() == before and read_run(tmp_path / "x").status == "done"


def test_an_opaque_learning_rate_is_compared_round_by_round(tmp_path: Path) -> None:
    length = SimpleNamespace(rounds=2)

    def fading(round: int) -> float:
        return 0.1 * (1 - round / length.rounds)

    study(save=tmp_path / "x", leaf=client_options(fading)).run()
    length.rounds = 4
    with pytest.raises(InvalidInput, match=r"rate of round 2 was 0\.05 and would have been 0\.075"):
        study(save=tmp_path / "x", leaf=client_options(fading), rounds=4)


def test_one_that_was_stopped_early_by_its_target_stays_as_it_is(tmp_path: Path, capsys) -> None:
    study(save=tmp_path / "x", stop_when="accuracy >= 0.01").run()
    longer = study(save=tmp_path / "x", stop_when="accuracy >= 0.01", rounds=4)
    assert len(longer.run().history) == 1
    assert "done already: 1 rounds in result().history" in capsys.readouterr().err


def test_the_way_that_a_refusal_names_is_there(tmp_path: Path) -> None:
    study(save=tmp_path / "x").run()
    with pytest.raises(InvalidInput, match=r"simulation\.save\(\.\.\., force=True\) in place of save="):
        study(save=tmp_path / "x", leaf=0.2, rounds=3)
    forced = study(leaf=0.2, rounds=3)
    forced.save(tmp_path / "x", force=True)
    assert len(forced.run().history) == 3


def test_a_kept_loop_that_is_over_gives_its_result(tmp_path: Path) -> None:
    simulation = study(save=tmp_path / "x")
    assert [record.round for record in simulation] == [1, 2]
    assert len(simulation.run().history) == 2


# -- from the command line, and in a sweep ---------------------------------------------------------


def test_the_command_goes_further(tmp_path: Path, monkeypatch, capsys) -> None:
    run, longer = done(tmp_path / "a"), done(tmp_path / "b", rounds=4)
    assert command(monkeypatch, "resume", run, "-q") == 2
    assert "with --rounds N it goes on" in capsys.readouterr().err
    assert command(monkeypatch, "resume", run, "--set", "client.lr=1", "-q") == 2
    assert "a run goes on as it began, but for rounds" in capsys.readouterr().err
    assert command(monkeypatch, "resume", run, "--set", "rounds=4", "-q") == 0
    assert bits(run) == bits(longer)
    assert command(monkeypatch, "resume", run, "--set", "rounds=4", "-q") == 2


def test_one_that_kept_no_state_is_left_alone(tmp_path: Path) -> None:
    run = done(tmp_path, keep_state=False)
    with pytest.raises(InvalidInput, match=r"its state was not kept: for more rounds begin another"):
        RunSession.resume(run, extended(run, ["rounds=4"]))
    assert read_run(run).status == "done" and (run / "model.safetensors").exists()


def test_a_rate_over_all_rounds_is_refused(tmp_path: Path) -> None:
    values = {**CONFIG, "client": {"lr_schedule": "cosine"}, "rounds": 2, "storage": {"keep_state": True}}
    run = RunSession.start(Experiment.from_table(values), "study", tmp_path).run().path
    with pytest.raises(InvalidInput, match=r"client\.lr_schedule\.rounds was 2 and is 4"):
        RunSession.resume(run, extended(run, ["rounds=4"]))


def test_a_sweep_continues_kept_runs_and_repeats_the_rest(tmp_path: Path) -> None:
    def swept(**run: Any) -> tuple[list[str], Path | None]:
        said: list[str] = []
        (outcome,) = run_all({"a": short(**run)}, tmp_path, say=said.append, executor=Inline())
        assert outcome.status == "done" and not outcome.was_done
        return said, outcome.path

    _, first = swept()
    assert swept(rounds=3) == (["a: goes on: rounds was 2 and is 3"], first)
    assert json.loads((first / "status.json").read_text())["rounds"] == 3
    said, other = swept(rounds=2, keep_state=False)
    assert said == ["a: rounds was 3 and is 2 since; run again"] and other != first
