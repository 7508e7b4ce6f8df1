"""Real plans of tiny runs: what is chosen, what it is said to cost, what is stopped, going on."""

from __future__ import annotations

import csv
import json
import math
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stratafl.base.errors import InvalidInput
from stratafl.base.signals import Interrupted
from stratafl.costs.pricing import cost
from stratafl.experiment.experiment import Experiment
from stratafl.metrics.objective import parse_goal
from stratafl.network.specification import network
from stratafl.runs import format
from stratafl.runs.reader import list_runs, read_run
from stratafl.runs.session import RunSession
from stratafl.simulation.simulation import Simulation
from stratafl.tuning import trials
from stratafl.tuning.output import as_csv, plot_frontiers, trial_rows
from stratafl.tuning.result import TuningResult, frontier_segments, search_and_repeat
from stratafl.tuning.task import TuningTask, space_of
from stratafl.tuning.trials import last_round
from tests.tuning.conftest import CONFIG, NETWORKS, TaskFactory, silently


def without_runs(plan: TuningResult) -> list[dict[str, Any]]:
    """All that is said of the runs but what their folders are called, which has the time in it."""
    return [{key: value for key, value in row.items() if key != "run"} for row in trial_rows(plan)]


def test_the_choice_reaches_the_target_with_every_seed(tuned: TuningResult) -> None:
    assert tuned.is_complete and len(tuned.network_results) == len(NETWORKS)
    for answer in tuned.network_results:
        assert answer.choice is not None
        assert answer.choice.reached(answer.network, tuned.task) == len(answer.choice.runs) == 2
        for tried in answer.choice.runs:
            assert tried.run is not None and tried.run.rounds[-1]["metrics"]["accuracy"] >= 0.8
        best, given = (each.mean_cost(answer.network, "seconds") for each in (answer.choice, answer.baseline))
        assert best is not None and given is not None and best.mean <= given.mean


def test_every_trial_is_in_the_store_and_costs_what_the_table_says(tuned: TuningResult, folder: Path) -> None:
    table = list(csv.DictReader((folder / "trials.csv").read_text().splitlines()))
    assert {row["run"] for row in table} == {run.path.name for run in list_runs(folder / "runs")}
    for row in table:
        (priced,) = cost(folder / "runs" / row["run"], row["network"], [0.8])
        milestone = priced.milestones[0 if row["outcome"] == "reached" else 1]
        assert milestone.seconds is not None and milestone.rounds is not None
        assert float(row["seconds"]) == pytest.approx(milestone.seconds.mean, rel=1e-12)
        assert int(row["rounds"]) == milestone.rounds.mean
        assert float(row["bytes"]) == pytest.approx(sum(each.mean for each in milestone.bytes), rel=1e-12)


def test_no_setting_is_trained_twice(tuned: TuningResult, folder: Path) -> None:
    configs = [json.dumps(run.config, sort_keys=True) for run in list_runs(folder / "runs")]
    assert len(set(configs)) == len(configs) == tuned.search.runner.trained
    assert tuned.search.count == 7


def test_what_was_stopped_could_not_be_among_the_best_any_more(tuned: TuningResult) -> None:
    stopped = [tried for tried in tuned.search.trials.values() if tried.outcome == "stopped"]
    assert stopped, "these settings should hold one that is"
    for tried in stopped:
        assert tried.run is not None and tried.run.status == format.INTERRUPTED and tried.reason == trials.BEATEN
        assert len(tried.run.rounds) < tried.run.total
        assert last_round(tried.run, tuned.task, tuned.search.cost_limits()) <= len(tried.run.rounds)


def test_a_run_that_was_stopped_can_go_on_by_itself(tuned: TuningResult, tmp_path: Path) -> None:
    tried = next(each for each in tuned.search.trials.values() if each.outcome == "stopped")
    assert tried.run is not None
    copied = tmp_path / "run"
    copied.mkdir()
    for path in tried.run.path.rglob("*"):
        target = copied / path.relative_to(tried.run.path)
        target.mkdir() if path.is_dir() else target.write_bytes(path.read_bytes())
    done = RunSession.resume(copied).run()
    assert done.summary["rounds"] > len(tried.run.rounds)


def test_the_config_to_run_is_the_run_that_was_chosen(tuned: TuningResult, folder: Path, tmp_path: Path) -> None:
    answer = tuned.network_results[0]
    assert answer.choice is not None and answer.choice.runs[0].run is not None
    experiment = Experiment.from_toml(folder / f"best-{answer.network}.toml")
    chosen = answer.choice.runs[0].run
    assert experiment.one_of_many() == Experiment.from_table(chosen.config)
    again = read_run(RunSession.start(experiment, "again", tmp_path).run().path)
    assert [record["metrics"] for record in again.rounds] == [record["metrics"] for record in chosen.rounds]


