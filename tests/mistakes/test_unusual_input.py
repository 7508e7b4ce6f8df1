"""Unusual but valid input gives the same run as usual input."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from stratafl.data.batches import batch_indices
from tests.mistakes.studies import INPUTS, LABELS, study


def test_values_to_start_from_may_be_arrays() -> None:
    start = nn.Linear(3, 2).state_dict()
    arrays = {name: value.numpy() for name, value in start.items()}
    backwards = np.flip(np.flip(arrays["weight"]).copy())
    assert backwards.strides[0] < 0
    backwards.flags.writeable = False
    foreign = arrays["weight"].astype(">f4")
    expected = study(initial=start).run().models[0]
    for weight in (arrays["weight"], backwards, foreign):
        assert torch.equal(study(initial={**arrays, "weight": weight}).run().models[0], expected)


def test_batches_of_a_far_meeting_are_drawn_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = study(periods=[1, 20]).run().models[0]
    drawn: list[int] = []

    def watched(seed: int, client: int, size: int, first: int, steps: int, *rest: object) -> list[Tensor]:
        drawn.append(steps)
        return batch_indices(seed, client, size, first, steps, *rest)

    monkeypatch.setattr("stratafl.engine.loop.STEPS_DRAWN_AT_ONCE", 8)
    monkeypatch.setattr("stratafl.engine.loop.batch_indices", watched)
    assert torch.equal(study(periods=[1, 20]).run().models[0], expected)
    assert drawn == [8, 8, 4] * 4


@pytest.mark.parametrize("engine", ["loop", "vmap", "stacked"])
@pytest.mark.parametrize("method", ["mtgc", "scaffold", "median", "adam"])
def test_a_module_may_be_of_bfloat16(engine: str, method: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).bfloat16()
    sim = study(model=model, engine=engine, method=method, test=(INPUTS, LABELS), drift="ideal")
    result = sim.run()
    assert result.models[0].dtype == torch.bfloat16
    assert result.models[0].isfinite().all()
    assert not result.refused
    assert result.history[-1].metrics["loss"] < 1


@pytest.mark.parametrize("whole", [{"batch": 2.0}, {"rounds": 2.0}, {"evaluate_levels": [1.0]}], ids=str)
def test_a_whole_float_is_a_number_like_any_other(whole: dict) -> None:
    assert study(**whole, test=(INPUTS, LABELS)).run().models[0].isfinite().all()


def test_numpy_numbers_are_numbers() -> None:
    result = study(rounds=np.int64(2), batch=np.int64(2), leaf=np.float32(0.1)).run()
    assert len(result.history) == 2
