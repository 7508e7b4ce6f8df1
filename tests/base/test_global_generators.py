"""Global generators that a run uses: those of its own device, not those of every GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from stratafl.base.rng import torch_seeded
from tests.flat import simulate, update_of


def noisy(direction: Tensor, x: Tensor, correct: object) -> Tensor:
    """A user's gradient transform that draws random numbers, so that its trial seeds torch."""
    return direction + 0 * torch.rand_like(direction)


def initialised() -> nn.Module:
    return nn.Linear(4, 3)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Record of the GPUs, out of three, whose generators were used; using one initialises it."""
    asked: list[object] = []

    def state(device: object = "cuda") -> Tensor:
        asked.append(device)
        return torch.empty(0, dtype=torch.uint8)

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_rng_state", state)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device="cuda": None)
    return asked


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_a_run_on_the_host_opens_no_gpu(engine: str, opened: list[object]) -> None:
    data = torch.randn(8, 4), torch.arange(8) % 3
    chain = update_of(0.1)
    chain = replace(chain, transforms=(*chain.transforms, noisy))
    simulate(
        initialised, data, list(torch.arange(8).chunk(4)), "2x2", {"name": "mtgc", "restart": "gradient"},
        periods=[1, 2], rounds=1, leaf=chain, engine=engine,
    ).run()  # fmt: skip
    assert opened == []


def test_a_seed_reaches_devices_in_use_and_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = torch.Generator().manual_seed(3), torch.Generator().manual_seed(4)
    monkeypatch.setattr(torch.cuda, "default_generators", gpus)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: [each.manual_seed(seed) for each in gpus])
    every = torch.default_generator, *gpus
    before = [each.get_state() for each in every]
    with torch_seeded(11):
        expected = torch.rand(3, generator=torch.Generator().manual_seed(11))
        assert all(torch.equal(torch.rand(3, generator=each), expected) for each in every)
    assert all(torch.equal(each.get_state(), state) for each, state in zip(every, before, strict=True))


def test_a_gpu_that_is_opened_later_has_the_user_s_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch stores the user's seed for such a GPU; the library's own must not replace it."""
    kept: list[int] = []
    monkeypatch.setattr(torch.cuda, "default_generators", ())
    monkeypatch.setattr(torch.cuda, "manual_seed_all", kept.append)
    torch.manual_seed(7)
    with torch_seeded(11):
        torch.rand(1)
    assert kept[-1] == 7
