"""Late updates that are applied: against an event simulation that also learns, at their limits, and
where corrections converge."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
import torch

from stratafl import InvalidInput, Simulation, average
from stratafl.base.topology import Topology
from stratafl.federation.state import supports_late_updates
from stratafl.metrics.records import ClockedRound
from stratafl.network.instance import BYTES_PER_MBIT
from stratafl.rules.registry import entries, place
from tests.network.late_events import LateWorld
from tests.problems import LeastSquares, random_weights, root
from tests.slow import slow

LINK = 1.0
HEAVY = {
    "tier": [
        {"up_mbit_s": LINK, "down_mbit_s": 1e12, "latency_s": {"name": "lognormal", "median": 0.02, "sigma": 1.0}}
    ],
    "leaf": {"step_s": {"name": "lognormal", "median": 0.05, "sigma": 1.2}},
}
NEVER = {"first": 10**6, "late": "counts"}
RULES: dict[str, Any] = {
    "average": "hfedavg",
    "mtgc": "mtgc",
    "mtgc, kept": {"name": "mtgc", "restart": "keep"},
    "scaffold": "scaffold",
    "fedprox": "fedprox",
    "momentum": "momentum",
}


def waits(buffers: list[int | None], staleness: float) -> list[Any]:
    return ["all" if buffer is None else {"buffer": buffer, "staleness": staleness} for buffer in buffers]


def simulated(problem: LeastSquares, rules: Any, wait: Any, network: Any = HEAVY, **settings: Any) -> Simulation:
    settings = {"rounds": 6, "seed": 3, **settings}
    return problem.simulation(rules, network=network, wait=wait, **settings)


# -- against an event simulation -------------------------------------------------------------------

CASES: list[tuple[Any, list[int], list[int | None]]] = [
    (5, [3], [2]),
    (4, [2], [1]),
    ("2x3", [2, 3], [None, 2]),
    ("3x3", [3, 2], [2, None]),
    ("3x4", [2, 2], [2, 2]),
    ([3, 1, 4], [2, 2], [1, 2]),
    ("2x2x3", [2, 2, 2], [None, None, 1]),
    ("3x2x2", [2, 1, 2], [2, None, None]),
    ("2x3x2", [1, 2, 2], [None, 2, None]),
    ("2x3x3", [2, 2, 2], [1, 2, 2]),
]


@pytest.mark.parametrize("method", ["average", slow("mtgc"), "mtgc, kept"])
@pytest.mark.parametrize("case", range(len(CASES)))
@pytest.mark.parametrize("pipe", [slow(None), 1.3])
def test_time_and_learning_are_those_of_an_event_simulation(method: str, case: int, pipe: float | None) -> None:
    shape, periods, buffers = CASES[case]
    if method != "average":
        buffers = [2 if buffer == 1 else buffer for buffer in buffers]
    problem = LeastSquares(shape, weights=random_weights(shape, seed=case), seed=case)
    tier = HEAVY["tier"][0] | ({} if pipe is None else {"pipe_up_mbit_s": pipe})
    rules = place(RULES[method], problem.tree.depth)
    network = {**HEAVY, "tier": [tier]}
    simulation = simulated(problem, rules, waits(buffers, 0.7), network, periods=periods, seed=case, rounds=8)
    assert simulation.clock is not None
    instance, sizes = simulation.clock.instance, simulation.clock.workload.sizes
    world = LateWorld(
        problem,
        periods,
        buffers,
        corrects=method != "average",
        restart="keep" if "kept" in method else "zero",
        staleness=0.7,
        lr=0.05,
        seconds=lambda leaf: float(periods[-1] * instance.devices.step_s_N[leaf]),
        delay=lambda level, node: float(instance.link(level).latency_N[node]),
        size=lambda level: float(sizes.edge(level).upload_bytes),
        link=LINK * BYTES_PER_MBIT,
        pipe=1e18 if pipe is None else pipe * BYTES_PER_MBIT,
    )
    late = 0
    for seconds, model in world.run(8):
        record = next(simulation)
        assert isinstance(record, ClockedRound)
        late += len(record.late)
        np.testing.assert_allclose(record.clock_total, seconds, rtol=1e-7)
        np.testing.assert_allclose(root(simulation.result()), model, rtol=1e-9, atol=1e-10)
    assert late


@pytest.mark.parametrize("policy", [{"deadline": 0.2, "late": "counts"}, {"first": 0.5, "late": "counts"}])
def test_late_work_counts_with_a_share_or_a_deadline(policy: dict[str, Any]) -> None:
    """Expected times on a star whose links take no time and whose children compute for fixed
    times."""
    problem, network = LeastSquares(4, seed=1), {"tier": [{"up_mbit_s": 1e12}], "leaf": {"step_s": 1.0}}
    times = [0.05, 0.11, 0.19, 0.45]
    network["nodes"] = {str(n): {"step_s": seconds / 2} for n, seconds in enumerate(times)}
    simulation = simulated(problem, place("hfedavg", 1), policy, network, periods=[2], rounds=5)
    ends, merged = _by_hand(times, policy, rounds=5)
    heard = simulation.clock.late_update_policies()[1].reporting  # type: ignore[union-attr]
    for number, (end, who) in enumerate(zip(ends, merged, strict=True)):
        record = next(simulation)
        assert isinstance(record, ClockedRound)
        assert record.clock_total == pytest.approx(end, rel=1e-6)
        assert set(np.flatnonzero(heard(number)).tolist()) == who


def _by_hand(times: list[float], policy: dict[str, Any], rounds: int) -> tuple[list[float], list[set[int]]]:
    time, arrivals, ends, merged = 0.0, dict[int, float](), list[float](), list[set[int]]()
    for _ in range(rounds):
        arrivals |= {child: time + seconds for child, seconds in enumerate(times) if child not in arrivals}
        order = sorted(arrivals, key=lambda child: arrivals[child])
        if "deadline" in policy:
            in_time = [child for child in order if arrivals[child] <= time + policy["deadline"]]
            arrived = in_time or order[:1]
            time = (
                max(arrivals[child] for child in arrived) if len(arrived) == len(order) else time + policy["deadline"]
            )
        else:
            arrived = order[: round(policy["first"] * len(order))]
            time = max(time, arrivals[arrived[-1]])
        for child in arrived:
            del arrivals[child]
        ends.append(time)
        merged.append(set(arrived))
    return ends, merged


# -- at its limits ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("shape", [4, "2x3", "2x2x2"])
@pytest.mark.parametrize("participation", [slow(None), 0.5])
def test_a_buffer_of_everybody_is_the_synchronous_run(name: str, shape: Any, participation: float | None) -> None:
    problem = LeastSquares(shape, seed=2)
    depth = problem.tree.depth
    settings = {"rounds": 3, "participation": [participation] * depth, "drift": "drift"}
    simulations = [
        simulated(problem, place(RULES[name], depth), wait, **settings) for wait in ([NEVER] * depth, ["all"] * depth)
    ]
    buffered, synchronous = (sim.run(progress=False) for sim in simulations)
    assert [rows.tolist() for rows in buffered.models] == [rows.tolist() for rows in synchronous.models]
    one, other = (
        [{**asdict(record), "seconds": None} for record in result.history] for result in (buffered, synchronous)
    )
    for record, other_record in zip(one, other, strict=True):
        assert record.pop("clock_total") == pytest.approx(other_record.pop("clock_total"))
        assert record.pop("clock_seconds") == pytest.approx(other_record.pop("clock_seconds"))
    assert one == other
    states = [
        {key: rows.tolist() for key, rows in level.state.items()}
        for sim in simulations
        for level in sim.federation.levels
    ]
    assert states[: depth + 1] == states[depth + 1 :]


def test_those_at_work_are_as_many_as_take_part() -> None:
    problem = LeastSquares("2x6", seed=4)
    simulation = simulated(
        problem, place("hfedavg", 2), ["all", {"buffer": 1}], participation=[None, 3], periods=[4, 1]
    )
    began: list[np.ndarray] = []
    while not simulation.done:
        simulation.advance()
        level = simulation.federation.levels[2]
        assert level.pending is not None
        began.append(level.active_N.reshape(2, 6))
        # one of three was merged, and so one begins
        assert level.pending.mask_N.reshape(2, 6).sum(axis=1).tolist() == [2, 2]
    assert began[0].sum(axis=1).tolist() == [3, 3]
    assert all(mask.sum(axis=1).tolist() == [1, 1] for mask in began[1:])
    assert (np.sum(began, axis=0) > 0).all(), "everybody has a turn"


# -- where corrections lead ------------------------------------------------------------------------

OFTEN: dict[str, tuple[Any, list[Any]]] = {
    "star": (5, [{"buffer": 2}]),
    "clients": ("3x3", ["all", {"buffer": 2}]),
    "groups": ("3x3", [{"buffer": 2}, "all"]),
    "both": ("3x3", [{"buffer": 2, "staleness": 0}, {"buffer": 2}]),
    "three levels": ("2x3x3", [{"buffer": 2}, {"buffer": 2}, {"buffer": 2}]),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name != "star" else []) for name in OFTEN]
)
@pytest.mark.parametrize("rules", [{"name": "mtgc", "restart": "keep"}, slow("scaffold")])
def test_corrections_lead_to_the_optimum_of_the_synchronous_run(name: str, rules: Any) -> None:
    shape, wait = OFTEN[name]
    problem = LeastSquares(shape, seed=5)
    depth = problem.tree.depth
    per_level = [place(rules, 1)[0]] * depth
    settings = {"periods": [2] * depth, "rounds": 400, "lr": 0.03}
    corrected = root(simulated(problem, per_level, wait, **settings).run(progress=False))
    without = root(simulated(problem, [average()] * depth, wait, **settings).run(progress=False))
    best = problem.minimiser()
    distance, drifted = np.abs(corrected - best).max(), np.abs(without - best).max()
    # who is fast comes more often, and draws an average towards its own optimum
    assert drifted > 0.2
    assert distance < 1e-3 * drifted


@pytest.mark.slow
def test_longer_global_rounds_get_closer_with_reset_corrections() -> None:
    shape, wait = OFTEN["clients"]
    problem = LeastSquares(shape, seed=5)
    best, distances = problem.minimiser(), []
    for rules, period in (("hfedavg", 10), ("mtgc", 2), ("mtgc", 10), ("mtgc", 30)):
        ran = simulated(problem, place(rules, 2), wait, periods=[period, 2], rounds=200, lr=0.03)
        distances.append(np.abs(root(ran.run(progress=False)) - best).max())
    average_10, mtgc_2, mtgc_10, mtgc_30 = distances
    assert mtgc_30 < 0.5 * mtgc_10 < 0.5 * 0.5 * mtgc_2
    assert mtgc_10 < 0.2 * average_10


@pytest.mark.parametrize("name", OFTEN)
@pytest.mark.parametrize("restart", ["zero", "keep"])
def test_what_siblings_learn_adds_up_to_zero(name: str, restart: str) -> None:
    shape, wait = OFTEN[name]
    problem = LeastSquares(shape, weights=random_weights(shape), seed=6)
    depth = problem.tree.depth
    simulation = simulated(problem, place({"name": "mtgc", "restart": restart}, depth), wait)
    moved = 0.0
    while not simulation.done:
        simulation.advance()
        for level in range(1, depth + 1):
            z_NP = simulation.federation.levels[level].state["z"]
            moved = max(moved, float(z_NP.abs().max()))
            mean_MP = simulation.federation.tree.mean(level, z_NP)
            np.testing.assert_allclose(mean_MP.numpy(), 0, atol=1e-11)
    assert moved > 0


# -- rules that say whether they can ---------------------------------------------------------------


def test_every_rule_trains_or_is_refused_with_the_reason() -> None:
    problem, refused = LeastSquares("3x3", seed=7), set()
    for entry in entries():
        rules = [entry.rule()] * 2
        if supports_late_updates(rules[0]):
            result = simulated(problem, rules, [{"buffer": 2}, {"buffer": 2}]).run(progress=False)
            assert np.isfinite(root(result)).all()
            continue
        refused.add(entry.name)
        with pytest.raises(InvalidInput, match="keeps something at each child"):
            simulated(problem, rules, [{"buffer": 2}, {"buffer": 2}])
    assert refused == {"feddyn"}


def test_a_rule_of_ones_own_says_it() -> None:
    problem = LeastSquares(3, seed=8)
    remembering = average()._replace(init=lambda x: {"seen": torch.zeros_like(x)}, up=_seen)
    with pytest.raises(ValueError, match="rule of edge level 1 keeps something"):
        simulated(problem, [remembering], {"buffer": 1})
    ran = simulated(problem, [remembering._replace(counts_late=True)], {"buffer": 1}).run(progress=False)
    plain = simulated(problem, [average()], {"buffer": 1}).run(progress=False)
    assert root(ran).tolist() == root(plain).tolist()


def _seen(state: Any, x: torch.Tensor, edge: Any) -> tuple[Any, Any]:
    return {"seen": x}, {"model": x}


@pytest.mark.parametrize("policy", [{"buffer": 1}, {"first": 0.3, "late": "counts"}])
def test_what_is_learnt_by_comparing_needs_two_to_compare(policy: Any) -> None:
    problem = LeastSquares("2x4", seed=8)
    with pytest.raises(ValueError, match="edge level 2 learns from a meeting of two children at least"):
        simulated(problem, place("mtgc", 2), policy)
    for rules, wait in (("scaffold", policy), ("mtgc", {"first": 0.5, "late": "counts"})):
        assert np.isfinite(root(simulated(problem, place(rules, 2), wait).run(progress=False))).all()


def test_late_names_are_of_the_tree() -> None:
    simulation = simulated(LeastSquares("2x4", seed=9), place("hfedavg", 2), {"buffer": 2})
    tree, late = Topology.of("2x4"), []
    for record in simulation:
        assert isinstance(record, ClockedRound)
        late += list(record.late)
    assert late and all(tree.find(name)[0] == 2 for name in late)
