"""Rejected updates and their reasons: values that are not finite, huge updates, and rounds without
any valid update."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from stratafl import InvalidInput, ParticipationContext, RoundResult, Simulation, Topology, rules
from stratafl.base.errors import join_names
from stratafl.base.topology import sibling_median
from stratafl.federation.update_checks import DEFAULT_RATIO, Rejection, limits_by_level
from stratafl.metrics.communication import Total
from stratafl.metrics.objective import Objective
from stratafl.metrics.records import LOST_ROUNDS, RankRecord, all_refused_error, merge_records
from stratafl.simulation.result import Result
from tests.flat import simulate
from tests.problems import without
from tests.slow import slow

SHAPES: dict[int, Any] = {1: 4, 2: [2, 3], 3: [[2, 1], [1, 3]]}
PERIODS = {1: [2], 2: [2, 2], 3: [2, 2, 2]}
FEATURES, CLASSES, EACH = 4, 3, 6
every_depth = pytest.mark.parametrize("depth", [slow(1), slow(2), 3])
every_engine = pytest.mark.parametrize("engine", ["loop", "vmap", "stacked"])
METHODS = ["hfedavg", "mtgc", {"name": "mtgc", "restart": "gradient"}, "scaffold", "feddyn", "fedprox", "adam"]
every_method = pytest.mark.parametrize("method", METHODS, ids=str)


def study(
    method: Any = "mtgc", depth: int = 2, *, scale: dict[int, float] | float = 1.0, double: bool = False, **more: Any
) -> Simulation:
    """A few clients; the inputs of those in `scale`, or of all, are of that size."""
    tree = Topology.of(more.pop("tree", SHAPES[depth]))
    random = torch.Generator().manual_seed(2)
    inputs = torch.randn(tree.leaves * EACH, FEATURES, generator=random)
    targets = (inputs @ torch.randn(FEATURES, CLASSES, generator=random)).argmax(dim=1)
    parts = [np.arange(EACH * client, EACH * (client + 1)) for client in range(tree.leaves)]
    sizes = scale if isinstance(scale, dict) else {} if scale == 1 else dict.fromkeys(range(tree.leaves), scale)
    for client, size in sizes.items():
        inputs[parts[client]] = inputs[parts[client]].sign() * size
    model = more.pop("model", lambda: nn.Linear(FEATURES, CLASSES))
    settings = {"periods": PERIODS[tree.depth], "rounds": 3, "batch": 3, "seed": 1, **more}
    inputs = inputs.double() if double else inputs
    return simulate(lambda: model().double() if double else model(), (inputs, targets), parts, tree, method, **settings)


def bits(result: Result) -> list[bytes]:
    corrections = [rows for rows in result.corrections if rows is not None]
    return [rows.numpy().tobytes() for rows in [*result.models, *corrections]]


# -- masks among the buffers ----------------------------------------------------------------------


class Attention(nn.Module):
    """Looks back only; the mask is a buffer, or a constant that no federation sees."""

    def __init__(self, is_buffer: bool, odd: float = -torch.inf) -> None:
        super().__init__()
        self.query, self.value, self.out = nn.Linear(1, 3), nn.Linear(1, 3), nn.Linear(3, CLASSES)
        mask = torch.full((FEATURES, FEATURES), -torch.inf).triu(1)
        unused = torch.tensor([odd, 1.0])
        if is_buffer:
            self.register_buffer("mask", mask)
            self.register_buffer("unused", unused)
        else:
            self.mask, self.unused = mask, unused
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        query, value = self.query(x[..., None]), self.value(x[..., None])
        seen = torch.softmax(query @ query.mT + self.mask, dim=-1) @ value
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * seen.detach().mean(dim=(0, 1))
        return self.out(seen.mean(dim=1))


@every_depth
@pytest.mark.parametrize("method", [*METHODS, "median", "momentum"], ids=str)
def test_a_mask_with_infinities_trains_as_if_it_were_no_buffer(method: Any, depth: int) -> None:
    masked = study(method, depth, model=lambda: Attention(True)).run()
    plain = study(method, depth, model=lambda: Attention(False)).run()
    assert masked.refused == plain.refused == {}
    assert bits(masked) == bits(plain)
    for rows, without_mask in zip(masked.buffers, plain.buffers, strict=True):
        assert torch.equal(rows[:, -3:], without_mask)
        assert (rows[:, :-3] == masked.buffers[0][0, :-3]).all()
    assert torch.equal(masked.module.mask, Attention(True).mask)


@every_engine
def test_masks_on_every_engine(engine: str) -> None:
    result = study(engine=engine, model=lambda: Attention(True)).run()
    assert result.refused == {}
    assert not torch.equal(result.models[0][0], study(rounds=1, model=lambda: Attention(True)).run().models[0][0])


@pytest.mark.parametrize("odd", [-torch.inf, torch.inf, torch.nan])
@pytest.mark.parametrize("participation", [None, 0.5, [0.6, 1]], ids=str)
def test_what_is_not_finite_and_stays_is_carried_over(odd: float, participation: Any) -> None:
    # the second client's weight is zero in float32, and zero times infinity is no number
    settings = {"participation": participation, "weights": [1, 1e-60, 1, 1, 1]}
    masked = study(model=lambda: Attention(True, odd), **settings).run()
    assert masked.refused == {}
    assert bits(masked) == bits(study(model=lambda: Attention(False, odd), **settings).run())
    assert torch.equal(masked.module.unused.nan_to_num(7), torch.tensor([odd, 1.0]).nan_to_num(7))


class Statistic(nn.Module):
    """Keeps a number of the data in a buffer that its output does not depend on."""

    def __init__(self, begins: float) -> None:
        super().__init__()
        self.out = nn.Linear(FEATURES, CLASSES)
        self.register_buffer("mask", torch.tensor([-torch.inf]))
        self.register_buffer("largest", torch.tensor([begins]))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            seen = x.detach().amax()
            self.largest = torch.where(self.largest.isfinite(), torch.maximum(self.largest, seen), seen[None])
        return self.out(torch.tanh(x))


@pytest.mark.parametrize("begins", [0.0, -torch.inf, torch.nan])
@every_depth
def test_a_statistic_that_is_not_finite_any_more_is_refused(depth: int, begins: float) -> None:
    """One client has infinite inputs, which affect its running statistic but not its model."""
    broken = 3
    settings = {"model": lambda: Statistic(begins)}
    result = study("hfedavg", depth, scale={broken: torch.inf}, **settings).run()
    name = result.tree.names[-1][broken]
    assert set(result.refused) == {name}
    expected = study("hfedavg", depth, participation=without(broken), **settings).run()
    assert torch.equal(result.models[0], expected.models[0])
    assert torch.equal(result.buffers[0], expected.buffers[0])
    assert result.buffers[0][0, 0] == -torch.inf and result.buffers[0][0, 1].isfinite()


def test_a_resumed_run_knows_its_masks() -> None:
    uninterrupted = study(model=lambda: Attention(True)).run()
    first, second = (study(model=lambda: Attention(True)) for _ in range(2))
    next(first)
    second.restore(first.state())
    assert bits(second.run()) == bits(uninterrupted)


# -- updates far larger than the others' -----------------------------------------------------------


@every_depth
@every_method
def test_a_client_with_huge_data_counts_as_absent(method: Any, depth: int) -> None:
    culprit = 1
    result = study(method, depth, scale={culprit: -1e38}, rounds=4).run()
    assert set(result.refused) == {result.tree.names[-1][culprit]}
    expected = study(method, depth, participation=without(culprit), rounds=4).run()
    for actual, right in zip(result.models[:-1], expected.models[:-1], strict=True):
        assert torch.equal(actual, right)
    for actual, right in zip(result.corrections, expected.corrections, strict=True):
        assert actual is None or torch.equal(actual, right)


@every_method
@pytest.mark.parametrize("size", [1e30, slow(-1e20), slow(1e12), 1e9])
def test_nobody_else_is_named_whatever_the_size(method: Any, size: float) -> None:
    """The huge client is not rejected when it has nothing to learn."""
    result = study(method, scale={1: size}, rounds=6).run()
    assert set(result.refused) == {"0/1"}
    assert result.models[0].abs().max() < 100


def test_the_reason_is_told() -> None:
    result = study("hfedavg", 1, scale={1: -1e38, 2: torch.nan}, periods=[1]).run()
    assert result.refused == {"1": 3, "2": 3}
    assert result.too_large == {"1": 3}
    assert [record.too_large for record in result.history] == [("1",)] * 3
    assert RoundResult.of(vars(result.history[0])) == result.history[0]
    assert result.history[0].drift["1"]["refused"] == 2


@pytest.mark.parametrize("tree", [1, 2, [1, 1], [1, 3], [2, 2]], ids=str)
@pytest.mark.parametrize("double", [False, True])
def test_few_siblings_or_none(tree: Any, double: bool) -> None:
    periods = [1] * Topology.of(tree).depth
    result = study("hfedavg", tree=tree, scale={0: -1e38}, double=double, rounds=2, periods=periods).run()
    assert set(result.refused) == {result.tree.names[-1][0]}
    assert result.models[0].abs().max() < 100


@pytest.mark.parametrize("participation", [1, [1, 1]], ids=str)
def test_a_culprit_that_is_drawn_alone(participation: Any) -> None:
    result = study("mtgc", scale={2: -1e38}, participation=participation, rounds=12).run()
    assert set(result.refused) == {"1/0"}


def test_more_than_one_of_three() -> None:
    result = study("hfedavg", 1, tree=3, scale={0: -1e38, 2: 1e37}, periods=[1]).run()
    assert result.refused == {"0": 3, "2": 3}


@every_method
@pytest.mark.parametrize("factor", [slow(1e-6), 0.0, slow(30.0), slow(1e3)])
def test_what_is_merely_different_changes_nothing(method: Any, factor: float) -> None:
    """A client of other units, or with nothing to learn."""
    limited, free = (study(method, 3, scale={1: factor}, update_limit=limit) for limit in (None, 0))
    assert bits(limited.run()) == bits(free.run())
    assert limited.result().refused == {}


def test_the_only_one_that_learns_is_not_refused() -> None:
    """The others' inputs are zero, and so are their gradients: any update is infinitely larger."""
    model = nn.Linear(FEATURES, CLASSES, bias=False)
    nn.init.zeros_(model.weight)
    result = study("hfedavg", 1, model=lambda: model, scale={0: 0.0, 1: 0.0, 2: 0.0}, batch=None).run()
    assert result.refused == {}
    assert result.models[0].abs().max() > 0


