"""The commands as a user types them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from stratafl.cli import main

CONFIG = """
[tree]
shape = "2x2"
[model]
name = "logistic"
[schedule]
periods = [2, 2]
[run]
rounds = 3
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(CONFIG)
    return path


def command(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["stratafl", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def test_run_shows_plain_lines_off_a_terminal(config, monkeypatch, capsys) -> None:
    assert command(monkeypatch, "run", config) == 0
    shown = capsys.readouterr()
    assert [line.split("  ")[0] for line in shown.err.splitlines()] == [f"small: round {r}/3" for r in (1, 2, 3)]
    assert "accuracy 0." in shown.err
    assert "small: 3 rounds" in shown.out
    assert "\x1b" not in shown.err + shown.out


def test_quiet_and_json(config, monkeypatch, capsys) -> None:
    assert command(monkeypatch, "run", config, "--quiet", "--json", "--set", "run.rounds=2") == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    summary = json.loads(shown.out)
    assert summary["rounds"] == 2
    assert [level["level"] for level in summary["communication"]] == [1, 2]
    assert summary["final"]["accuracy"] > 0.3


def test_out_holds_the_run(config, monkeypatch, capsys, tmp_path) -> None:
    out = tmp_path / "deep" / "result"
    assert command(monkeypatch, "run", config, "--quiet", "--out", out) == 0
    assert sorted(p.name for p in out.iterdir()) == ["config.json", "model.safetensors", "rounds.jsonl", "summary.json"]
    rounds = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
    summary = json.loads((out / "summary.json").read_text())
    assert [r["round"] for r in rounds] == [1, 2, 3]
    assert rounds[-1]["metrics"] == summary["final"]
    assert load_file(out / "model.safetensors")["1.weight"].shape == (10, 64)
    assert json.loads((out / "config.json").read_text())["schedule"]["periods"] == [2, 2]
    assert [p.name for p in out.parent.iterdir()] == ["result"]

    assert command(monkeypatch, "run", config, "--quiet", "--out", out) == 2
    assert "already exists" in capsys.readouterr().err


def test_a_wrong_config_is_one_line_and_leaves_nothing(config, monkeypatch, capsys, tmp_path) -> None:
    out = tmp_path / "result"
    assert command(monkeypatch, "run", config, "--out", out, "--set", "leaf.lr=-1") == 2
    shown = capsys.readouterr()
    assert shown.err.splitlines() == ["error: leaf.lr = -1: must be a finite number above 0"]
    assert shown.out == ""
    assert not out.exists()


def test_methods_lists_every_rule(monkeypatch, capsys) -> None:
    assert command(monkeypatch, "methods", "--json") == 0
    methods = {entry["name"]: entry for entry in json.loads(capsys.readouterr().out)}
    assert {"hfedavg", "mtgc", "local_correction", "group_correction", "fedprox", "scaffold", "feddyn"} <= set(methods)
    assert methods["mtgc"]["parameters"] == {"restart": "zero"}
    assert all("\n" not in entry["summary"] and entry["summary"] for entry in methods.values())
    monkeypatch.setenv("COLUMNS", "60")
    assert command(monkeypatch, "methods") == 0
    assert all(len(line) <= 60 for line in capsys.readouterr().out.splitlines())


def test_demo_compares_four_methods_and_draws_them(monkeypatch, capsys, tmp_path) -> None:
    from stratafl import demo

    settings = demo.settings
    monkeypatch.setattr(demo, "settings", lambda *given: {**settings(*given), "run": {"rounds": 2, "seed": 0}})
    picture = tmp_path / "demo.png"
    assert command(monkeypatch, "demo", "--quiet", "--out", picture) == 0
    table = capsys.readouterr().out
    assert all(title in table for title in demo.METHODS)
    assert ">2" in table
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert [p.name for p in tmp_path.iterdir()] == ["demo.png"]


def test_ctrl_c_ends_a_run_with_one_line_and_nothing_written(config, tmp_path) -> None:
    out = tmp_path / "result"
    arguments = ["run", str(config), "--set", "run.rounds=100000", "--out", str(out)]
    process = subprocess.Popen(
        [sys.executable, "-m", "stratafl", *arguments], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    assert "round 1/" in process.stderr.readline()
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors.splitlines()[-1] == "interrupted; nothing was written"
    assert "Traceback" not in errors
    assert not out.exists()


def test_data_show_prints_the_split_and_draws_it(config, monkeypatch, capsys, tmp_path) -> None:
    picture = tmp_path / "split.png"
    changes = ["--set", "data.partition=[{name='iid'}, {name='classes', k=2}]", "--set", "data.rotation={step=20}"]
    assert command(monkeypatch, "data", "show", config, "--out", picture, "--json", *changes) == 0
    report = json.loads(capsys.readouterr().out)
    assert [level["classes"]["most"] for level in report["levels"]] == [4, 2]
    assert report["samples"] + report["dropped"] == 1442
    assert report["dropped"] > 0
    for path in (picture, tmp_path / "split_images.png"):
        assert path.read_bytes().startswith(b"\x89PNG")


def test_data_list_and_prepare(monkeypatch, capsys, tmp_path) -> None:
    monkeypatch.setenv("STRATAFL_DATA", str(tmp_path))
    monkeypatch.delenv("STRATAFL_REAL_DATA", raising=False)
    assert command(monkeypatch, "data", "list", "--json") == 0
    states = {each["name"]: each["state"] for each in json.loads(capsys.readouterr().out)}
    assert states["digits"] == "embedded"
    assert states["cifar10"] == "not prepared"
    assert command(monkeypatch, "data", "prepare", "cifar10", "--from", tmp_path) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert command(monkeypatch, "data", "prepare", "cifar") == 2
    assert "did you mean 'cifar10'" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_models_lists_the_paper_s_with_their_sizes(monkeypatch, capsys) -> None:
    assert command(monkeypatch, "models", "--json") == 0
    sizes = {each["name"]: each["parameters"] for each in json.loads(capsys.readouterr().out)}
    assert sizes == {"logistic": 7850, "mlp": 199210, "cnn": 797962, "resnet18_gn": 11227812, "lstm": 133520}
