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
