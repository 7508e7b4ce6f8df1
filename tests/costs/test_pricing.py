"""Stored runs priced: recomputed as they were, over seeds, at the terminal, from an archive."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from stratafl import cost
from stratafl.base.errors import InvalidInput
from stratafl.cli.main import app
from stratafl.costs.costs import PriceableRun
from stratafl.costs.pricing import network_axes
from stratafl.experiment.experiment import Experiment
from stratafl.network.specification import Network
from stratafl.reports.page_data import page_data
from stratafl.runs import StoredRun, list_runs, read_run
from stratafl.runs.reader import pack_runs
from stratafl.runs.session import RunSession

NETWORK = Network.of(
    {
        "name": "ours",
        "currency": "EUR",
        "leaf": {"gflop_s": 0.1, "watts": 5, "money_per_hour": 1},
        "tier": [
            {"name": "home", "up_mbit_s": 20, "down_mbit_s": 50, "latency_s": 0.02, "pipe_up_mbit_s": 30},
            {"name": "far", "up_mbit_s": 5, "latency_s": 0.1, "money_per_gb_up": 0.1},
        ],
    }
)


def experiment(rounds: int = 3, seed: int = 0, **changes: dict[str, Any]) -> Experiment:
    tables: dict[str, dict[str, Any]] = {
        "tree": {"shape": "2x3"},
        "model": {"name": "mlp", "hidden": [8]},
        "schedule": {"periods": [2, 3]},
        "client": {"lr": 0.1, "batch_size": 16},
        "storage": {"checkpoint_every": 0},
    }
    sections = {**tables, **{key: {**tables.get(key, {}), **value} for key, value in changes.items()}}
    return Experiment(**sections, rounds=rounds, seed=seed)


def trained(description: Experiment, folder: Path) -> StoredRun:
    return read_run(RunSession.start(description, "study", folder).run().path)


CASES: dict[str, dict[str, Any]] = {
    "averaging": {"method": {"name": "hfedavg"}},
    "MTGC": {"method": {"name": "mtgc"}},
    "corrections that are kept": {"method": {"name": "mtgc", "restart": "keep"}},
    "corrections from gradients": {
        "method": {"name": "mtgc", "restart": "gradient"},
        "tree": {"shape": "2x2x2"},
        "schedule": {"periods": [2, 2, 2]},
    },
    "SCAFFOLD": {"method": {"name": "scaffold"}, "schedule": {"participation": [1.0, 0.5]}},
    "some take part": {"tree": {"shape": [3, 2]}, "schedule": {"participation": [1, 2]}},
    "one level more": {
        "tree": {"shape": "2x2x3"},
        "schedule": {"periods": [2, 3, 2], "participation": [None, 0.5, 2]},
    },
    "a server's momentum": {"method": {"rules": ["momentum", "fedprox"]}},
    "epochs and an optimizer of its own": {
        "client": {"optimizer": "adam", "optimizer_state": "keep"},
        "schedule": {"periods": [2, 1], "unit": "epochs"},
    },
    "a star": {"tree": {"shape": "5"}, "schedule": {"periods": [4]}},
}


@pytest.mark.parametrize("name", CASES)
def test_what_was_sent_is_recomputed_exactly(name: str, tmp_path: Path) -> None:
    run = trained(experiment(**CASES[name]), tmp_path)
    ready = PriceableRun.of(run)
    assert ready.recovered.notes == () and ready.recovered.buffers == 0
    result = ready.cost_on(NETWORK)
    assert run.summary is not None
    sent = [level["bytes_up"] + level["bytes_down"] for level in run.summary["communication"]]
    assert [float(each.sum()) for each in result.bytes] == sent
    total = result.up_to_round(3)
    assert sum(total.parts.values()) == pytest.approx(total.seconds) and total.joules > 0 and total.money > 0


def test_buffers_are_told_from_parameters(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(
        "from torch import nn\n\n\n"
        "class Net(nn.Sequential):\n"
        "    def __init__(self, input_shape, classes):\n"
        "        super().__init__(nn.Flatten(), nn.Linear(64, classes), nn.BatchNorm1d(classes))\n"
    )
    description = experiment(method={"name": "mtgc"}).replace(model=f"{tmp_path / 'net.py'}:Net")
    run = trained(description, tmp_path / "runs")
    recovered = PriceableRun.of(run).recovered
    assert (recovered.parameters, recovered.notes) == (64 * 10 + 10 + 20, ())
    assert recovered.buffers == 20


def test_epochs_are_as_many_steps_as_a_leaf_has_batches(tmp_path: Path) -> None:
    run = trained(experiment(**CASES["epochs and an optimizer of its own"]), tmp_path)
    samples = run.tree["levels"][-1]["samples"]
    assert PriceableRun.of(run).recovered.workload.steps_N.tolist() == [-(-each // 16) for each in samples]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two methods, two seeds each."""
    folder = tmp_path_factory.mktemp("runs")
    for method in ("hfedavg", "mtgc"):
        for seed in (0, 1):
            trained(experiment(method={"name": method}, seed=seed, rounds=6), folder)
    return folder


