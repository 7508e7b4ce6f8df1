"""A run left inside a global round, between two meetings: it goes on to the same bits and the same
records."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch

from stratafl import InvalidInput, mtgc
from stratafl.rules.registry import entries
from stratafl.runs.checkpoint import Checkpoints, Progress
from tests.flat import client_options
from tests.runs.states import everything, federation, through_a_file
from tests.slow import slow

PERIODS = {1: [2], 2: [4, 2], 3: [2, 2, 1]}
CLIPPED = client_options(0.1, momentum=0.5, clip_norm=0.5, weight_decay=0.01)


def within(rules: object, depth: int = 2, **more):
    return federation(rules, depth, **{"rounds": 2, "periods": PERIODS[depth], "drift": "ideal", **more})


def check_every_meeting(make, folder: Path) -> None:
    """Leave the run after each of its meetings, and go on from there."""
    uninterrupted = make()
    uninterrupted.run()
    first = make()
    for number in range(uninterrupted.rounds * uninterrupted.meetings_per_round):
        first.advance()
        checkpoint_folder = folder / str(number)
        checkpoint_folder.mkdir()
        second = make()
        second.restore(through_a_file(first, checkpoint_folder))
        assert everything(second) == everything(first)
        second.run()
        assert everything(second) == everything(uninterrupted)
    assert everything(first) == everything(uninterrupted), "asking for the state changes nothing"


@pytest.mark.parametrize("engine", ["loop", slow("vmap"), "stacked"])
@pytest.mark.parametrize("depth", [slow(2), 3])
def test_after_any_meeting(engine: str, depth: int, tmp_path: Path) -> None:
    more = {"engine": engine, "participation": [2] * depth, "leaf": CLIPPED, "evaluate_levels": [0, 1]}
    check_every_meeting(lambda: within("mtgc", depth, **more), tmp_path)


@pytest.mark.parametrize("name", [entry.name for entry in entries()])
def test_every_rule(name: str, tmp_path: Path) -> None:
    check_every_meeting(lambda: within([name] * 2, rounds=1, periods=[3, 1]), tmp_path)


@pytest.mark.parametrize("restart", ["zero", "gradient", "keep"])
def test_every_restart(restart: str, tmp_path: Path) -> None:
    check_every_meeting(lambda: within([mtgc(restart)] * 3, 3, participation=[1.0, 0.5, 1]), tmp_path)


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_an_optimiser_that_outlives_meetings(engine: str, tmp_path: Path) -> None:
    chain = client_options(0.01, optimizer="adam", optimizer_state="keep")
    check_every_meeting(lambda: within("mtgc", engine=engine, leaf=chain, participation=[1.0, 2]), tmp_path)


def broken():
    sim = within(["scaffold"] * 2)
    sim.engine.training.samples.inputs_N[:4] = float("nan")
    return sim


def test_who_was_refused_before_is_in_the_record(tmp_path: Path) -> None:
    check_every_meeting(broken, tmp_path)
    assert broken().run().refused == {"0/0": 8}


def test_a_left_round_knows_what_it_saw() -> None:
    simulation = broken()
    assert simulation.advance() is None and simulation.advance() is None
    state = simulation.state()
    assert state["within"]["meetings"] == simulation.meetings == 2
    assert state["within"]["rejected"] == [("0/0", False)] * 2
    assert len(simulation.history) == 0 and simulation.step == 4
    assert next(simulation).refused == ("0/0",) * 4
    assert "within" not in simulation.state()


def test_meetings_are_told_as_they_are_held() -> None:
    simulation, output = within("mtgc"), []
    simulation.on_sync = lambda meetings, of: output.append((meetings, of))
    next(simulation)
    assert output == [(1, 4), (2, 4), (3, 4)], "the last one ends the round"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"meetings": 4}, "state.within.meetings = 4"),
        ({"meetings": 0}, "state.within.meetings = 0"),
        ({"meetings": "1"}, "must be a table of meetings"),
        ({"seconds": float("nan")}, "state.within.seconds"),
        ({"rejected": [["nobody", False]]}, "no node of the tree has this name"),
        ({"rejected": ["0/0"]}, "state.within.rejected"),
        ({"drift": [[9, "drift", [1.0], [1.0]]]}, "state.within.drift"),
        ({"drift": [[1, "drift", [1.0], []]]}, "state.within.drift"),
        ({"drift": [[1, "drift", [None], [1.0]]]}, "state.within.drift"),
        ({"clipped": -1}, "state.within.clipped"),
        ({"more": 1}, "must be a table of meetings"),
    ],
)
def test_what_no_round_can_have_seen_is_refused(wrong: dict, said: str) -> None:
    simulation = within("mtgc")
    simulation.advance()
    state = simulation.state()
    fresh, before = within("mtgc"), everything(within("mtgc"))
    with pytest.raises(InvalidInput) as problem:
        fresh.restore({**state, "within": {**state["within"], **wrong}})
    assert said in str(problem.value)
    assert everything(fresh) == before


def test_a_checkpoint_from_before_there_were_those_within_rounds(tmp_path: Path) -> None:
    simulation = within("mtgc")
    next(simulation)
    through_a_file(simulation, tmp_path)
    checkpoint_folder = tmp_path / "checkpoints" / "000001"
    described = json.loads((checkpoint_folder / "state.json").read_text())
    assert described["format"] == 4 and described.pop("meetings") == 0
    rewrite(checkpoint_folder, described)
    assert Checkpoints(tmp_path, "run").read(Progress(1))["step"] == 8
    rewrite(checkpoint_folder, {**described, "meetings": 2})
    with pytest.raises(InvalidInput, match="it belongs to round 1 and 2 meetings of the next"):
        Checkpoints(tmp_path, "run").read(Progress(1))
    checkpoint_folder.rename(checkpoint_folder.with_name("000001-000002"))
    with pytest.raises(InvalidInput, match="its state is not that of round 1 and 2 meetings of the next"):
        Checkpoints(tmp_path, "run").read(Progress(1, 2))


def rewrite(checkpoint: Path, described: dict) -> None:
    text = json.dumps(described).encode()
    (checkpoint / "state.json").write_bytes(text)
    sums = (checkpoint / "SHA256SUMS").read_text().splitlines()
    sums[0] = f"{hashlib.sha256(text).hexdigest()}  state.json"
    (checkpoint / "SHA256SUMS").write_text("\n".join(sums) + "\n")


def test_places_are_in_order_and_known_by_their_names() -> None:
    places = [
        Progress(0),
        Progress(0, 999_999),
        Progress(0, 1_000_000),
        Progress(1),
        Progress(1, 1),
        Progress(1_000_000),
    ]
    assert sorted(places) == places
    assert [Progress.named(place.name) for place in places] == places
    for name in ("1", "000001-", "000001-000000", "000001-1", "0000001", "notes", "000001-000001-000001"):
        assert Progress.named(name) is None


def test_a_restored_run_forgets_the_round_it_was_in() -> None:
    uninterrupted, other = within("mtgc"), within("mtgc")
    start = uninterrupted.state()
    other.advance()
    other.restore(start)
    assert other.meetings == 0
    torch.testing.assert_close(next(other).drift, next(uninterrupted).drift, rtol=0, atol=0)