def test_the_frontier_has_nothing_cheaper_that_is_as_good(tuned: TuningResult) -> None:
    for answer in tuned.network_results:
        costs, values = [p.cost for p in answer.frontier], [p.value for p in answer.frontier]
        assert costs == sorted(costs) and values == sorted(set(values))
        for tried in tuned.search.trials.values():
            for round, value in tried.curve:
                cost = tried.costs[answer.network].up_to_round(round).seconds
                assert any(p.cost <= cost * (1 + 1e-9) and p.value >= value for p in answer.frontier)
        assert frontier_segments(answer.frontier)[-1] is answer.frontier[-1]


def test_the_plan_is_written_whole(tuned: TuningResult, folder: Path, tmp_path: Path) -> None:
    plan = json.loads((folder / "plan.json").read_text())
    assert [each["network"] for each in plan["networks"]] == list(NETWORKS)
    assert plan["complete"] and plan["tried"] == 7 and sum(plan["outcomes"].values()) == 8
    assert all(each["choice"]["reached"] == 2 and each["gain"] >= 1 for each in plan["networks"])
    plot_frontiers(tuned, tmp_path / "frontier.png", tmp_path / "frontier.pdf")
    assert (tmp_path / "frontier.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "frontier.pdf").read_bytes().startswith(b"%PDF")


def test_the_same_again_trains_nothing_and_says_the_same(
    tuned: TuningResult, folder: Path, make_task: TaskFactory
) -> None:
    again = silently(make_task(), folder, must_exist=True)
    assert again.search.runner.trained == 0
    assert as_csv(again) == as_csv(tuned)


def test_interrupted_plans_go_on_to_the_same(tuned: TuningResult, make_task: TaskFactory, tmp_path: Path) -> None:
    """Stopped in the middle of the config as given, of trials and of repetitions."""
    seen = 0

    def interrupting(event: Any) -> None:
        nonlocal seen
        seen += event.kind == "round"
        if event.kind == "round" and seen in (3, 12, 25, 40):
            os.kill(os.getpid(), signal.SIGINT)

    trained = 0
    for _ in range(6):
        try:
            plan = silently(make_task(), tmp_path, show=interrupting)
        except Interrupted:  # before the config as given was done
            continue
        trained += plan.search.runner.trained
        if plan.interrupted is None:
            break
        assert not plan.is_complete and plan.interrupted.exit_code == 130
        assert "the same command goes on" in plan.interrupted.message
        assert plan.is_reached, "what is known so far is said"
    assert trained > tuned.search.runner.trained, "a run that was interrupted is gone on with"
    assert without_runs(plan) == without_runs(tuned)
    assert len(list_runs(tmp_path / "runs")) == len({row["run"] for row in trial_rows(tuned)})


def test_a_plan_stops_in_its_time_and_goes_on(
    tuned: TuningResult, make_task: TaskFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each look at the clock takes a second."""
    clock = iter(range(1_000_000))
    monkeypatch.setattr(trials.time, "monotonic", lambda: float(next(clock)))
    with pytest.raises(InvalidInput, match="time-limit"):
        silently(make_task(), tmp_path, seconds=5)
    for _ in range(40):
        plan = silently(make_task(), tmp_path, seconds=60)
        if plan.is_complete:
            break
    assert without_runs(plan) == without_runs(tuned)


def test_a_network_may_be_added(tuned: TuningResult, make_task: TaskFactory, folder: Path, tmp_path: Path) -> None:
    first = silently(make_task(networks=NETWORKS[:1]), tmp_path)
    both = silently(make_task(), tmp_path)
    kept = {id for id, run in _runs(first) if run.status == format.DONE}
    assert kept <= {id for id, _ in _runs(both)} and both.is_complete
    for tried in both.search.trials.values():
        assert tried.run is not None
        assert tried.first is not None or last_round(tried.run, both.task, both.search.cost_limits()) <= tried.run.round


def _runs(plan: TuningResult) -> list[tuple[str, Any]]:
    return [(tried.run.id, tried.run) for _, _, tried in plan.all_trials if tried.run is not None]


def test_another_question_needs_another_folder(tuned: TuningResult, make_task: TaskFactory, folder: Path) -> None:
    with pytest.raises(InvalidInput, match="another config and target"):
        silently(make_task(target="accuracy=0.7"), folder)
    with pytest.raises(InvalidInput, match="another space"):
        silently(make_task({"lr": [0.05, 0.1]}), folder)
    changed = make_task()
    changed = replace(changed, networks=(replace(changed.networks[0], about="changed"), changed.networks[1]))
    with pytest.raises(InvalidInput, match="another networks"):
        silently(changed, folder)


def test_a_small_space_is_tried_to_its_end(make_task: TaskFactory, tmp_path: Path) -> None:
    plan = silently(make_task({"defaults": False, "lr": [0.05, 0.1, 0.2]}, NETWORKS[:1], trials=9, seeds=1), tmp_path)
    assert plan.search.is_exhausted and plan.is_complete and len(plan.search.trials) == 3


def test_a_setting_that_cannot_be_trained_is_an_answer(make_task: TaskFactory, tmp_path: Path) -> None:
    space = {"defaults": False, "model.name": ["logistic", "no_such_model"]}
    plan = silently(make_task(space, NETWORKS[:1], trials=2, seeds=1), tmp_path)
    assert sorted(tried.outcome for tried in plan.search.trials.values()) == ["failed", "reached"]
    assert plan.network_results[0].choice is not None and plan.network_results[0].choice.is_baseline
    again = silently(make_task(space, NETWORKS[:1], trials=2, seeds=1), tmp_path)
    assert again.search.runner.trained == 0 and without_runs(again) == without_runs(plan)


def test_nothing_over_the_budget_is_chosen(tuned: TuningResult, make_task: TaskFactory, tmp_path: Path) -> None:
    network = NETWORKS[0]
    costs = sorted(tried.cost(network, "bytes") for tried in tuned.search.trials.values() if tried.first)
    limit = costs[0] * 1.01
    plan = silently(make_task(None, NETWORKS[:1], budgets={"bytes": limit}), tmp_path)
    for answer in plan.network_results:
        for candidate in answer.candidates:
            assert candidate.runs[0].cost(network, "bytes") <= limit
    assert math.isfinite(plan.baseline.cost(network, "bytes"))


def test_a_run_that_breaks_down_is_an_answer_but_not_the_given_one(
    make_task: TaskFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Simulate a lack of GPU memory."""
    task = make_task({"defaults": False, "periods": [[2], [3, 6]]}, NETWORKS[:1], trials=1, seeds=1)
    advance = Simulation.advance
    too_large = 6

    def broken(self: Simulation) -> Any:
        if self.schedule.periods[-1] == too_large:
            raise RuntimeError("out of memory")
        return advance(self)

    monkeypatch.setattr(Simulation, "advance", broken)
    plan = silently(task, tmp_path)
    (tried,) = (each for each in plan.search.trials.values() if each.outcome == "failed")
    assert "out of memory" in tried.reason and tried.run is not None and tried.run.status == format.FAILED
    again = silently(task, tmp_path)
    assert again.search.runner.trained == 0 and without_runs(again) == without_runs(plan)
    too_large = 3
    with pytest.raises(InvalidInput, match=r"fails as given.*out of memory"):
        silently(task, tmp_path / "other")
    too_large = 0
    assert silently(task, tmp_path / "other").is_complete, "once it is mended"


def test_what_failed_in_another_precision_is_tried_again(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def planned(precision: str) -> tuple[TuningResult, list[str]]:
        experiment, said = Experiment.from_toml(file, [f"execution.precision={precision}", "rounds=1"]), list[str]()
        space = space_of(experiment, {"defaults": False, "periods": [[2], [3, 6]]})
        goal, where = parse_goal("--target", "0.01"), [network(NETWORKS[0])]
        task = TuningTask.of(experiment, space, where, goal, minimise="seconds", trials=1, seeds=1)
        return search_and_repeat(task, tmp_path, say=said.append, show=lambda event: None), said

    advance = Simulation.advance

    def broken(self: Simulation) -> Any:
        if self.engine.precision == "fp32" and self.schedule.periods[-1] == 6:
            raise RuntimeError("out of memory")
        return advance(self)

    monkeypatch.setattr(Simulation, "advance", broken)
    planned("fp32")
    again, said = planned("bf16")
    assert again.search.runner.trained == 1, "and what was done in fp32 is taken"
    assert {tried.outcome for tried in again.search.trials.values()} == {"reached"}
    assert any("failed on another device or in another precision; run again" in line for line in said)
    assert planned("bf16")[0].search.runner.trained == 0


RULE = """
from stratafl import average, register

@register("homesick", summary="averaging")
def homesick():
    return average()
"""


def test_a_plan_runs_again_what_was_made_with_another_version_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "rule.py").write_text(RULE)
    changes = ['plugins=["rule.py"]', "method.name=homesick", "rounds=2"]
    (tmp_path / "tiny.toml").write_text(CONFIG)

    def planned(keep_stale: bool = False) -> tuple[list[str], list[str]]:
        experiment, said = Experiment.from_toml(tmp_path / "tiny.toml", changes), list[str]()
        space = space_of(experiment, {"defaults": False, "lr": [0.05, 0.1]})
        task = TuningTask.of(
            experiment, space, [network("lan_wan")], parse_goal("--target", "0.99"), minimise="seconds", seeds=1
        )
        plan = search_and_repeat(
            task, tmp_path / "plan", keep_stale=keep_stale, say=said.append, show=lambda event: None
        )
        return [id for id, _ in _runs(plan)], said

    first, _ = planned()
    assert planned() == (first, [])
    with (tmp_path / "rule.py").open("a") as file:
        file.write("# other\n")
    assert planned(keep_stale=True) == (first, [])
    again, said = planned()
    assert not set(again) & set(first) and len(again) == len(first)
    assert len(said) == len(first) and all("rule.py was changed since; run again" in line for line in said)
    assert planned() == (again, [])