def test_settings_over_seeds(runs: Path) -> None:
    result = cost(runs, [NETWORK, "lan_wan"], ["accuracy=0.15", "loss=0.001"])
    assert [(each.setting, each.network) for each in result] == [
        ("HFedAvg", "ours"), ("MTGC", "ours"), ("HFedAvg", "lan_wan"), ("MTGC", "lan_wan"),
    ]  # fmt: skip
    soon, never, every = result[1].milestones
    assert (soon.until, never.until, every.until) == ("accuracy 15 %", "loss 0.001", "all rounds")
    assert every.seconds is not None and every.rounds is not None and every.rounds.mean == 6
    assert never.reached == 0 and never.seconds is None
    assert every.seconds.deviation == 0.0, "nothing is drawn in this network"
    alone = [PriceableRun.of(run).cost_on(NETWORK) for run in list_runs(runs)]
    assert every.seconds.mean == pytest.approx(alone[2].seconds_R.sum())
    jitter = result[3].milestones[-1].seconds
    assert jitter is not None and jitter.deviation is not None and jitter.deviation > 0


def test_the_command(runs: Path, tmp_path: Path) -> None:
    table, picture = tmp_path / "costs.csv", tmp_path / "time.png"
    words = ["cost", str(runs), "-n", "lan_wan", "-n", "mobile_edge", "--target", "0.15"]
    ran = CliRunner().invoke(app, [*words, "-o", str(table), "-o", str(picture)])
    assert ran.exit_code == 0, ran.output
    assert "On lan_wan" in ran.output and "On mobile_edge" in ran.output and "Where the time goes" in ran.output
    assert picture.stat().st_size > 10_000
    line = tmp_path / "round.svg"
    run = next(run.path.name for run in list_runs(runs) if run.method == "hfedavg")
    drawn = ["cost", "timeline", run, "--runs", str(runs), "-n", "lan_wan", "-o", str(line)]
    assert CliRunner().invoke(app, [*drawn, "--round", "6"]).exit_code == 0
    output = line.read_text()
    assert "round 6 of hfedavg on lan_wan" in output and "waits" in output and "1/2" in output
    with pytest.raises(InvalidInput, match="has 6 rounds"):
        CliRunner().invoke(app, [*drawn, "--round", "7"], catch_exceptions=False)
    rows = list(csv.DictReader(table.read_text().splitlines()))
    output = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)
    assert len(rows) == len(output) == 2 * 2 * 2
    assert [float(row["seconds"]) for row in rows] == pytest.approx([each["seconds"] for each in output])
    parts = ("away_2_s", "compute_2_s", *(f"{what}_{m}_s" for what in ("down", "up", "wait", "merge") for m in (1, 2)))
    assert all(sum(each[part] for part in parts) == pytest.approx(each["seconds"]) for each in output)


def test_an_archive_of_runs_is_as_good_as_its_folder(runs: Path, tmp_path: Path) -> None:
    packed = tmp_path / "some.tar.gz"
    pack_runs(list_runs(runs), runs, packed)
    assert cost([packed], NETWORK) == cost(runs, NETWORK)
    (tmp_path / "no.tgz").write_bytes(b"nothing")
    with pytest.raises(InvalidInput, match="cannot be read"):
        cost([tmp_path / "no.tgz"], NETWORK)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--network = None: must be given"),
        (["-n", "lanwan"], "did you mean 'lan_wan'?"),
        (["-n", "lan_wan", "--target", "f1=0.3"], "these runs have accuracy, loss"),
        (["-n", "lan_wan", "--target", "75"], "must be a finite number above 0 and at most 1"),
        (["-n", "lan_wan", "--target", "much"], "must look like 0.8, "),
        (["-n", "lan_wan", "-o", "f.jpg"], "--out = 'f.jpg': must end in .csv, .png, .svg or .pdf"),
        (["-n", "lan_wan", "--flops", "-1"], "must be a finite number above 0"),
        (["-n", "lan_wan", "--flops", "1e300"], "must be a finite number above 0 and at most 1e+60"),
        (["-n", "lan_wan", "-n", "plato", "-n", "lan_wan"], "--network = 'lan_wan': two networks of this name"),
    ],
)
def test_what_cannot_be_priced_gets_one_line(words: list[str], message: str, runs: Path) -> None:
    ran = CliRunner().invoke(app, ["cost", str(runs), *words])
    assert isinstance(ran.exception, InvalidInput) and message in str(ran.exception)


@pytest.mark.parametrize("flops", [-1, 0, float("nan"), 1e300, True])
def test_operations_from_python_are_looked_at(flops: float, runs: Path) -> None:
    with pytest.raises(InvalidInput, match=r"flops_per_sample = .*: must be a finite number above 0 and at most"):
        cost(runs, "lan_wan", flops_per_sample=flops)