def test_when_all_explode_alike_none_is_the_culprit() -> None:
    result = study("hfedavg", 1, leaf=1e12, rounds=1, batch=None, periods=[1]).run()
    assert result.refused == {}
    assert result.models[0].abs().max() > 1e9


def test_the_limit_can_be_set_and_switched_off() -> None:
    data = {"scale": {1: 1e3}, "rounds": 1, "periods": [1, 1]}
    assert study("hfedavg", **data).run().refused == {}
    assert study("hfedavg", **data, update_limit=10).run().refused == {"0/1": 1}
    huge = {"scale": {1: 1e20}, "rounds": 1, "periods": [1, 1]}
    assert study("hfedavg", **huge, update_limit=0).run().models[0].abs().max() > 1e15
    assert study("median", **huge).run().refused == {}
    assert study("median", **huge, update_limit=100).run().refused == {"0/1": 1}
    for wrong in (-1, 0.5, float("nan"), "many"):
        with pytest.raises(InvalidInput, match="update_limit"):
            study(update_limit=wrong)


def test_by_default_only_rules_with_a_mean_are_limited() -> None:
    tree_rules = [rules.average(), rules.median(), rules.mtgc()]
    expected = {None: [DEFAULT_RATIO, None, DEFAULT_RATIO], 0: [None] * 3, 10: [10.0] * 3}
    for update_limit, ratios in expected.items():
        assert [limits.ratio for limits in limits_by_level(tree_rules, update_limit, None)] == ratios


