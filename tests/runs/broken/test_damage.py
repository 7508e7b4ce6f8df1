"""Checkpoints whose bytes are not as they were written: noticed and said, and never loaded
wrong."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from stratafl import InvalidInput
from stratafl.base.signals import Interrupted
from stratafl.base.state_dict import to_json_and_tensors
from stratafl.experiment.experiment import Experiment
from stratafl.runs.checkpoint import Checkpoints, Progress
from stratafl.runs.session import RunSession
from tests.runs.conftest import contents
from tests.runs.stopped import CONFIG, names, stopped_after

FILES = ("state.json", "tensors.safetensors", "SHA256SUMS")


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stopped_after(4, tmp_path_factory.mktemp("stopped"))


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict:
    session = RunSession.start(Experiment.from_table(CONFIG), "study", tmp_path_factory.mktemp("uninterrupted"))
    return contents(session.run().path)


@pytest.fixture
def run(stopped: Path, tmp_path: Path) -> Path:
    copy = tmp_path / stopped.name
    shutil.copytree(stopped, copy)
    return copy


def identity(run: Path) -> str:
    return json.loads((run / "run.json").read_text())["id"]


def as_read(run: Path, round: int) -> str:
    """A checkpoint's state as text."""
    state = Checkpoints(run, identity(run)).read(Progress(round))
    plain, tensors = to_json_and_tensors(state)
    return repr((plain, {name: t.numpy().tobytes() for name, t in tensors.items()}))


def test_each_of_200_flipped_bytes_is_noticed(run: Path) -> None:
    assert names(run) == ["000003", "000004"]
    newest = run / "checkpoints" / "000004"
    assert as_read(run, 4)
    originals = {name: (newest / name).read_bytes() for name in FILES}
    chance = random.Random(200)
    for number in range(200):
        name = FILES[number % 3]
        data = bytearray(originals[name])
        place = chance.randrange(len(data))
        data[place] ^= chance.randrange(1, 256)
        (newest / name).write_bytes(data)
        with pytest.raises(InvalidInput) as problem:
            as_read(run, 4)
        assert "\n" not in str(problem.value)
        (newest / name).write_bytes(originals[name])


def replaced(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def foreign(path: Path) -> None:
    save_file({"federation.levels.0.model": torch.ones(1, 3), "weights": torch.zeros(4)}, path)


def another_run(run: Path) -> None:
    """A good checkpoint of the same config with other draws, put in the place of the newest."""
    values = {**CONFIG, "seed": 1, "rounds": 4}
    done = RunSession.start(Experiment.from_table(values), "other", run.parent / "other").run().path
    newest = run / "checkpoints" / "000004"
    shutil.rmtree(newest)
    shutil.copytree(done / "checkpoints" / "000004", newest)


def older_in_its_place(run: Path) -> None:
    shutil.rmtree(run / "checkpoints" / "000004")
    shutil.copytree(run / "checkpoints" / "000003", run / "checkpoints" / "000004")


DAMAGE: dict[str, Callable[[Path], object]] = {
    "one byte of the tensors": lambda run: flip(run / "checkpoints/000004/tensors.safetensors"),
    "one byte of the state": lambda run: flip(run / "checkpoints/000004/state.json"),
    "one byte of the sums": lambda run: flip(run / "checkpoints/000004/SHA256SUMS"),
    "tensors cut short": lambda run: cut(run / "checkpoints/000004/tensors.safetensors"),
    "state cut short": lambda run: cut(run / "checkpoints/000004/state.json"),
    "sums cut short": lambda run: cut(run / "checkpoints/000004/SHA256SUMS"),
    "empty tensors": lambda run: replaced(run / "checkpoints/000004/tensors.safetensors", b""),
    "empty state": lambda run: replaced(run / "checkpoints/000004/state.json", b""),
    "empty sums": lambda run: replaced(run / "checkpoints/000004/SHA256SUMS", b""),
    "no tensors": lambda run: (run / "checkpoints/000004/tensors.safetensors").unlink(),
    "no state": lambda run: (run / "checkpoints/000004/state.json").unlink(),
    "no sums": lambda run: (run / "checkpoints/000004/SHA256SUMS").unlink(),
    "foreign tensors": lambda run: foreign(run / "checkpoints/000004/tensors.safetensors"),
    "bytes at the end": lambda run: append(run / "checkpoints/000004/tensors.safetensors"),
    "a record of its round": lambda run: flip_record(run, 4),
    "its round's record cut short": lambda run: cut_record(run, 4),
    "another run's": another_run,
    "an older one under its name": older_in_its_place,
}


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def flip_record(run: Path, round: int) -> None:
    """Another number in a line that is valid all the same."""
    lines = (run / "rounds.jsonl").read_bytes().splitlines(keepends=True)
    lines[round - 1] = lines[round - 1].replace(b'"loss": ', b'"loss": 1')
    (run / "rounds.jsonl").write_bytes(b"".join(lines))


def cut_record(run: Path, round: int) -> None:
    lines = (run / "rounds.jsonl").read_bytes().splitlines(keepends=True)
    (run / "rounds.jsonl").write_bytes(b"".join(lines[:round])[:-1])


def append(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"more")


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=list(DAMAGE))
def test_the_one_before_a_damaged_one_is_used(damage: Callable, run: Path, uninterrupted: dict) -> None:
    damage(run)
    said: list[str] = []
    session = RunSession.resume(run, say=said.append)
    assert len(said) == 2
    assert said[0].startswith("the checkpoint of round 4 is not used: ") and "\n" not in said[0]
    assert said[1] == "goes on after round 3"
    session.run()
    assert contents(run) == uninterrupted