def test_a_run_whose_participation_only_its_program_knows(runs: Path) -> None:
    run = list_runs(runs)[0]
    run.config["schedule"]["participation"] = {"name": "study:some"}
    with pytest.raises(InvalidInput, match="cannot be redrawn"):
        PriceableRun.of(run)


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """Runs of two settings; what a step of the first takes cannot be counted, as it multiplies no
    matrices."""
    (tmp_path / "net.py").write_text(
        "import torch\n\n\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self, input_shape, classes):\n"
        "        super().__init__()\n"
        "        self.scale = torch.nn.Parameter(torch.ones(classes))\n\n"
        "    def forward(self, x):\n"
        "        return self.scale * x.flatten(1)[:, : len(self.scale)]\n"
    )
    description = experiment(rounds=2)
    trained(description.replace(model=f"{tmp_path / 'net.py'}:Net"), tmp_path / "runs")
    trained(description, tmp_path / "runs")
    (tmp_path / "net.py").unlink()
    return tmp_path / "runs"


def test_a_run_that_cannot_be_priced_stops_no_other(mixed: Path) -> None:
    own, model = list_runs(mixed)
    words = ["cost", str(mixed), "-n", "lan_wan", "-n", "plato", "--json"]
    ran = CliRunner().invoke(app, words)
    assert ran.exit_code == 1
    output = [each for each in ran.stderr.splitlines() if each.startswith("left out: ")]
    assert (
        len(output) == 1 and own.name in output[0] and "cannot be priced on lan_wan: leaf.flops_per_sample" in output[0]
    )
    rows = json.loads(ran.stdout)
    assert [row["network"] for row in rows] == ["lan_wan", "plato", "plato"]
    (alone,) = json.loads(CliRunner().invoke(app, ["cost", str(model.path), "-n", "lan_wan", "--json"]).stdout)
    assert rows[0]["seconds"] == alone["seconds"]
    assert CliRunner().invoke(app, [*words, "--flops", "1e4"]).exit_code == 0
    with pytest.warns(UserWarning, match="cannot be priced on lan_wan"):
        assert [each.network for each in cost(mixed, ["lan_wan", "plato"])] == ["lan_wan", "plato", "plato"]
    with pytest.raises(InvalidInput, match=rf"leaf.flops_per_sample = None: .*{own.name}"):
        cost(own.path, "lan_wan")


def test_of_a_settings_seeds_those_are_priced_that_can_be(runs: Path) -> None:
    stored = list_runs(runs)
    stored[1].rounds.clear()
    with pytest.warns(UserWarning, match=f"{stored[1].name} cannot be priced: .*has no round yet"):
        result = cost(stored, NETWORK)
    assert [(each.setting, each.at("all rounds").runs) for each in result] == [("HFedAvg", 1), ("MTGC", 2)]


@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
def test_networks_show(ending: str, tmp_path: Path) -> None:
    out = tmp_path / f"net.{ending}"
    ran = CliRunner().invoke(app, ["list", "networks", "nyc_mesh", "--out", str(out), "--tree", "2x2x2"])
    assert ran.exit_code == 0 and "pause_s" in ran.output and out.stat().st_size > 4_000


def test_networks_list() -> None:
    names = {each["name"] for each in json.loads(CliRunner().invoke(app, ["list", "networks", "--json"]).stdout)}
    assert {"lan_wan", "mobile_edge", "plato", "nyc_mesh", "halos_regions", "leo_relay", "data_centre"} == names


def test_the_report_has_a_networks_seconds_and_cost_as_axes(runs: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    ran = CliRunner().invoke(app, ["report", str(runs), "-o", str(out), "-n", "lan_wan", "-n", "mobile_edge"])
    assert ran.exit_code == 0, ran.output
    data = page_data(list_runs(runs), extra_axes=network_axes(list_runs(runs), [NETWORK]))
    assert list(data["axes"])[-2:] == ["seconds on ours", "cost on ours"] and data["unreadable"] == []
    (first, _), (mean, *_) = (each["runs"] for each in data["settings"]), [each["mean"] for each in data["settings"]]
    drawn = unpacked_axis(first[0]["curve"]["x"]["seconds on ours"])
    assert drawn == pytest.approx(PriceableRun.of(list_runs(runs)[0]).cost_on(NETWORK).seconds_R.cumsum(), rel=1e-6)
    assert len(unpacked_axis(mean["x"]["cost on ours"])) == 6
    page = out.read_text()
    assert '"seconds on mobile_edge"' in page and '"cost on lan_wan"' in page and '"cost on mobile_edge"' not in page


def unpacked_axis(points: Any) -> list[float]:
    if isinstance(points, dict):
        return [points["first"] + points["step"] * place for place in range(points["count"])]
    return list(points)


def test_a_run_that_cannot_be_priced_is_named_in_the_report(runs: Path) -> None:
    run = list_runs(runs)[0]
    run.config["schedule"]["participation"] = {"name": "study:some"}
    result = network_axes([run], [NETWORK])
    assert "cannot be redrawn" in result.notes[0] and result.points[run.path] == {}
