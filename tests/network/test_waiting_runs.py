"""Runs with waiting policies: late nodes are absent, equally in all engines, and priced as
recorded."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from stratafl import InvalidInput, ParticipationContext, Simulation, cost
from stratafl.base.topology import Topology
from stratafl.cli.main import app
from stratafl.costs.costs import PriceableRun
from stratafl.costs.pricing import time_breakdown
from stratafl.deploy.sites.topology import check_deployable
from stratafl.engine.factory import make_engine
from stratafl.experiment.experiment import Experiment
from stratafl.metrics.records import ClockedRound, RoundResult
from stratafl.network.specification import Network, network, presets
from stratafl.rules.registry import place
from stratafl.runs import read_run
from tests.costs.test_pricing import experiment, trained
from tests.flat import client_options
from tests.problems import LeastSquares
from tests.runs.test_within import check_every_meeting, within
from tests.slow import slow_unless

NETWORK = {
    "name": "ours",
    "tier": [{"up_mbit_s": 1.0, "latency_s": 0.01, "jitter_s": {"name": "pareto", "least": 0.002, "alpha": 1.2}}],
    "leaf": {"step_s": {"name": "lognormal", "median": 0.05, "sigma": 1.0},
             "slowdown": {"name": "pareto", "least": 1.0, "alpha": 1.5}},
}  # fmt: skip
POLICIES: dict[str, Any] = {
    "the first two": {"first": 2},
    "a share": [{"first": 0.5}, {"first": 0.7}],
    "a deadline": {"deadline": 0.15},
    "both": [{"deadline": 0.6}, {"first": 2, "deadline": 0.2}],
}
LATER: dict[str, Any] = {
    "a buffer": {"buffer": 2},
    "buffers": [{"buffer": 2}, {"buffer": 2, "staleness": 1.0}],
    "groups": [{"first": 0.8, "late": "counts"}, "all"],
    "late work": {"deadline": 0.15, "late": "counts", "staleness": 0},
}
EVERY = POLICIES | LATER


def waiting(wait: Any, **settings: Any) -> Simulation:
    options: dict[str, Any] = {"participation": [None, 3], "seed": 2, "rounds": 3, "network": NETWORK, **settings}
    problem = LeastSquares("3x4", seed=1)
    return problem.simulation(options.pop("rules", place("mtgc", 2)), wait=wait, **options)


def records(simulation: Simulation) -> list[dict[str, Any]]:
    return [{**asdict(record), "seconds": None} for record in simulation.run(progress=False).history]


def clocked(simulation: Simulation) -> list[ClockedRound]:
    history = simulation.run(progress=False).history
    assert all(isinstance(record, ClockedRound) for record in history)
    return history  # type: ignore[return-value]


@pytest.mark.parametrize("name", slow_unless(lambda name: name in ("a share", "both"), POLICIES))
def test_who_is_late_is_as_absent_as_who_is_not_drawn(name: str) -> None:
    """Compare with a run whose participation function leaves out the same nodes."""
    simulation = waiting(POLICIES[name])
    participating = simulation.federation.edges[1].participation
    assert callable(participating)
    reference = waiting(None, network=None, participation=[participating, participating])
    result, expected = simulation.run(progress=False), reference.run(progress=False)
    assert [rows.tolist() for rows in result.models] == [rows.tolist() for rows in expected.models]
    late = [name for record in clocked(simulation) for name in record.late]
    assert late
    common = {name: value for name, value in asdict(expected.history[-1]).items() if name != "seconds"}
    last = asdict(result.history[-1])
    assert {key: last[key] for key in common} == common
    assert "late" not in asdict(expected.history[-1])


@pytest.mark.parametrize("name", POLICIES)
def test_time_is_saved_and_those_left_out_are_named(name: str) -> None:
    everybody, few = clocked(waiting(None)), clocked(waiting(POLICIES[name]))
    assert all(one.clock_seconds < other.clock_seconds for one, other in zip(few, everybody, strict=True))
    assert not any(record.late for record in everybody)
    np.testing.assert_allclose(
        [record.clock_total for record in few], np.cumsum([record.clock_seconds for record in few])
    )
    tree = Topology.of("3x4")
    assert all(tree.find(name)[0] in (1, 2) for record in few for name in record.late)
    assert RoundResult.of(asdict(few[0])) == few[0]


def test_a_network_alone_changes_nothing_but_what_is_recorded() -> None:
    with_network, plain = waiting(None), waiting(None, network=None)
    assert with_network.run(progress=False).models[0].tolist() == plain.run(progress=False).models[0].tolist()
    assert "clock_seconds" in with_network.result().frame().columns
    assert not {"clock_seconds", "late"} & set(plain.result().frame().columns)


@pytest.mark.parametrize("name", slow_unless(lambda name: name in ("both", "buffers", "groups"), EVERY))
def test_every_engine_and_every_chunk(name: str) -> None:
    def run(engine: str, chunk: int | None = None) -> tuple[list[Any], torch.Tensor]:
        simulation = waiting(EVERY[name], engine=engine)
        if chunk is not None:
            simulation.engine = make_engine("stacked", simulation.engine.training, chunk_size=chunk)
        times = [(record.clock_seconds, record.clock_total, record.late) for record in clocked(simulation)]
        return times, simulation.result().models[0]

    times, model = run("loop")
    for engine, chunk in (("vmap", None), ("stacked", None), ("stacked", 1), ("stacked", 3)):
        other, close = run(engine, chunk)
        assert other == times
        torch.testing.assert_close(close, model, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", slow_unless(lambda name: name in ("both", "buffers", "groups"), EVERY))
def test_left_after_any_meeting(name: str, tmp_path: Path) -> None:
    more = {"wait": EVERY[name], "network": NETWORK, "participation": [None, 2]}
    check_every_meeting(lambda: within("mtgc", 2, **more), tmp_path)


@pytest.mark.parametrize("name", LATER)
def test_what_leaves_keep_counts_when_their_reports_do(name: str, tmp_path: Path) -> None:
    more = {"wait": LATER[name], "network": NETWORK, "leaf": client_options(0.05, momentum=0.5, optimizer_state="keep")}
    check_every_meeting(lambda: within("hfedavg", 2, **more), tmp_path)


@pytest.mark.parametrize("wait", [{"first": 2}, {"buffer": 2}])
def test_a_state_of_an_earlier_round_is_gone_back_to(wait: Any) -> None:
    simulation, other = waiting(wait), waiting(wait)
    expected = records(simulation)
    next(other)
    early = {**other.state(), "history": [asdict(record) for record in other.history]}
    simulation.restore(early)
    assert records(simulation) == expected


@pytest.mark.parametrize("restart", ["zero", "keep"])
@pytest.mark.parametrize("name", POLICIES)
def test_corrections_stay_zero_sum(name: str, restart: str) -> None:
    simulation = waiting(POLICIES[name], rules=place({"name": "mtgc", "restart": restart}, 2), rounds=4)
    moved = 0.0
    while not simulation.done:
        simulation.advance()
        for level in (1, 2):
            correction = simulation.federation.levels[level].correction
            assert correction is not None
            moved = max(moved, float(correction.abs().max()))
            mean = simulation.federation.tree.mean(level, correction)
            np.testing.assert_allclose(mean.numpy(), 0, atol=1e-11)
    assert moved > 0


def test_a_users_own_draw_is_asked_once_a_round() -> None:
    asked: list[tuple[int, int]] = []

    def halves(draw: ParticipationContext) -> np.ndarray:
        asked.append((draw.level, draw.round))
        return np.arange(draw.tree.sizes[draw.level]) % 2 == draw.round % 2

    simulation = waiting({"first": 1}, participation=[None, halves])
    first = next(simulation)
    assert asked == [(2, 0), (2, 1), (2, 2)]
    assert isinstance(first, ClockedRound) and first.late
    # of a group's children 0 and 2 are drawn, or 1 and 3: one of them is late
    assert len(first.late) == 3 * 3


def test_a_parent_that_hears_nobody_in_time_waits_for_the_first() -> None:
    hasty = clocked(waiting({"deadline": 1e-6}, participation=None, rounds=2))
    first = clocked(waiting({"first": 1}, participation=None, rounds=2))
    assert [(record.clock_seconds, record.late) for record in hasty] == [
        (record.clock_seconds, record.late) for record in first
    ]
    assert all(len(record.late) == 3 * 3 * 3 for record in hasty)


@pytest.mark.parametrize("policy", ["all", {"first": 2}, {"buffer": 2}])
def test_a_meeting_for_which_nobody_is_drawn_takes_no_time(policy: Any) -> None:
    """Check that time does not go back: neither that of a group in its global round, nor that of
    the run."""

    def not_second(draw: ParticipationContext) -> np.ndarray:
        return np.full(draw.tree.sizes[draw.level], draw.round % 2 == 0)

    options = {
        "network": {"tier": {"up_mbit_s": 1e12}, "leaf": {"step_s": 0.1}},
        "rounds": 3,
        "rules": place("hfedavg", 2),
    }
    clients = clocked(waiting(["all", policy], periods=[2, 3], participation=[None, not_second], **options))
    assert [record.clock_seconds for record in clients] == pytest.approx([0.3] * 3)
    groups = clocked(waiting([policy, "all"], periods=[2, 3], participation=[not_second, None], **options))
    assert [record.clock_seconds for record in groups] == pytest.approx([0.6, 0.0, 0.6])


@pytest.mark.parametrize(
    ("policy", "late"),
    [
        ("all", ()),
        ({"first": 1}, ("2",)),
        ({"first": 0.5}, ("2",)),
        ({"deadline": 0.1}, ("2",)),
        ({"buffer": 1}, ("2",)),
    ],
    ids=str,
)
def test_a_group_in_which_nobody_is_drawn_has_no_model_to_report(policy: Any, late: tuple[str, ...]) -> None:
    """Check that its parent learns that there is no model, without a transfer and without taking a
    child's place."""

    def not_in_group_0(draw: ParticipationContext) -> np.ndarray:
        return draw.tree.parents[draw.level] > 0

    network = {
        "tier": {"up_mbit_s": 1e12, "merge_s_per_child": 0.01},
        "leaf": {"step_s": 0.1},
        "nodes": {"0": {"up_mbit_s": 1e-6, "down_mbit_s": 1e12}, "1": {"latency_s": 0.0}, "2": {"latency_s": 0.01}},
    }
    options = {"network": network, "rounds": 1, "rules": place("hfedavg", 2), "periods": [2, 3]}
    simulation = waiting([policy, "all"], participation=[None, not_in_group_0], **options)
    (round,) = clocked(simulation)
    # 2 x 3 steps and two meetings of 4 clients, then the root's: of both groups, or of the first
    both, one = 0.6 + 0.08 + 0.02 + 0.02, 0.6 + 0.08 + 0.01
    assert round.clock_seconds == pytest.approx(both if policy == "all" else one)
    assert round.late == late and round.renewed
    sent = simulation.result().communication
    assert [sent.node(1, group).messages_up for group in range(3)] == [0, 1, int(policy == "all")]