def test_without_a_good_checkpoint_a_run_begins_again(run: Path, uninterrupted: dict) -> None:
    for name in names(run):
        flip(run / "checkpoints" / name / "tensors.safetensors")
    said: list[str] = []
    session = RunSession.resume(run, say=said.append)
    assert [line.split(":")[0] for line in said] == [
        "the checkpoint of round 4 is not used",
        "the checkpoint of round 3 is not used",
        "begins again",
    ]
    session.run()
    assert contents(run) == uninterrupted


@pytest.mark.parametrize("damage", [flip_record, cut_record])
def test_without_its_first_records_a_run_begins_again(damage: Callable, run: Path, uninterrupted: dict) -> None:
    damage(run, 1)
    said: list[str] = []
    RunSession.resume(run, say=said.append).run()
    assert [line.split(":")[0] for line in said][-1] == "begins again"
    assert all("rounds.jsonl" in line for line in said[:-1])
    assert contents(run) == uninterrupted


def test_a_checkpoint_does_not_grow_with_the_rounds(tmp_path: Path) -> None:
    values = {**CONFIG, "rounds": 41, "storage": {"checkpoint_every": 1}, "evaluation": {"levels": [1, 2]}}
    session = RunSession.start(Experiment.from_table(values), "study", tmp_path)
    sizes = {}

    def watch(record) -> None:
        if record.round > 1:
            folder = session.path / "checkpoints" / f"{record.round - 1:06d}"
            sizes[record.round - 1] = sum(path.stat().st_size for path in folder.iterdir())

    session.run(watch)
    assert (session.path / "rounds.jsonl").stat().st_size > 40 * 500
    assert abs(sizes[40] - sizes[10]) < 200


def test_a_damaged_checkpoint_is_removed_and_two_are_kept(run: Path) -> None:
    flip(run / "checkpoints" / "000004" / "state.json")
    session = RunSession.resume(run)
    seen = []

    def watch(record) -> None:
        seen.append(names(run))
        if record.round == 6:
            raise Interrupted(2)

    with pytest.raises(Interrupted):
        session.run(watch)
    # what each round finds before its own checkpoint: the damaged one's round is written anew
    assert seen == [["000003", "000004"], ["000003", "000004"], ["000004", "000005"]]
    assert as_read(run, 4) and as_read(run, 5)


def test_what_a_killed_process_left_is_cleared_away(run: Path, uninterrupted: dict) -> None:
    for path in (run / "checkpoints" / ".000005.1234.partial", run / ".rounds.jsonl.77.partial"):
        path.mkdir()
        (path / "state.json").write_text("half")
    with (run / "rounds.jsonl").open("ab") as file:
        file.write(b'{"round": 6, "ste')
    RunSession.resume(run).run()
    assert contents(run) == uninterrupted


def test_data_that_changed_is_noticed(run: Path) -> None:
    described = json.loads((run / "run.json").read_text())
    described["config"]["data"]["arguments"]["samples"] = 21
    (run / "run.json").write_text(json.dumps(described))
    with pytest.raises(InvalidInput, match="is no longer what this run began with"):
        RunSession.resume(run)
