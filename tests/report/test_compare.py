"""Curves, settings and the summary's numbers, worked out by hand."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from stratafl.report import compare
from stratafl.report.compare import Number, differences, settings, shared, summary, usual_targets
from stratafl.report.curves import AXES, curve_of, mean_curve
from stratafl.report.gather import gather
from stratafl.report.payload import WIDEST, payload
from stratafl.store import StoredRun
from tests.report.conftest import METHODS, ROUNDS, SEEDS


def stored(
    accuracies: list[float | None], seed: int = 0, name: str = "run", seconds: float = 0.5, **config: Any
) -> StoredRun:
    """A run whose records say these accuracies; None where a round was not evaluated."""
    records = [
        {
            "round": number,
            "steps": 10 * number,
            "lr": 0.1,
            "metrics": {} if accuracy is None else {"accuracy": accuracy, "loss": 1 - accuracy},
            "nodes": {},
            "refused": ["0/1"] if number == 1 else [],
            "bytes_per_client": 1000.0 * number,
            "seconds": seconds,
            "drift": {"0": {"progress": 1.0}, "1": {"drift": 2.0 * number}},
        }
        for number, accuracy in enumerate(accuracies, 1)
    ]
    return StoredRun(
        path=Path(name),
        name=name,
        id=f"id-{name}-{seed}",
        status="done",
        reason="",
        round=len(records),
        total=len(records),
        created="",
        updated="",
        config={"method": {"name": "mtgc"}, "run": {"seed": seed}, **config},
        environment={"torch": "2"},
        rounds=records,
        tree={"classes": [], "levels": []},
        summary=None,
    )


def test_a_run_s_curve() -> None:
    curve = curve_of(stored([0.2, None, 0.6]))
    assert curve.x == {
        "rounds": [1, 2, 3],
        "steps": [10, 20, 30],
        "bytes": [1000, 2000, 3000],
        "seconds": [0.5, 1.0, 1.5],
    }
    assert list(curve.x) == list(AXES)
    assert curve.y["accuracy"] == [0.2, None, 0.6]
    assert curve.y["drift.1.drift"] == [2, 4, 6]
    assert curve.known("accuracy") == [(1, 0.2), (3, 0.6)]
    assert curve.last("accuracy") == 0.6
    assert curve.last("nothing") is None


def test_the_mean_goes_as_far_as_every_run() -> None:
    mean = mean_curve([curve_of(stored([0.2, 0.4, 0.9])), curve_of(stored([0.4, 0.8]))])
    assert mean.x["rounds"] == [1, 2]
    assert mean.y["accuracy"] == pytest.approx([0.3, 0.6])
    assert mean.spread["accuracy"] == pytest.approx([0.1, 0.2])
    assert mean.spread["drift.1.drift"] == [0, 0]


def test_the_mean_has_a_gap_where_a_run_has_one() -> None:
    mean = mean_curve([curve_of(stored([0.2, None])), curve_of(stored([0.4, 0.8]))])
    assert mean.y["accuracy"] == [pytest.approx(0.3), None]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "0.5", None, True, [1], {"a": 1}, 10**400])
def test_what_is_no_number_is_a_gap(value: object) -> None:
    run = stored([0.2, 0.4])
    run.rounds[0]["metrics"]["accuracy"] = value
    run.rounds[0]["seconds"] = value
    curve = curve_of(run)
    assert curve.y["accuracy"] == [None, 0.4]
    assert curve.x["seconds"] == [0, 0.5]


@pytest.mark.parametrize("field", ["metrics", "drift", "steps", "refused"])
@pytest.mark.parametrize("value", [None, "text", 3, [], {"1": "text"}])
def test_records_of_another_kind_do_no_harm(field: str, value: object) -> None:
    run = stored([0.2, 0.4])
    run.rounds[0][field] = value
    shown = payload([run])
    assert json.loads(json.dumps(shown, allow_nan=False)) == shown
    assert curve_of(run).y["accuracy"][-1] == 0.4


def test_runs_that_differ_in_their_seed_are_one_setting() -> None:
    runs = [stored([0.1], seed, name) for name in ("a", "b") for seed in (0, 1, 2)]
    for run in runs[3:]:
        run.config["method"] = {"name": "hfedavg"}
    found = settings(runs)
    assert [(each.label, each.seeds) for each in found] == [("a", [0, 1, 2]), ("b", [0, 1, 2])]


@pytest.mark.parametrize(
    ("names", "label"),
    [
        (("mtgc-s0", "mtgc-s1"), "mtgc-s"),
        (("mtgc_seed=0", "mtgc_seed=1"), "mtgc"),
        (("a1", "b1"), "run"),
        (("x", "x"), "x"),
    ],
)
def test_names_of_one_setting(names: tuple[str, str], label: str) -> None:
    assert [each.label for each in settings([stored([0.1], seed, name) for seed, name in enumerate(names)])] == [label]


def test_settings_of_one_name_are_named_by_what_differs() -> None:
    runs = [stored([0.1], method={"name": name}, leaf={"lr": lr}) for name in ("mtgc", "hfedavg") for lr in (0.1, 0.2)]
    assert [each.label for each in settings(runs)] == [
        "mtgc, lr 0.1", "mtgc, lr 0.2", "hfedavg, lr 0.1", "hfedavg, lr 0.2",
    ]  # fmt: skip


def test_differences_and_what_is_shared() -> None:
    runs = [
        stored([0.1], 0, "a", leaf={"lr": 0.1, "clip": None}),
        stored([0.1], 1, "a", leaf={"lr": 0.1, "clip": None}),
        stored([0.1], 0, "b", leaf={"lr": 0.2}),
    ]
    found = settings(runs)
    assert differences(found) == {"leaf.lr": ["0.1", "0.2"], "run.seed": ["0, 1", "0"]}
    assert shared(found) == {"leaf.clip": "—", "method.name": "mtgc"}


def test_the_summary_by_hand() -> None:
    runs = [
        stored([0.5, 0.8, 0.7], 0),
        stored([0.6, 0.7, 0.9], 1, seconds=1.5),
        stored([0.7, 0.8, 0.8], 2, seconds=1.0),
    ]
    (row,) = summary(settings(runs), [0.7, 0.8, 0.85])
    assert row.runs == 3 and row.rounds == 3 and row.refused == 3
    assert row.final["accuracy"].mean == pytest.approx(0.8)
    assert row.final["accuracy"].std == pytest.approx((0.02 / 3) ** 0.5)
    assert row.best is not None and row.best.mean == pytest.approx((0.8 + 0.9 + 0.8) / 3)
    assert [compare.reached_text(each) for each in row.targets] == ["1.7 ± 0.5", "2.3 ± 0.5", ">3"]
    assert row.bytes_per_client == Number(3000.0, 0.0)
    assert row.seconds_per_round is not None and row.seconds_per_round.mean == pytest.approx(1.0)


def test_one_run_has_no_deviation() -> None:
    (row,) = summary(settings([stored([0.5, 0.9])]), [0.9, 0.95])
    assert [compare.reached_text(each) for each in row.targets] == ["2", ">2"]
    assert compare.number_text(row.final["accuracy"], 2) == "0.90"


def test_a_setting_with_an_unfinished_run_reached_no_target() -> None:
    (row,) = summary(settings([stored([0.5, 0.9], 0), stored([0.5], 1)]), [0.9])
    assert compare.reached_text(row.targets[0]) == ">1"


def test_a_run_without_rounds() -> None:
    (row,) = summary(settings([stored([])]), [0.9])
    assert (row.rounds, row.final, row.best, row.bytes_per_client, row.seconds_per_round) == (0, {}, None, None, None)
    assert compare.reached_text(row.targets[0]) == ">0"


@pytest.mark.parametrize(
    ("best", "targets"), [([0.9], [0.9]), ([0.93, 0.86], [0.9]), ([0.93, 0.86, 0.4], [0.85]), ([0.01], []), ([], [])]
)
def test_the_usual_target_is_one_that_half_of_them_reach(best: list[float], targets: list[float]) -> None:
    assert (
        usual_targets(settings([stored([value], name=str(n), n={"n": n}) for n, value in enumerate(best)])) == targets
    )


def test_a_run_without_accuracy_is_told_by_its_loss() -> None:
    run = stored([0.5])
    run.rounds[0]["metrics"] = {"loss": 0.25}
    table = payload([run])["summary"]
    assert table["head"] == ["setting", "runs", "rounds", "loss", "MB per client", "s per round", "refused"]
    assert table["rows"] == [["run", "1", "1", "0.250", "0.00", "0.5", "1"]]


# -- stored runs -----------------------------------------------------------------------------------------------------


def test_payload_of_real_runs(runs: Path) -> None:
    found, unreadable = gather([runs])
    data = payload(found, [0.5], unreadable)
    json.dumps(data, allow_nan=False)
    assert [each["label"] for each in data["settings"]] == list(METHODS)
    assert [[run["seed"] for run in each["runs"]] for each in data["settings"]] == [list(SEEDS)] * 2
    assert data["differences"] == {"method.name": list(METHODS.values())}
    # two seeds are two splits, each shared by both methods
    assert [tree["runs"] for tree in data["trees"]] == [[f"{name}, seed {seed}" for name in METHODS] for seed in SEEDS]
    assert data["summary"]["head"][5] == "rounds to 50 %"
    assert all(row[1:3] == ["2", str(ROUNDS)] for row in data["summary"]["rows"])
    assert [each["title"] for each in data["levels"]] == ["Root", "Groups", "Clients"]


@pytest.mark.parametrize(
    ("depths", "titles"),
    [
        ([1], ["Root", "Clients"]),
        ([3], ["Root", "Groups", "Level 2", "Clients"]),
        ([1, 2], ["Root", "Level 1", "Level 2"]),
        ([], ["Root"]),
    ],
)
def test_levels_have_the_names_that_fit_all_trees(depths: list[int], titles: list[str]) -> None:
    runs = [dataclasses.replace(stored([0.1]), tree={"levels": [{}] * (depth + 1)}) for depth in depths]
    assert [each["title"] for each in payload(runs)["levels"]] == titles


def test_a_run_named_twice_counts_once(runs: Path) -> None:
    one = sorted(runs.iterdir())[0]
    found, _ = gather([runs, one, runs / ".." / runs.name])
    assert len(found) == len(METHODS) * len(SEEDS)


def test_what_cannot_be_read_is_named(copied: Path) -> None:
    one, other, *_ = sorted(copied.iterdir())
    (one / "run.json").write_text("{")
    (other / "rounds.jsonl").write_text('{"round": 7}\n')
    found, unreadable = gather([copied])
    assert len(found) == 2
    assert len(unreadable) == 2
    assert "not valid JSON" in unreadable[0] and "not the record of round 1" in unreadable[1]
    assert gather([one]) == ([], [unreadable[0]])


def test_a_broken_tree_is_left_out(runs: Path) -> None:
    (run, *_), _ = gather([runs])
    sound = run.tree
    for change in (
        {"levels": []},
        {"levels": [{}]},
        {"levels": "text"},
        {"levels": [sound["levels"][0], {**sound["levels"][1], "parents": [0, 5]}]},
        {"levels": [sound["levels"][0], {**sound["levels"][1], "samples": [1]}]},
        {"levels": [sound["levels"][0], {**sound["levels"][1], "labels": [["x"], ["y"]]}]},
    ):
        assert payload([dataclasses.replace(run, tree={**sound, **change})])["trees"] == []


def test_a_level_too_wide_to_draw_is_left_out(runs: Path) -> None:
    (run, *_), _ = gather([runs])
    level = run.tree["levels"][1]
    many = {key: (values * WIDEST)[: WIDEST + 1] for key, values in level.items()}
    (tree,) = payload([dataclasses.replace(run, tree={**run.tree, "levels": [run.tree["levels"][0], many]})])["trees"]
    assert len(tree["levels"]) == 1 and tree["left_out"] == [WIDEST + 1]