def test_of_equal_children_the_first_in_the_tree_come_first() -> None:
    even = {"tier": {"up_mbit_s": 1.0}, "leaf": {"step_s": 0.1}}
    (record,) = clocked(waiting({"first": 3}, network=even, participation=None, rounds=1))
    assert set(record.late) == {"0/3", "1/3", "2/3"}


def test_a_late_group_is_named_and_its_clients_are_not() -> None:
    slow = {**NETWORK, "leaf": {"step_s": 0.01}, "nodes": {"1": {"latency_s": 50.0}}}
    (record,) = clocked(waiting([{"deadline": 2.0}, "all"], network=slow, participation=None, rounds=1))
    assert record.late == ("1",) and record.clock_seconds == 2.0


# -- priced ----------------------------------------------------------------------------------------

TIMED = {"network": NETWORK}


def test_the_price_on_its_own_network_is_what_was_recorded(tmp_path: Path) -> None:
    for number, wait in enumerate([None, *EVERY.values()]):
        schedule = {"periods": [2, 3], "participation": [1.0, 3], **({} if wait is None else {"wait": wait})}
        run = trained(experiment(schedule=schedule, tree={"shape": "3x4"}, **TIMED), tmp_path / str(number))
        priced = PriceableRun.of(run)
        costs = priced.cost_on(Network.of(NETWORK))
        recorded = [record["clock_seconds"] for record in run.rounds]
        np.testing.assert_allclose(costs.seconds_R, recorded, rtol=1e-12)
        np.testing.assert_allclose(sum(costs.parts.values()), recorded, rtol=1e-9)
        assert run.rounds[-1]["clock_total"] == pytest.approx(costs.up_to_round(len(run.rounds)).seconds)
        assert bool(sum(run.left_out["late"].values())) == (wait is not None)
        assert priced.recovered.notes == ()
        (setting,) = cost([run], Network.of(NETWORK))
        assert sum(time_breakdown(setting.milestones[-1], setting.levels).values()) == pytest.approx(sum(recorded))
        for round in (1, len(recorded)):
            activities = priced.intervals(Network.of(NETWORK), round)
            assert {activity.kind for activity in activities} >= {"down", "compute", "up", "merge"}
            assert all((activity.begin_RN <= activity.end_RN)[activity.active_RN].all() for activity in activities)
            furthest = max(
                float(activity.end_RN[activity.active_RN].max()) for activity in activities if activity.active_RN.any()
            )
            assert furthest >= recorded[round - 1] * (1 - 1e-9)


