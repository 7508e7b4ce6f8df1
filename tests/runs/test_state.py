"""A state taken from a run and put into another one that was set up alike: it goes on to the same
bits."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from stratafl import InvalidInput, Rule, average, mtgc
from stratafl.base.state_dict import from_json_and_tensors, load_like, to_json_and_tensors
from stratafl.rules.registry import entries
from stratafl.runs.checkpoint import Checkpoints, LogDigest, Progress
from stratafl.runs.provenance import Provenance
from tests.flat import client_options
from tests.runs.states import everything, federation, through_a_file
from tests.slow import slow


@pytest.mark.parametrize("engine", ["loop", "vmap", "stacked"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_module_of_few_bits_goes_on_like_any_other(engine: str, dtype: torch.dtype, tmp_path: Path) -> None:
    def make():
        return federation("mtgc", 2, module=lambda: nn.Linear(4, 3).to(dtype), engine=engine)

    uninterrupted, first, second = make(), make(), make()
    next(first)
    second.restore(through_a_file(first, tmp_path))
    assert torch.equal(second.run().models[0], uninterrupted.run().models[0])
    assert second.result().models[0].dtype == dtype


def check_resume(make, folder: Path, stop: int = 2) -> None:
    uninterrupted = make()
    uninterrupted.run()
    first = make()
    for _ in range(stop):
        next(first)
    state = through_a_file(first, folder)
    second = make()
    second.restore(state)
    assert everything(second) == everything(first)
    second.run()
    assert everything(second) == everything(uninterrupted)


@pytest.mark.parametrize("name", [entry.name for entry in entries()])
@pytest.mark.parametrize("depth", [slow(1), slow(2), 3])
@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_every_rule_goes_on_to_the_same_bits(name: str, depth: int, engine: str, tmp_path: Path) -> None:
    more = {"participation": [2] * depth, "leaf": client_options(0.1, momentum=0.5, clip_norm=1.0, weight_decay=0.01)}
    check_resume(lambda: federation([name] * depth, depth, engine=engine, **more), tmp_path)


@pytest.mark.parametrize("restart", ["zero", "gradient", "keep"])
@pytest.mark.parametrize("stop", [0, 1, 3, 4])
def test_every_restart_of_mtgc_after_any_round(restart: str, stop: int, tmp_path: Path) -> None:
    check_resume(lambda: federation([mtgc(restart)] * 3, 3, participation=[1.0, 0.5, 1]), tmp_path, stop)


class Noisy(nn.Module):
    """Buffers that change and a module that draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def test_buffers_and_random_modules(tmp_path: Path) -> None:
    check_resume(lambda: federation("mtgc", 2, module=Noisy, evaluate_levels=[0, 1], sampling="replacement"), tmp_path)


def test_a_client_that_is_refused(tmp_path: Path) -> None:
    def broken():
        sim = federation(["scaffold"] * 2, 2)
        sim.engine.training.samples.inputs_N[:4] = float("nan")
        return sim

    check_resume(broken, tmp_path)
    assert broken().run().refused


def test_a_deep_copy_of_a_state_stays_valid() -> None:
    simulation = federation("mtgc", 2)
    next(simulation)
    kept = copy.deepcopy(simulation.state())
    next(simulation)
    after_two = everything(simulation)
    simulation.run()
    simulation.restore(kept)
    assert len(simulation.history) == 1
    next(simulation)
    assert everything(simulation) == after_two


def test_what_shared_memory_shares_it_again(tmp_path: Path) -> None:
    first = federation("mtgc", 2)
    next(first)
    assert first.federation.levels[1].correction is first.federation.levels[1].state["z"]
    second = federation("mtgc", 2)
    second.restore(through_a_file(first, tmp_path))
    assert second.federation.levels[1].correction is second.federation.levels[1].state["z"]
    assert second.federation.levels[0].model is second.federation.levels[0].broadcast["model"]


