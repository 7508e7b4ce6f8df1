"""Client optimizers: against PyTorch's, on every engine, with kept or reset states, resumed."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from stratafl.base.errors import InvalidInput
from stratafl.core.client_update import ClientUpdate, clip, corrections
from stratafl.core.optimizer import SGD, Adam, AdamW, constant
from stratafl.engine.factory import make_engine
from stratafl.federation.local_parameters import ClientTrainer
from tests.engine import pairs
from tests.flat import client_options, update_of
from tests.problems import LeastSquares, half_squares, root
from tests.slow import slow_unless

CHAINS: dict[str, dict[str, Any]] = {
    "sgd": {},
    "momentum": {"optimizer": {"name": "sgd", "momentum": 0.9}},
    "nesterov": {"optimizer": {"name": "sgd", "momentum": 0.8, "nesterov": True}},
    "adam": {"optimizer": "adam"},
    "adam, clip and decay": {
        "optimizer": {"name": "adam", "betas": [0.5, 0.9], "eps": 1e-3},
        "clip_norm": 0.3,
        "weight_decay": 0.1,
    },
    "adamw": {"optimizer": {"name": "adamw", "weight_decay": 0.2}},
}
KNOWN = pytest.mark.parametrize("chain", CHAINS)
STATES = pytest.mark.parametrize("state", ["reset", "keep"])


class Signs(NamedTuple):
    """An optimizer of a user."""

    beta: float = 0.9

    def init(self, x: Tensor) -> dict[str, Tensor]:
        return {"m": torch.zeros_like(x)}

    def step(
        self, state: dict[str, Tensor], direction: Tensor, x: Tensor, lr: float | Tensor
    ) -> tuple[dict[str, Tensor], Tensor]:
        m = self.beta * state["m"] + (1 - self.beta) * direction
        return {"m": m}, lr * m.sign()


def torch_s_own(name: str, module: nn.Module) -> torch.optim.Optimizer:
    builders: dict[str, Any] = {
        "sgd": lambda p: torch.optim.SGD(p, 0.05),
        "momentum": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9),
        "nesterov": lambda p: torch.optim.SGD(p, 0.05, momentum=0.8, nesterov=True),
        "adam": lambda p: torch.optim.Adam(p, 0.05),
        "adam, clip and decay": lambda p: torch.optim.Adam(p, 0.05, (0.5, 0.9), 1e-3),
        "adamw": lambda p: torch.optim.AdamW(p, 0.05, weight_decay=0.2),
    }
    return builders[name](module.parameters())


@KNOWN
@STATES
def test_a_client_alone_is_torch_s_own(chain: str, state: str) -> None:
    problem = LeastSquares(1)
    inputs, targets = problem.data
    module = nn.Linear(3, 1, bias=False, dtype=torch.float64)
    with torch.no_grad():
        module.weight.copy_(torch.tensor(problem.x0))
    optimizer = torch_s_own(chain, module)
    for _ in range(3):
        if state == "reset":
            optimizer = torch_s_own(chain, module)
        for _ in range(6):
            optimizer.zero_grad()
            half_squares(module(inputs), targets).backward()
            if "clip_norm" in CHAINS[chain]:
                nn.utils.clip_grad_norm_(module.parameters(), 0.3)
                module.weight.grad += 0.1 * module.weight.detach()
            optimizer.step()
    update = client_options(0.05, optimizer_state=state, **CHAINS[chain])
    result = problem.run("hfedavg", periods=[6], rounds=3, lr=update)
    # torch divides a clip's norm by a little more than it
    atol = 1e-6 if "clip_norm" in CHAINS[chain] else 1e-12
    np.testing.assert_allclose(root(result), module.weight.detach()[0], rtol=0, atol=atol)


RULES = {
    "mtgc": "mtgc",
    "kept corrections": {"name": "mtgc", "restart": "keep"},
    "scaffold, a pull": ["scaffold", "fedprox"],
}


@pytest.mark.parametrize("chain", [*CHAINS, "own"])
@pytest.mark.parametrize("rules", slow_unless(lambda name: name == "kept corrections", RULES))
def test_every_engine_gives_the_loop_s_result(chain: str, rules: str) -> None:
    options = {"optimizer": Signs()} if chain == "own" else CHAINS[chain]
    for state in ("reset", "keep"):
        update = client_options(0.05, optimizer_state=state, **options)
        settings = {"rules": RULES[rules], "leaf": update, "participation": [1.0, 0.6], "rounds": 2}
        assert pairs.compare(**settings) < 1e-9
        vmapped = pairs.federation(**settings)
        vmapped.engine = make_engine("vmap", vmapped.engine.training, chunk_size=3)
        assert vmapped.engine.name == "vmap"
        expected, actual = pairs.federation(**settings).run(), vmapped.run()
        assert max(float((a - b).abs().max()) for a, b in zip(expected.models, actual.models, strict=True)) < 1e-9


def test_states_of_channels_last_filters_have_the_same_format() -> None:
    """Kept states are returned in the module's memory format."""

    def model() -> nn.Module:
        return nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(3 * 4, 3)).double()

    inputs = torch.randn(60, 2, 4, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    update = client_options(0.05, optimizer="adam", optimizer_state="keep")
    settings = {"model": model, "inputs": inputs, "leaf": update, "initial": model().state_dict()}
    loop, stacked = pairs.federation(**settings), pairs.stacked(pairs.federation(**settings), chunk_size=2)
    loop.run(), stacked.run()
    states = [sim.federation.levels[-1].client_rows for sim in (loop, stacked)]
    assert set(states[0]) == {"m", "v", "steps"}
    for name in states[0]:
        torch.testing.assert_close(states[0][name], states[1][name], rtol=0, atol=1e-12)


# -- kept states ----------------------------------------------------------------------------------


def test_absent_and_rejected_clients_keep_their_state() -> None:
    update = client_options(0.05, optimizer="adam", optimizer_state="keep")
    sim = pairs.federation(leaf=update, participation=[1.0, 1], rounds=3, drift="none")
    trainer = ClientTrainer(sim.engine, sim.home)
    counts = torch.zeros(5, 1, dtype=torch.int64)
    for _ in range(3):
        for steps, top in sim.schedule.events():
            sim.federation.train_and_synchronize(trainer, round=0, first_step=sim.step, steps=steps, top_level=top)
            sim.step += steps
            counts += steps * torch.as_tensor(sim.federation.levels[-1].active_N)[:, None]
            assert torch.equal(sim.federation.levels[-1].client_rows["steps"], counts)
            assert sim.federation.levels[-1].staged_client_rows == {}
    assert len(set(counts.flatten().tolist())) > 1
    before = {name: rows.clone() for name, rows in sim.federation.levels[-1].client_rows.items()}
    sim.federation.begin_round()
    trained = sim.engine.train(sim.federation.train_request(sim.step, 1, 0))
    trained.model_AP[0] = float("nan")
    sim.federation.apply_training(trained, 0.05)
    assert len(sim.federation.synchronize(2).rejected) == 1
    (first, *_) = np.flatnonzero(sim.federation.levels[-1].active_N)
    after = sim.federation.levels[-1].client_rows
    assert torch.equal(after["m"][first], before["m"][first]) and torch.equal(
        after["steps"][first], before["steps"][first]
    )
    assert not torch.equal(after["m"], before["m"])


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_a_resumed_run_has_the_same_bits(engine: str) -> None:
    update = client_options(0.05, optimizer="adamw", optimizer_state="keep", clip_norm=0.5)
    settings = {"leaf": update, "engine": engine, "participation": [1.0, 0.6], "rounds": 4}
    uninterrupted = pairs.federation(**settings)
    uninterrupted.run()
    interrupted = pairs.federation(**settings)
    next(interrupted), next(interrupted)
    state = copy.deepcopy(interrupted.state())
    resumed = pairs.federation(**settings)
    resumed.restore(state)
    resumed.run()
    for a, b in zip(uninterrupted.federation.levels, resumed.federation.levels, strict=True):
        assert torch.equal(a.model, b.model) and torch.equal(a.buffers, b.buffers)
        assert all(torch.equal(a.client_rows[name], b.client_rows[name]) for name in a.client_rows)
    assert int(uninterrupted.federation.levels[-1].client_rows["steps"].max()) > 6
    other = pairs.federation(**{**settings, "leaf": client_options(0.05, optimizer="adamw")})
    with pytest.raises(InvalidInput, match="does not fit this run"):
        other.restore(state)


def test_a_state_without_optimizers_fits_no_run_that_keeps_them() -> None:
    sim = pairs.federation(rounds=3)
    next(sim)
    state = copy.deepcopy(sim.state())
    keeping = pairs.federation(rounds=3, leaf=client_options(0.1, momentum=0.5, optimizer_state="keep"))
    with pytest.raises(InvalidInput, match="does not fit this run"):
        keeping.restore(state)


def test_a_kept_optimiser_cannot_be_exchanged_in_a_run() -> None:
    sim = pairs.federation(leaf=client_options(0.1, optimizer="adam", optimizer_state="keep"))
    with pytest.raises(InvalidInput, match="cannot be changed in a run"):
        sim.client_update = update_of(client_options(0.1))
    sim.client_update = update_of(client_options(0.05, optimizer="adam", optimizer_state="keep"))
    assert next(sim).lr == 0.05
    plain = pairs.federation()
    with pytest.raises(InvalidInput, match="from the start"):
        plain.client_update = update_of(client_options(0.1, optimizer="adam"))


# -- refused input -------------------------------------------------------------------------------

BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"optimizer": "adan"}, "client.optimizer", "adam"),
    ({"optimizer": {"name": "adam", "beta": 0.9}}, "client.optimizer.adam key", "betas"),
    ({"optimizer": {"name": "adam", "betas": [0.9]}}, "client.optimizer.betas", "two numbers"),
    ({"optimizer": {"name": "adam", "betas": [0.9, 1.0]}}, "client.optimizer.betas", "below 1"),
    ({"optimizer": {"name": "adam", "eps": 0}}, "client.optimizer.eps", "above 0"),
    ({"optimizer": {"name": "adamw", "weight_decay": -1}}, "client.optimizer.weight_decay", "at least 0"),
    ({"optimizer": {"name": "sgd", "nesterov": True}}, "client.optimizer.nesterov", "momentum"),
    ({"optimizer": {"name": "sgd", "momentum": 1}}, "client.optimizer.momentum", "below 1"),
    ({"optimizer": "adamw", "weight_decay": 0.1}, "client.weight_decay", "decay of its own"),
    ({"optimizer": Adam}, "client.optimizer", "a value with the functions init and step"),
    ({"optimizer": 3}, "client.optimizer", "a value with the functions init and step"),
    ({"optimizer_state": "forget"}, "client.optimizer_state", "keep"),
]