def test_another_network_is_refused_with_the_reason(tmp_path: Path) -> None:
    run = trained(experiment(schedule={"periods": [2, 3], "wait": {"first": 2}}, **TIMED), tmp_path)
    with pytest.raises(InvalidInput, match="waited by time on ours, on which its learning depends"):
        cost([run], "plato")
    ran = CliRunner().invoke(app, ["cost", str(tmp_path), "--network", "plato"])
    assert isinstance(ran.exception, InvalidInput)
    ran = CliRunner().invoke(app, ["cost", str(tmp_path), "--network", "own", "--json"])
    assert ran.exit_code == 0, ran.output
    (row,) = json.loads(ran.stdout)
    assert row["network"] == "ours"
    ran = CliRunner().invoke(app, ["report", str(tmp_path), "--network", "own", "--out", str(tmp_path / "page.html")])
    assert ran.exit_code == 0, ran.output
    assert "seconds on ours" in (tmp_path / "page.html").read_text()
    everybody = trained(experiment(**TIMED), tmp_path / "all")
    assert cost([everybody], "plato")[0].milestones[0].seconds is not None
    trained(experiment(), tmp_path / "none")
    ran = CliRunner().invoke(app, ["cost", str(tmp_path), "--network", "own"])
    assert isinstance(ran.exception, InvalidInput) and "the same for all" in str(ran.exception)