def test_equal_rows_are_stored_once_bit_by_bit() -> None:
    rows = torch.tensor([[0.0, float("nan")]]).repeat(5, 1)
    signed = torch.tensor([[0.0], [-0.0]])
    plain, tensors = to_json_and_tensors({"rows": rows, "signed": signed, "again": rows})
    assert tensors["rows"].shape == (1, 2)
    assert tensors["signed"].shape == (2, 1), "zero and minus zero are equal and not the same"
    back = from_json_and_tensors(plain, tensors)
    assert back["rows"].numpy().tobytes() == rows.numpy().tobytes()
    assert back["again"] is back["rows"]


def test_the_library_reads_what_we_write(tmp_path: Path) -> None:
    kinds = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16,
             torch.int8, torch.uint8, torch.bool)  # fmt: skip
    state = {str(kind): torch.arange(6).reshape(2, 3).to(kind) for kind in kinds}
    state |= {"empty": torch.zeros(3, 0), "cut": torch.arange(12.0).reshape(3, 4).t(), "history": []}
    checkpoints = Checkpoints(tmp_path, "run")
    checkpoints.folder.mkdir()
    checkpoints.write(Progress(0), state, LogDigest(0, hashlib.sha256().hexdigest()), Provenance({}, {}))
    result = load_file(checkpoints.path(Progress(0)) / "tensors.safetensors")
    for name in map(str, kinds):
        assert torch.equal(result[name], state[name])
    assert torch.equal(result["cut"], state["cut"])
    assert result["empty"].shape == (1, 0)


def unusual_rule() -> Rule:
    return average()._replace(init=lambda x: {"twice": torch.cat([x, x], dim=1)})


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (lambda: federation("mtgc", 3), "state.federation.levels = 4: does not fit this run, which has 3"),
        (lambda: federation("mtgc", 2, module=lambda: nn.Linear(4, 3, bias=False)), "Tensor (1, 12)"),
        (lambda: federation("mtgc", 2, module=lambda: nn.Linear(4, 3).double()), "float64"),
        (lambda: federation("hfedavg", 2), "state.federation.levels.1.state = []"),
        (lambda: federation([unusual_rule()] * 2, 2), "state.federation.levels.1.state = ['twice']"),
        (lambda: federation("mtgc", 2, engine="stacked"), "state.engine"),
    ],
)
def test_another_run_s_state_is_refused_and_nothing_changed(other, said: str) -> None:
    simulation, before = federation("mtgc", 2), everything(federation("mtgc", 2))
    foreign = other()
    next(foreign)
    with pytest.raises(InvalidInput) as problem:
        simulation.restore(foreign.state())
    assert said in str(problem.value)
    assert everything(simulation) == before


def test_what_a_state_cannot_hold_is_said() -> None:
    for wrong in (object(), {1, 2}, b"bytes"):
        with pytest.raises(InvalidInput, match="nothing a checkpoint can hold"):
            to_json_and_tensors({"a": wrong})
        with pytest.raises(InvalidInput, match="nothing a state can hold"):
            load_like({"a": wrong}, {"a": wrong}, "here")


def test_stop_at_ends_a_resumed_run_in_the_same_round(tmp_path: Path) -> None:
    uninterrupted = federation("mtgc", 2, rounds=60, leaf=0.3)
    uninterrupted.run()
    target = max(r.metrics["accuracy"] for r in uninterrupted.history[:20])
    reached = next(r.round for r in uninterrupted.history if r.metrics["accuracy"] >= target)
    assert 2 < reached < 60

    def make():
        return federation("mtgc", 2, rounds=60, leaf=0.3, stop_when=target)

    assert len(make().run().history) == reached
    check_resume(make, tmp_path)
    assert [dataclasses.replace(r, seconds=0) for r in make().run().history] == [
        dataclasses.replace(r, seconds=0) for r in uninterrupted.history[:reached]
    ]