@pytest.mark.parametrize(("options", "field", "allowed"), BAD, ids=lambda value: str(value)[:40])
def test_an_invalid_optimizer_is_refused(options: dict[str, Any], field: str, allowed: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        update_of(client_options(0.1, **options))
    assert str(caught.value).startswith(field) and allowed in str(caught.value)


def test_names_and_objects_are_equivalent() -> None:
    assert update_of(client_options(0.1, optimizer="adam")).optimizer == Adam()
    assert update_of(client_options(0.1, optimizer={"name": "adamw", "betas": [0.8, 0.9]})).optimizer == AdamW(
        (0.8, 0.9)
    )
    assert (
        update_of(client_options(0.1, momentum=0.9)).optimizer
        == update_of(client_options(0.1, optimizer=SGD(0.9))).optimizer
        == SGD(0.9)
    )
    assert update_of(client_options(0.1)).optimizer == SGD()


class Hidden:
    """A moving average as a stage, which keeps values of the previous client."""

    def __init__(self) -> None:
        self.m: Tensor | float = 0.0

    def __call__(self, direction: Tensor, x: Tensor, correct: Any) -> Tensor:
        self.m = 0.9 * self.m + 0.1 * correct(x, direction)
        return self.m


class Counting(NamedTuple):
    """An optimizer with memory outside of its state."""

    calls: Any

    def init(self, x: Tensor) -> dict[str, Tensor]:
        return {}

    def step(self, state: dict[str, Tensor], direction: Tensor, x: Tensor, lr: Any) -> tuple[dict[str, Tensor], Tensor]:
        self.calls[0] += 1
        return state, lr * direction / self.calls[0]


class Calls:
    """A mutable number with a hash."""

    def __init__(self) -> None:
        self.value = 0

    def __getitem__(self, at: int) -> int:
        return self.value

    def __setitem__(self, at: int, value: int) -> None:
        self.value = value


class Coupled(NamedTuple):
    """An optimizer in which a client's row depends on the others."""

    def init(self, x: Tensor) -> dict[str, Tensor]:
        return {}

    def step(self, state: dict[str, Tensor], direction: Tensor, x: Tensor, lr: Any) -> tuple[dict[str, Tensor], Tensor]:
        return state, lr * direction / direction.norm()


class InPlace(NamedTuple):
    def init(self, x: Tensor) -> dict[str, Tensor]:
        return {"m": torch.zeros_like(x)}

    def step(self, state: dict[str, Tensor], direction: Tensor, x: Tensor, lr: Any) -> tuple[dict[str, Tensor], Tensor]:
        return state, lr * state["m"].add_(direction)


class Forgetful(NamedTuple):
    def init(self, x: Tensor) -> dict[str, Tensor]:
        return {"m": x}

    def step(self, state: dict[str, Tensor], direction: Tensor, x: Tensor, lr: Any) -> tuple[dict[str, Tensor], Tensor]:
        return {}, lr * direction


class OneThing(NamedTuple):
    """An optimizer that does not return its state."""

    def init(self, x: Tensor) -> dict[str, Tensor]:
        return {}

    def step(self, state: dict[str, Tensor], direction: Tensor, x: Tensor, lr: Any) -> Any:
        return lr * direction


IMPURE = {
    "again": (Counting(Calls()), "what it remembers must be in what it returns"),
    "neighbours": (Coupled(), "called with that node's row alone"),
    "in place": (InPlace(), r"changes its argument state\['m'\] in place"),
    "forgets": (Forgetful(), "a state like the one of init"),
    "one thing": (OneThing(), "step must return two things, the next state and what is subtracted"),
}


@pytest.mark.parametrize("name", IMPURE)
def test_an_impure_optimizer_is_refused_before_the_run(name: str) -> None:
    optimizer, why = IMPURE[name]
    with pytest.raises(InvalidInput, match=why):
        pairs.federation(leaf=client_options(0.1, optimizer=optimizer))


def test_a_stage_with_memory_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"client\.gradient_transforms.*Hidden.*optimizer"):
        pairs.federation(leaf=ClientUpdate(constant(0.1), (corrections, Hidden())))
    fine: list[Any] = [lambda d, x, correct: d * x.cos(), lambda d, x, correct: d * x.log().nan_to_num(1) + d.sqrt()]
    for stage in fine:  # NaN is no difference
        pairs.federation(leaf=ClientUpdate(constant(0.1), (corrections, clip(0.1), stage)))
    with pytest.raises(InvalidInput, match="a direction of the model's shape"):
        pairs.federation(leaf=ClientUpdate(constant(0.1), (lambda d, x, correct: None,)))