def test_own_is_the_runs_network_from_python_too(tmp_path: Path) -> None:
    run = trained(experiment(schedule={"periods": [2, 3], "wait": {"first": 2}}, **TIMED), tmp_path)
    (priced,) = cost(tmp_path, "own")
    assert priced == cost([run], [Network.of(NETWORK)])[0] and priced.network == "ours"
    trained(experiment(), tmp_path / "none")
    with pytest.raises(InvalidInput, match="network = 'own': is for runs in the virtual time"):
        cost([tmp_path, tmp_path / "none"], ["own"])


def test_operations_are_counted_where_a_network_needs_them(tmp_path: Path) -> None:
    computing = {**NETWORK, "leaf": {"gflop_s": {"name": "lognormal", "median": 0.01, "sigma": 0.5}}}
    run = trained(experiment(schedule={"periods": [2, 3], "wait": {"first": 2}}, network=computing), tmp_path / "flops")
    # two products of 64 x 8 and 8 x 10 numbers, two operations each, three times
    assert run.workload["flops_per_sample"] == 3 * 2 * (64 * 8 + 8 * 10)
    result = PriceableRun.of(run).cost_on(Network.of(computing))
    np.testing.assert_allclose(result.seconds_R, [record["clock_seconds"] for record in run.rounds], rtol=1e-12)


