"""Curves, settings and their names, and what is read of stored runs."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from stratafl.base.errors import InvalidInput
from stratafl.base.plotting import DASHES, MAX_DISTINCT_STYLES, line_styles
from stratafl.base.plotting import METHODS as METHOD_NAMES
from stratafl.experiment.experiment import Experiment
from stratafl.experiment.legacy import translated
from stratafl.reports.page_data import MAX_LEVEL_SIZE, MAX_SLIDER_STOPS, page_data
from stratafl.runs import StoredRun, list_runs, read_run
from stratafl.runs.curves import AXES, CurveAxis, axes_of, curve_of, mean_curve
from stratafl.runs.groups import collect_runs, group_names, group_runs, one_of_each, split_config
from stratafl.runs.reader import pack_runs
from stratafl.sweeps import SweepEntry, table
from tests.reports.conftest import METHODS, ROUNDS, SEEDS, edit


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
        config={"method": {"name": "mtgc"}, "seed": seed, **config},
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
    assert curve.points_of("accuracy") == [(1, 0.2), (3, 0.6)]
    assert curve.last("accuracy") == 0.6
    assert curve.last("nothing") is None


def test_curves_have_the_axes_that_their_records_have() -> None:
    old, new = stored([0.2, 0.6], name="old"), stored([0.3, 0.7], name="new")
    for number, record in enumerate(new.rounds, 1):
        up, down = {"bytes_up": 10 * number}, {"bytes_down": 5 * number}
        record |= {"clock_total": 2.5 * number, "traffic": {"10": up | down, "1": up | down, "2": up}}
    before, after = curve_of(old), curve_of(new)
    assert "network" not in before.x and "traffic.1" not in before.x
    assert (after.x["network"], after.x["traffic.1"]) == ([2.5, 5.0], [15, 30])
    assert "traffic.2" not in after.x, "one direction is not the sum"
    assert list(mean_curve([before, after]).x) == list(AXES)
    with pytest.raises(InvalidInput, match=r"--axis = 'traffic.1': these runs lack it, as .* they have rounds, steps"):
        page_data([old], axis="traffic.1")
    axes = axes_of([before, after], {"cost on x": CurveAxis("cost on x", "money")})
    assert list(axes) == [*AXES, "network", "traffic.1", "traffic.10", "cost on x"]
    titles = {level: axes[f"traffic.{level}"].title for level in (1, 10)}
    assert titles == {1: "bytes on the top link", 10: "bytes on the clients' links"}
    for record in old.rounds:
        record["traffic"] = {"1": {"bytes_up": 1, "bytes_down": 1}}
    assert axes_of([curve_of(old), after])["traffic.10"].title == "bytes on links of level 10", "another depth"


def test_a_method_has_one_style_in_every_report() -> None:
    def style(*methods: str) -> list[tuple[int, int]]:
        runs = [stored([0.1], name=str(n), method={"name": m}, client={"lr": n + 1}) for n, m in enumerate(methods)]
        return [group.style for group in group_runs(runs)]

    mtgc, hfedavg, own = style("mtgc", "hfedavg", "z.py:own")
    assert style("z.py:own", "scaffold", "mtgc")[::2] == [own, mtgc] and style("hfedavg") == [hfedavg]
    first, second, other, third = style("mtgc", "mtgc", "hfedavg", "mtgc")
    assert (first, other) == (mtgc, hfedavg)
    assert {first.colour, second.colour, third.colour} == {mtgc.colour}
    assert len({first.dash, second.dash, third.dash, other.dash}) == 4, "in grey, too"
    assert len(set(line_styles(["mtgc"] * MAX_DISTINCT_STYLES))) == MAX_DISTINCT_STYLES
    built_in = line_styles(list(METHOD_NAMES))
    assert len(set(built_in)) == len(METHOD_NAMES)
    assert len({each.dash for each in built_in[: len(DASHES)]}) == len(DASHES)


def test_the_mean_goes_as_far_as_every_run() -> None:
    mean = mean_curve([curve_of(stored([0.2, 0.4, 0.9])), curve_of(stored([0.4, 0.8]))])
    assert mean.x["rounds"] == [1, 2]
    assert mean.y["accuracy"] == pytest.approx([0.3, 0.6])
    assert mean.spread["accuracy"] == pytest.approx([0.1 * 2**0.5, 0.2 * 2**0.5])
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
    shown = page_data([run])
    assert json.loads(json.dumps(shown, allow_nan=False)) == shown
    assert curve_of(run).y["accuracy"][-1] == 0.4


def test_runs_that_differ_in_their_seed_are_one_setting_named_by_its_method() -> None:
    runs = [stored([0.1], seed, name) for name in ("a", "b") for seed in (0, 1, 2)]
    for run in runs[3:]:
        run.config["method"] = {"name": "hfedavg"}
    result = group_runs(runs)
    assert [(each.label, each.seeds) for each in result] == [("MTGC", [0, 1, 2]), ("HFedAvg", [0, 1, 2])]


def test_runs_of_both_formats_are_one_setting() -> None:
    old = {
        "model": {"name": "mlp", "hidden": [8]},
        "method": {"name": "fedprox", "mu": 0.1},
        "leaf": {"lr": 0.1, "batch": 20, "sampling": "epochs", "momentum": 0.9},
        "schedule": {"periods": None, "steps_per_sync": [6, 3]},
        "run": {"seed": 0, "rounds": 9, "stop_at": 0.9},
    }
    new = Experiment(
        model={"name": "mlp", "hidden": [8]},
        method={"name": "fedprox", "mu": 0.1},
        client={"batch_size": 20, "optimizer": {"name": "sgd", "momentum": 0.9}},
        schedule=[2, 3],
        evaluation={"stop_when": "accuracy >= 0.9"},
        rounds=9,
        seed=1,
    )
    runs = [stored([0.1], name="old"), stored([0.1], name="new")]
    for run, tables in zip(runs, (translated(old), new.to_table()), strict=True):
        run.config.clear()
        run.config.update(tables)
    (group,) = group_runs(runs)
    assert group.seeds == [0, 1] and split_config(runs)[1] == [{"seed": "0"}, {"seed": "1"}]
    runs[0].config["model"]["hidden"] = [16]
    assert split_config(runs)[1] == [{"model.hidden": "[16]", "seed": "0"}, {"model.hidden": "[8]", "seed": "1"}]


def flat(method: str = "mtgc", **more: object) -> dict[str, object]:
    return {"method.name": method, **{key.replace("__", "."): value for key, value in more.items()}}


@pytest.mark.parametrize(
    ("configs", "expected"),
    [
        ([flat()], ["MTGC"]),
        ([flat(client__lr=0.1), flat(client__lr=0.05)], ["MTGC, lr 0.1", "MTGC, lr 0.05"]),
        (
            [flat(client__lr=lr, schedule__periods=[e, 5]) for lr, e in ((0.05, 10), (0.1, 30))],
            ["MTGC, lr 0.05, E = 10", "MTGC, lr 0.1, E = 30"],
        ),
        ([flat(schedule__periods=[4, h]) for h in (5, 20)], ["MTGC, H = 5", "MTGC, H = 20"]),
        ([flat(schedule__periods=each) for each in ([3, 4, 5], [3, 4, 6])],
         ["MTGC, periods 3 / 4 / 5", "MTGC, periods 3 / 4 / 6"]),
        # a parameter that only one method has is its own affair
        ([flat("fedprox", method__mu=0.1), flat("mtgc")], ["FedProx", "MTGC"]),
        ([flat("fedprox", method__mu=mu) for mu in (0.1, 1.0)], ["FedProx, mu 0.1", "FedProx, mu 1"]),
        ([flat(client__clip_norm=None), flat(client__clip_norm=10.0)], ["MTGC, no clip_norm", "MTGC, clip_norm 10"]),
        ([{"method.rules": ["correct", {"name": "fedprox", "mu": 0.1}]}, {"method.rules": ["average", "correct"]}],
         ["correct / fedprox 0.1", "average / correct"]),
        # how long it ran is named where nothing else differs
        ([flat(rounds=5, client__lr=0.1), flat(rounds=9, client__lr=0.2)], ["MTGC, lr 0.1", "MTGC, lr 0.2"]),
        ([flat(rounds=5), flat(rounds=9)], ["MTGC, rounds 5", "MTGC, rounds 9"]),
        ([flat("my_rule.py:mine"), flat()], ["my_rule.py:mine", "MTGC"]),
        ([flat(data__source="digits", model__name="mlp"), flat(data__source="mnist", model__name="cnn")],
         ["MTGC, digits, mlp", "MTGC, mnist, cnn"]),
        ([{}, {"rounds": 3}], ["run", "rounds 3"]),
        # a rate is also in the schedule that it begins
        ([flat(client__lr=lr, client__lr_schedule__lr=lr) for lr in (0.1, 0.2)], ["MTGC, lr 0.1", "MTGC, lr 0.2"]),
        ([flat(data__test=[{"name": "in memory", "shape": [9], "sha256": f"{n}3d99aa5df8c4b46"}] * 2) for n in (0, 1)],
         ["MTGC, test #03d99a / #03d99a", "MTGC, test #13d99a / #13d99a"]),
    ],
)  # fmt: skip
def test_settings_are_named_by_what_differs(configs: list[dict[str, object]], expected: list[str]) -> None:
    assert group_names(configs) == expected


def test_a_file_is_named_without_its_folder_where_that_tells_settings_apart() -> None:
    named = [{"method.name": "mtgc", "data.source": f"/home/me/{file}"} for file in ("a/one.csv", "b/two.csv")]
    assert group_names(named) == ["MTGC, one.csv", "MTGC, two.csv"]
    alike = [{"method.name": "mtgc", "data.source": f"/home/me/{folder}/one.csv"} for folder in "ab"]
    assert group_names(alike) == ["MTGC, /home/me/a/one.csv", "MTGC, /home/me/b/one.csv"]


def test_of_many_keys_that_differ_a_name_has_those_that_tell_settings_apart() -> None:
    changing = {f"client.key{n}": [0, 1] for n in range(6)}
    configs = [flat(method) | {key: values[n] for key, values in changing.items()}
               for n, method in ((0, "mtgc"), (1, "mtgc"), (1, "hfedavg"))]  # fmt: skip
    assert group_names(configs) == ["MTGC, key0 0", "MTGC, key0 1", "HFedAvg, key0 1"]


def test_names_that_are_alike_have_the_time_they_were_made() -> None:
    long = "x" * 60
    runs = [stored([0.1], client={"optimizer": f"{long}{end}.py:make"}, name=end) for end in "ab"]
    labels = [each.label for each in group_runs(runs)]
    assert len(set(labels)) == 2 and all("id-" in label for label in labels)


def test_differences_and_what_is_shared() -> None:
    runs = [
        stored([0.1], 0, "a", client={"lr": 0.1, "clip_norm": None}),
        stored([0.1], 1, "a", client={"lr": 0.1}),
        stored([0.1], 0, "b", client={"lr": 0.2}),
    ]
    common, own = split_config(runs)
    assert [config["client.lr"] for config in own] == ["0.1", "0.1", "0.2"]
    assert split_config([runs[1], runs[0]])[0]["client.clip_norm"] == "—", "nothing, and not there"
    assert [config["seed"] for config in own] == ["0", "1", "0"] and set(own[0]) == {"client.lr", "seed"}
    assert (common["client.clip_norm"], common["client.batch_size"], common["method.name"]) == ("—", "32", "mtgc")


# -- stored runs -----------------------------------------------------------------------------------


def test_payload_of_real_runs(runs: Path) -> None:
    result, unreadable = collect_runs([runs])
    data = page_data(result, [0.5], unreadable)
    json.dumps(data, allow_nan=False)
    assert [each["label"] for each in data["settings"]] == list(METHODS)
    assert [[run["seed"] for run in each["runs"]] for each in data["settings"]] == [list(SEEDS)] * 2
    configs = [[run["config"] for run in each["runs"]] for each in data["settings"]]
    assert configs == [[{"method.name": m, "seed": str(s)} for s in SEEDS] for m in METHODS.values()]
    # two seeds are two splits, each shared by both methods
    assert [tree["runs"] for tree in data["trees"]] == [[f"{name}, seed {seed}" for name in METHODS] for seed in SEEDS]
    assert (data["metric"], data["targets"]["accuracy"]) == ("accuracy", [0.5])
    assert [run["tree"] for each in data["settings"] for run in each["runs"]] == [0, 1, 0, 1]
    table = {column["title"]: [cell["text"] for cell in column["cells"]] for column in data["summary"]["before"]}
    assert (table["setting"], table["runs"], table["rounds"]) == (list(METHODS), ["2"] * 2, [str(ROUNDS)] * 2)
    assert [each["title"] for each in data["levels"]] == ["Root", "Groups", "Clients"]


@pytest.mark.parametrize(
    ("depths", "titles"),
    [
        ([1], ["Root", "Clients"]),
        ([2], ["Root", "Groups", "Clients"]),
        ([3], ["Root", "Level 1", "Level 2", "Level 3: clients"]),
        ([1, 2], ["Root", "Level 1", "Level 2"]),
        ([], ["Root"]),
    ],
)
def test_levels_have_the_names_that_fit_all_trees(depths: list[int], titles: list[str]) -> None:
    runs = [dataclasses.replace(stored([0.1], depth), tree={"levels": [{}] * (depth + 1)}) for depth in depths]
    assert [each["title"] for each in page_data(runs)["levels"]] == titles


def test_a_run_named_twice_counts_once(runs: Path) -> None:
    one = sorted(runs.iterdir())[0]
    result, _ = collect_runs([runs, one, runs / ".." / runs.name])
    assert len(result) == len(METHODS) * len(SEEDS)


def test_what_cannot_be_read_is_named(copied: Path) -> None:
    one, other, *_ = sorted(copied.iterdir())
    (one / "run.json").write_text("{")
    (other / "rounds.jsonl").write_text('{"round": 7}\n')
    result, unreadable = collect_runs([copied])
    assert len(result) == 2
    assert len(unreadable) == 2
    assert "not valid JSON" in unreadable[0] and "not the record of round 1" in unreadable[1]
    assert collect_runs([one]) == ([], [unreadable[0]])


def test_a_broken_tree_is_left_out(runs: Path) -> None:
    (run, *_), _ = collect_runs([runs])
    sound = run.tree
    for change in (
        {"levels": []},
        {"levels": [{}]},
        {"levels": "text"},
        {"levels": [sound["levels"][0], {**sound["levels"][1], "parents": [0, 5]}]},
        {"levels": [sound["levels"][0], {**sound["levels"][1], "samples": [1]}]},
        {"levels": [sound["levels"][0], {**sound["levels"][1], "labels": [["x"], ["y"]]}]},
    ):
        assert page_data([dataclasses.replace(run, tree={**sound, **change})])["trees"] == []


def test_a_level_too_wide_to_draw_is_left_out(runs: Path) -> None:
    (run, *_), _ = collect_runs([runs])
    level = run.tree["levels"][1]
    many = {key: (values * MAX_LEVEL_SIZE)[: MAX_LEVEL_SIZE + 1] for key, values in level.items()}
    (tree,) = page_data([dataclasses.replace(run, tree={**run.tree, "levels": [run.tree["levels"][0], many]})])["trees"]
    assert len(tree["levels"]) == 1 and tree["left_out"] == [MAX_LEVEL_SIZE + 1]


# -- what is known of single nodes -----------------------------------------------------------------


def with_nodes(run: StoredRun, rounds: int) -> StoredRun:
    """The same run, with an accuracy for each client that rises from round to round."""
    clients = run.tree["levels"][-1]["names"]
    records = [
        {**run.rounds[0], "round": r, "nodes": {name: {"accuracy": (n + r) / 1000} for n, name in enumerate(clients)}}
        for r in range(1, rounds + 1)
    ]
    return dataclasses.replace(run, rounds=records, round=rounds)


def test_the_mean_the_worst_and_the_spread_over_nodes(runs: Path) -> None:
    curve = curve_of(with_nodes(collect_runs([runs])[0][0], 2))
    assert curve.y["nodes.2.mean.accuracy"] == [0.0025, 0.0035]
    assert curve.y["nodes.2.lowest.accuracy"] == [0.001, 0.002]
    assert curve.y["nodes.2.highest.accuracy"] == [0.004, 0.005]
    assert curve.y["nodes.2.spread.accuracy"] == pytest.approx([0.00125**0.5 / 1000**0.5] * 2)


def test_nodes_are_known_in_the_rounds_the_slider_stops_at(runs: Path) -> None:
    run = with_nodes(collect_runs([runs])[0][0], 3 * MAX_SLIDER_STOPS)
    shown = page_data([run])["settings"][0]["runs"][0]["nodes"]
    assert len(shown["rounds"]) == MAX_SLIDER_STOPS and (shown["rounds"][0], shown["rounds"][-1]) == (
        1,
        3 * MAX_SLIDER_STOPS,
    )
    assert list(shown["values"]) == ["accuracy"] and list(shown["values"]["accuracy"]) == ["2"]
    assert shown["values"]["accuracy"]["2"][0] == [0.001, 0.002, 0.003, 0.004]
    assert page_data([collect_runs([runs])[0][0]])["settings"][0]["runs"][0]["nodes"] is None


# -- notes -----------------------------------------------------------------------------------------


def noted(run: StoredRun) -> tuple[bool, list[str]]:
    shown = page_data([run])["settings"][0]["runs"][0]
    return shown["bad"], shown["notes"]


def test_a_run_has_a_line_for_whatever_a_reader_should_know() -> None:
    quiet = dataclasses.replace(stored([0.5]), engine="loop", how="loop", precision="fp32")
    for record in quiet.rounds:
        record["refused"] = []
    assert noted(quiet) == (False, [])
    asked = {**quiet.config, "execution": {"engine": "stacked", "precision": "bf16"}}
    fell = dataclasses.replace(quiet, config=asked, how="loop: it draws random numbers", notes=("frozen transforms",))
    assert noted(fell) == (False, [
        "trained by the loop engine: it draws random numbers",
        "precision bf16 was asked for, and it was computed in fp32",
        "frozen transforms",
    ])  # fmt: skip
    own = ("engine 'stacked' was asked for, and loop trains the clients", "precision 'bf16' is not honoured")
    assert noted(dataclasses.replace(fell, notes=own)) == (False, list(own)), "said once"
    failed = dataclasses.replace(quiet, status="failed", reason="out of memory", total=9)
    assert noted(failed) == (True, ["failed after 1 of 9 rounds: out of memory"])
    changed = [{"after": 3, "time": "", "environment": {}, "changed": ["another model"]}]
    assert noted(dataclasses.replace(quiet, continued=changed))[1] == ["went on after round 3 with another model"]


def test_notes_and_directions_are_read_from_the_run(copied: Path) -> None:
    path = sorted(copied.iterdir())[0]
    edit(path / "run.json", lambda values: values.update(notes=["read once", 3], better={"f1": "higher", "x": "up"}))
    run = read_run(path)
    assert (run.notes, run.better) == (("read once",), {"f1": "higher"})
    edit(path / "run.json", lambda values: values.update(better=[1]))
    assert read_run(path).better == {}


# -- several runs of one seed ----------------------------------------------------------------------


def again(before: StoredRun, id: str, **changes: Any) -> StoredRun:
    """The same run done once more, later, with whatever is different."""
    config = {**before.config, **changes.pop("config", {})}
    return dataclasses.replace(before, path=Path(id), id=id, config=config, **changes)


def test_two_runs_of_a_seed_are_one_seed_and_the_newer_is_shown() -> None:
    first = stored([0.2], 0, "a")
    (setting,) = group_runs([first, again(first, "id-b"), stored([0.6], 1, "c")])
    assert [run.id for run in setting.runs] == ["id-b", "id-c-1"]
    assert setting.mean.spread["accuracy"] == [pytest.approx(0.4 / 2**0.5)]
    data = page_data([first, again(first, "id-b")])
    assert data["settings"][0]["mean"] is None and len(data["settings"][0]["runs"]) == 1
    assert data["unreadable"] == ["a: 2 runs of seed 0: the newer is shown, not id-a-0"]


def test_of_several_runs_of_a_seed_the_newest_complete_one_counts() -> None:
    first = stored([0.2, 0.3], 0, "a")
    going_on = again(first, "id-c", status="running", rounds=first.rounds[:1], round=1)
    kept, output = one_of_each([first, again(first, "id-b"), going_on])
    assert [run.id for run in kept] == ["id-b"]
    assert output == ["a: 3 runs of seed 0: the newest that is complete is shown, not id-a-0, id-c"]
    kept, output = one_of_each([dataclasses.replace(first, status="interrupted"), going_on])
    assert [run.id for run in kept] == ["id-a-0"] and "the longest is shown" in output[0]


def test_how_a_run_is_kept_or_computed_makes_no_setting() -> None:
    first = stored([0.2], 0, "a")
    execution = {"device": "cuda", "engine": "loop", "precision": "bf16"}
    ways = [{"execution": {key: value}} for key, value in execution.items()]
    for way in (*ways, {"storage": {"checkpoint_every": 5}}, {"storage": {"keep_state": True}}):
        other = again(first, "id-b", config={**way, "seed": 1})
        (setting,) = group_runs([first, other])
        assert setting.label == "MTGC" and setting.seeds == [0, 1]
    _, output = one_of_each([first, again(first, "id-c", config={"execution": execution})])
    assert "2 runs of seed 0 (device cpu and cuda, engine — and loop, precision fp32 and bf16)" in output[0]


def test_runs_of_another_version_of_a_file_are_another_setting() -> None:
    config = {"plugins": ["/home/me/rule.py"]}
    old, new = (
        again(stored([0.2]), f"id-{digest}", config=config, files={"/home/me/rule.py": digest})
        for digest in ("aa", "bb")
    )
    result = group_runs([old, new])
    assert len(result) == 2 and len({each.label for each in result}) == 2
    assert split_config([old, new])[1] == [{"files.rule.py": "#aa"}, {"files.rule.py": "#bb"}]
    moved = again(new, "id-cc", config={"plugins": ["/srv/rule.py"]}, files={"/srv/rule.py": "bb"})
    assert len(group_runs([new, moved])[0].runs) == 1, "where a file lies is no difference"


def test_an_archive_and_its_own_folder_are_one_run(runs: Path, tmp_path: Path) -> None:
    result = list_runs(runs)
    pack_runs(result, runs, tmp_path / "runs.tar.gz")
    both, _ = collect_runs([tmp_path / "runs.tar.gz", runs])
    assert sorted(run.id for run in both) == sorted(run.id for run in result)


def test_the_table_of_a_sweep_and_the_report_have_one_statistic() -> None:
    runs = [stored([value], seed, f"s{seed}") for seed, value in enumerate((0.803, 0.788, 0.81))]
    entries = [SweepEntry(run.name, "mtgc", Experiment()) for run in runs]
    (row,) = table(entries, {run.name: run for run in runs})
    (setting,) = group_runs([*runs, again(runs[0], "id-z")])
    assert (setting.mean.y["accuracy"], setting.mean.spread["accuracy"]) == (
        [pytest.approx(row.final)],
        [pytest.approx(row.final_deviation)],
    )