@every_engine
def test_huge_data_on_every_engine(engine: str) -> None:
    result = study("mtgc", engine=engine, scale={0: -1e38}).run()
    assert set(result.refused) == {"0/0"}
    assert result.models[0].isfinite().all()


def test_the_median_of_the_others() -> None:
    random = np.random.default_rng(0)
    for _ in range(50):
        parent = np.sort(random.integers(0, 4, size=9))
        values, present = random.integers(0, 5, size=9).astype(float), random.random(9) < 0.7
        medians = sibling_median(values, present, parent)
        for node in range(9):
            others = sorted(values[present & (parent == parent[node]) & (np.arange(9) != node)])
            expected = others[(len(others) - 1) // 2] if others and present[node] else 0.0
            assert medians[node] == expected
    assert sibling_median(np.ones(3), np.zeros(3, dtype=bool), np.zeros(3, dtype=int)).tolist() == [0, 0, 0]


# -- when nothing is left --------------------------------------------------------------------------


@every_depth
def test_a_run_in_which_everything_is_refused_says_so_and_ends(depth: int, caplog: pytest.LogCaptureFixture) -> None:
    sim = study("mtgc", depth, scale=torch.nan, rounds=10)
    seen = [next(sim) for _ in range(LOST_ROUNDS)]
    with pytest.raises(InvalidInput, match=f"round = {LOST_ROUNDS}: every update was refused") as problem:
        next(sim)
    assert [record.renewed for record in seen] == [False] * LOST_ROUNDS
    assert "\n" not in str(problem.value) and "not finite" in str(problem.value)
    (line,) = caplog.messages
    assert line.startswith("round 1: every update was refused") and "not finite" in line
    # whoever asks again, having changed something, is let to try
    assert next(sim).round == LOST_ROUNDS + 1
    with pytest.raises(InvalidInput, match="every update was refused"):
        sim.run()


def test_the_last_round_tells_too() -> None:
    with pytest.raises(InvalidInput, match="every update was refused"):
        study(scale=torch.nan, rounds=LOST_ROUNDS).run()


def test_what_a_parent_cannot_merge_is_refused_as_a_whole() -> None:
    by = [1.0]  # as long as a rule is tried
    exploding = rules.average()._replace(merge=lambda memory, start, mean, share: (memory, mean["model"] / by[0]))
    simulation = study([exploding, rules.average()], rounds=5)
    by[0] = 0.0
    with pytest.raises(InvalidInput, match="not finite: root"):
        simulation.run()


def test_a_resumed_run_counts_on() -> None:
    first, second = (study(scale=torch.nan, rounds=10) for _ in range(2))
    next(first), next(first)
    second.restore(first.state())
    next(second)
    with pytest.raises(InvalidInput, match="3 rounds in a row"):
        next(second)


def test_a_healthy_client_now_and_then_keeps_a_run_alive() -> None:
    """Alone in its round, the broken client loses it, several times in a row; the run goes on to
    its end."""

    def mostly_the_first(chance: ParticipationContext) -> np.ndarray:
        return np.arange(4) == (0 if chance.round % 6 else 1)

    result = study("hfedavg", 1, scale={0: torch.nan}, participation=mostly_the_first, rounds=12).run()
    assert result.refused == {"0": 10}
    assert [record.renewed for record in result.history] == [True, *[False] * 5] * 2


# -- many ------------------------------------------------------------------------------------------


def test_thirty_thousand_refusals_are_told_in_no_time() -> None:
    tree, count = Topology.of("300x100"), 30_000
    half = count // 2
    refusals = [Rejection(name, False) for name in tree.names[-1]]
    parts = [
        RankRecord(
            rejected=[refusals[part]] * 2,
            renewed=False,
            evaluation=None,
            nodes=[],
            traffic=[Total(0, 0, 0, 0)] * 2,
            drift=[(2, "drift", [1.0], [1.0])],
            clipped=None,
            client_steps=1,
        )
        for part in (slice(half, None), slice(half))
    ]
    began = time.perf_counter()
    history = [
        merge_records(tree, parts, Objective(nn.CrossEntropyLoss()), round=round, steps=round, lr=0.1, seconds=0.0)
        for round in (1, 2, 3)
    ]
    assert all_refused_error(tree, history, warns=False) is not None
    result = Result(tree, nn.Identity(), [], [], history, None, None, [])  # type: ignore[arg-type]
    assert set(result.refused.values()) == {6} and len(result.refused) == count
    # each takes half a minute or more where every name is searched for
    assert time.perf_counter() - began < 5
    assert history[0].refused == tree.names[-1] * 2
    assert history[0].drift["2"]["refused"] == 2 * count


def test_names_of_two_nodes_alike_are_found_in_no_time() -> None:
    names = [str(number) for number in range(30_000)]
    began = time.perf_counter()
    with pytest.raises(InvalidInput, match="'29999'"):
        Topology.of([*names, "29999"])
    assert time.perf_counter() - began < 5


def test_a_line_shows_a_few_names() -> None:
    assert join_names(["a", "b"]) == "a, b"
    assert join_names([str(number) for number in range(30_000)]) == "0, 1, 2, 3, 4 and 29,995 more"