def test_a_run_from_python_is_priced_too_and_goes_on(tmp_path: Path) -> None:
    first = waiting({"first": 2}, save=tmp_path / "run", rounds=3)
    next(first)
    next(first)
    del first
    second = waiting({"first": 2}, save=tmp_path / "run", rounds=3)
    second.run(progress=False)
    uninterrupted = records(waiting({"first": 2}))
    run = read_run(tmp_path / "run")
    assert [record["clock_seconds"] for record in run.rounds] == [record["clock_seconds"] for record in uninterrupted]
    result = PriceableRun.of(run).cost_on(Network.of(NETWORK))
    np.testing.assert_allclose(result.seconds_R, [record["clock_seconds"] for record in run.rounds], rtol=1e-12)


@pytest.mark.parametrize("name", presets())
def test_a_network_as_tables_is_the_same_network(name: str) -> None:
    tables = network(name)
    again = Network.of(tables.as_tables())
    assert again == tables and again.same_parameters(tables)


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"wait": {"first": 2}, "network": None}, "wait.*needs a network"),
        ({"wait": ["all"]}, "wait.*one entry per edge level, 2"),
        ({"wait": "some"}, 'wait.*must be "all"'),
        ({"wait": {}}, 'wait.*must be "all"'),
        ({"wait": np.array([2, 2])}, 'wait.*must be "all"'),
        ({"wait": {"deadlin": 3}}, "wait key.*deadline"),
        ({"wait": {"deadline": 0}}, "wait.deadline"),
        ({"wait": {"deadline": float("nan")}}, "wait.deadline"),
        ({"wait": {"first": 0}}, "wait.first"),
        ({"wait": {"first": 1.5}}, "wait.first"),
        ({"wait": {"first": True}}, "wait.first"),
        ({"wait": {"buffer": 0}}, "wait.buffer"),
        ({"wait": {"buffer": 2.5}}, "wait.buffer"),
        ({"wait": {"buffer": 2, "deadline": 3}}, "wait.buffer.*is short for"),
        ({"wait": {"buffer": 2, "late": "stops"}}, "wait.buffer.*is short for"),
        ({"wait": "async"}, "wait.*buffer = 10"),
        ({"wait": {"late": "counts"}}, "where a deadline or first says who is late"),
        ({"wait": {"first": 2, "late": "later"}}, "wait.late"),
        ({"wait": {"first": 2, "staleness": 1}}, "wait.staleness"),
        ({"wait": {"buffer": 2, "staleness": -1}}, "wait.staleness"),
        ({"wait": [{"first": 1}, {"buffer": 2}]}, "a node that is stopped would take its children's"),
        ({"wait": {"buffer": 2}, "rules": place("feddyn", 2)}, "edge level 2 keeps something at each child"),
        ({"wait": {"buffer": 2}, "lr": client_options(0.1, optimizer="adam")}, "client.optimizer is SGD"),
        ({"wait": {"first": 1}, "rules": place({"name": "mtgc", "restart": "gradient"}, 2)}, "from gradients"),
        ({"wait": None, "network": "plat"}, "network.*plato"),
        ({"wait": None, "network": 5}, "network.*must be a preset"),
        ({"wait": None, "network": {"tier": []}}, "tier.*needs one"),
        ({"wait": None, "network": "missing.toml"}, "network.*no such file"),
    ],
)
def test_what_cannot_be_is_one_line_that_names_the_field(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message) as complaint:
        waiting(**settings)
    assert "\n" not in str(complaint.value)


def test_a_config_and_the_file_beside_it(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("[leaf]\nstep_s = 0.1\n[[tier]]\nup_mbit_s = 1\n")
    tables = '[tree]\nshape = "2x3"\n[schedule]\nperiods = [2, 2]\nwait = ["all", { deadline = 30 }]\n'
    (tmp_path / "study.toml").write_text(tables + '[network]\nname = "mine.toml"\n')
    experiment = Experiment.from_toml(tmp_path / "study.toml")
    assert experiment.network == {"name": str(tmp_path / "mine.toml")}
    assert Experiment.from_table(experiment.to_table()) == experiment
    with pytest.raises(InvalidInput, match="topology"):
        check_deployable(experiment)
    plain = Experiment().to_table()
    assert (plain["network"], plain["schedule"]["wait"]) == (None, "all")


def test_of_a_sequence_each_may_be_any_form() -> None:
    forms: Sequence[Any] = [None, "all"]
    assert clocked(waiting(forms, rounds=1))[0].late == ()
