"""The commands as a user types them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import click
import pytest
import typer
from safetensors.torch import load_file
from typer import rich_utils
from typer.testing import CliRunner

from stratafl.cli.main import COMMAND_GROUP, add_installed_commands, app
from stratafl.rules import registry
from stratafl.runs import read_run
from tests.commands import CONFIG, command
from tests.slow import slow


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)  # which is where runs go unless told otherwise
    path = tmp_path / "small.toml"
    path.write_text(CONFIG)
    return path


def every_command(group: click.Command, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """The words of each command and each group of them, as a user types them."""
    below = getattr(group, "commands", {})
    return [path, *(words for name in below for words in every_command(below[name], (*path, name)))]


COMMANDS = every_command(typer.main.get_command(app))
HEAVY = ("torch", "pydantic", "numpy", "pandas", "matplotlib", "safetensors", "sklearn", "flwr")
LOADED = """
import atexit, json, sys
packages = lambda: sorted({name.partition(".")[0] for name in sys.modules})
atexit.register(lambda: print(json.dumps(packages()), file=sys.stderr))
from stratafl.__main__ import main
main()
"""


def test_the_commands_are_few_and_in_groups() -> None:
    shown = {name: each for name, each in typer.main.get_command(app).commands.items() if not each.hidden}  # type: ignore[attr-defined]
    assert set(shown) - {"reproduce"} == {
        "init", "run", "resume", "sweep", "tune", "config", "runs", "report", "cost", "list", "data", "demo", "deploy",
    }  # fmt: skip
    assert len({each.rich_help_panel for name, each in shown.items() if name != "reproduce"}) == 4
    assert {("data", "show"), ("deploy", "up"), ("runs", "diff"), ("cost timeline",)} <= set(COMMANDS)


@pytest.mark.parametrize(
    "words",
    [("--version",), *((*each, "--help") if len(each) < 2 else slow((*each, "--help")) for each in COMMANDS)],
    ids=" ".join,
)
def test_help_comes_before_anything_heavy(words: tuple[str, ...]) -> None:
    """Help that first loads PyTorch takes seconds; a command loads it when it begins to work."""
    ran = subprocess.run([sys.executable, "-c", LOADED, *words], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0 and ran.stdout
    assert not set(HEAVY) & set(json.loads(ran.stderr))


def test_a_shell_completes_commands_and_options_at_once() -> None:
    """Each press of a key starts the program anew, so nothing heavy may be loaded for it."""
    asked = {"_STRATAFL_COMPLETE": "complete_bash", "COMP_CWORD": "1"}
    for words, offered in (("stratafl ru", ["run", "runs"]), ("stratafl --vers", ["--version"])):
        told = {**os.environ, **asked, "COMP_WORDS": words}
        command = [sys.executable, "-c", LOADED]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=120, env=told)
        assert ran.stdout.split() == offered
        assert not set(HEAVY) & set(json.loads(ran.stderr))


def test_a_command_that_is_not_installed_says_how_to_install_it() -> None:
    plain = typer.Typer()
    plain.command("run")(lambda: None)
    gone = EntryPoint("gone", "no_such_package:command", COMMAND_GROUP)
    add_installed_commands(plain, [gone])
    ran = CliRunner().invoke(plain, ["reproduce", "table1", "--scale", "quick"])
    assert ran.exit_code == 2
    assert ran.stderr == "error: stratafl reproduce is not installed: in a checkout, pip install ./papers\n"
    shown = CliRunner().invoke(plain, ["--help"]).output
    assert "run" in shown and "reproduce" not in shown and "gone" not in shown


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_what_a_shell_needs_for_completion_is_shown(shell: str) -> None:
    told = {**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    command = [sys.executable, "-m", "stratafl", "--show-completion", shell]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, env=told)
    assert ran.returncode == 0 and "_STRATAFL_COMPLETE" in ran.stdout


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_help_fits_a_terminal(words: tuple[str, ...], width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # Typer reads a width of its own once, at its first help, which another test may have asked for
    monkeypatch.setattr(rich_utils, "MAX_WIDTH", None)
    ran = CliRunner().invoke(app, [*words, "--help"], env={"COLUMNS": str(width)})
    assert ran.exit_code == 0
    lines = ran.output.splitlines()
    assert max(map(len, lines)) == width  # its boxes are as wide as the terminal: the width was looked at
    assert "…" not in ran.output


@pytest.mark.parametrize(("wrong", "nearest"), [(("rn",), "run"), (("data", "shw"), "show")])
def test_a_command_nobody_knows_is_answered_with_the_nearest(wrong, nearest, monkeypatch, capsys) -> None:
    assert command(monkeypatch, *wrong) == 2
    shown = capsys.readouterr().err
    assert f"'{nearest}'" in shown and shown.count("Did you mean") == 1


def test_run_shows_plain_lines_off_a_terminal(config, monkeypatch, capsys) -> None:
    assert command(monkeypatch, "run", config) == 0
    shown = capsys.readouterr()
    assert [line.split("  ")[0] for line in shown.err.splitlines()] == [f"small: round {r}/3" for r in (1, 2, 3)]
    assert "accuracy 0." in shown.err
    assert "small: 3 rounds" in shown.out
    assert "\x1b" not in shown.err + shown.out


def test_quiet_and_json(config, monkeypatch, capsys) -> None:
    assert command(monkeypatch, "run", config, "--quiet", "--json", "--set", "rounds=2") == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    summary = json.loads(shown.out)
    assert summary["rounds"] == 2
    assert [level["level"] for level in summary["communication"]] == [1, 2]
    assert summary["final"]["accuracy"] > 0.3


def test_a_run_has_a_folder_of_its_own(config, monkeypatch, capsys, tmp_path) -> None:
    folder = tmp_path / "deep" / "runs"
    for name in ("small", "other"):
        given = [] if name == "small" else ["--name", name]
        assert command(monkeypatch, "run", config, "--quiet", "--runs", folder, *given) == 0
    (path,) = folder.glob("small-*")
    assert f"written to {path}" in capsys.readouterr().out
    assert sorted(p.name for p in folder.iterdir()) == sorted([path.name, *(p.name for p in folder.glob("other-*"))])
    run = read_run(path)
    assert (run.name, run.status, run.reason, run.round, run.total) == ("small", "done", "", 3, 3)
    assert [r["round"] for r in run.rounds] == [1, 2, 3]
    assert run.rounds[-1]["metrics"] == run.summary["final"]
    assert load_file(path / "model.safetensors")["1.weight"].shape == (10, 64)
    assert run.config["schedule"]["periods"] == [2, 2]
    assert [sum(level["samples"]) for level in run.tree["levels"]] == [1440, 1440, 1440]
    assert run.tree["levels"][1]["parents"] == [0, 0]


def test_a_wrong_config_is_one_line_and_leaves_nothing(config, monkeypatch, capsys, tmp_path) -> None:
    folder = tmp_path / "runs"
    assert command(monkeypatch, "run", config, "--runs", folder, "--set", "client.lr=-1") == 2
    shown = capsys.readouterr()
    assert shown.err.splitlines() == ["error: client.lr = -1: must be a finite number above 0"]
    assert shown.out == ""
    assert not folder.exists()


@pytest.mark.parametrize(
    ("changes", "method"),
    [
        (["method=scaffold"], {"name": "scaffold", "params": {}}),
        (["method.mu=0.1"], {"name": "fedprox", "params": {"mu": 0.1}}),
        (["method=fedprox", "method.mu=0.3"], {"name": "fedprox", "params": {"mu": 0.3}}),
        (["method={name='feddyn', alpha=0.2}"], {"name": "feddyn", "params": {"alpha": 0.2}}),
    ],
)
def test_a_method_is_set_as_a_whole_or_by_parameter(changes, method, config, monkeypatch, tmp_path) -> None:
    config.write_text(CONFIG.replace("[model]", '[method]\nname = "fedprox"\nmu = 0.5\n\n[model]'))
    options = [word for change in [*changes, "seed=3", "rounds=1"] for word in ("--set", change)]
    assert command(monkeypatch, "run", config, "--quiet", *options) == 0
    (path,) = (tmp_path / "runs").iterdir()
    stored = read_run(path).config
    assert stored["method"] == {**method, "rules": None}
    assert (stored["seed"], stored["rounds"]) == (3, 1)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("run.rounds=2", "run"),
        ("leaf.lr=0.2", "leaf.lr = 0.2: is client.lr now"),
        ("client.batch=5", "client.batch = 5: unknown"),
    ],
)
def test_an_old_key_is_one_line(change, told, config, monkeypatch, capsys) -> None:
    assert command(monkeypatch, "run", config, "--set", change) == 2
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1 and told in shown


NAMED_LIKE_OPTIONS = """
from torch import nn

class Net(nn.Module):
    def __init__(self, input_shape, classes, base, lora, local_parameters):
        super().__init__()
        assert (base, lora, local_parameters) == (16, "none", 2)
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, base), nn.Linear(base, classes))

    def forward(self, x):
        return self.layers(x)
"""


def test_a_models_parameter_may_have_the_name_of_an_option(config, monkeypatch, tmp_path) -> None:
    (tmp_path / "net.py").write_text(NAMED_LIKE_OPTIONS)
    params = "params = { base = 16, lora = 'none', local_parameters = 2 }"
    config.write_text(CONFIG.replace('name = "logistic"', f'name = "net.py:Net"\n{params}'))
    assert command(monkeypatch, "run", config, "--quiet") == 0
    (path,) = (tmp_path / "runs").iterdir()
    assert load_file(path / "model.safetensors")["layers.1.weight"].shape == (16, 64)


@pytest.mark.parametrize(
    "change",
    [
        "model.name=builtins:exit",
        "model.name=time:sleep",
        f"seed={'9' * 5_000}",
        "execution.device=meta",
        f"plugins=['{'deep/' * 2_000}mine.py']",
        "run.\x1b[31m=1",
    ],
)
def test_whatever_is_wrong_is_one_printable_line_and_exit_code_2(change, config, monkeypatch, capsys, tmp_path) -> None:
    assert command(monkeypatch, "run", config, "--set", change) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("error: ")
    assert shown.err.endswith("\n")
    assert shown.err[:-1].isprintable()
    assert len(shown.err) <= 620
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("change", ["model.name=exits.py:make", "plugins=['exits.py']"])
def test_a_file_that_ends_the_process_is_named_with_its_line(change, config, monkeypatch, capsys, tmp_path) -> None:
    (tmp_path / "exits.py").write_text("raise SystemExit(0)")
    assert command(monkeypatch, "run", config, "--set", change) == 4
    shown = capsys.readouterr()
    assert shown.out == ""
    line, place, source = shown.err.splitlines()
    assert line.startswith("error: ") and line.endswith("cannot be imported: SystemExit: 0")
    assert place.endswith("exits.py, line 1, in <module>")
    assert source == "    raise SystemExit(0)"
    assert not (tmp_path / "runs").exists()


def test_a_path_that_is_too_long_is_one_line(config, monkeypatch, capsys) -> None:
    for arguments in (["run", "a" * 5_000], ["run", config, "--runs", "a" * 5_000], ["resume", "a" * 5_000]):
        assert command(monkeypatch, *arguments) == 2
        shown = capsys.readouterr().err
        assert shown.startswith("error: ") and shown.count("\n") == 1
        assert len(shown) <= 620


def test_methods_lists_every_rule(monkeypatch, capsys) -> None:
    assert command(monkeypatch, "list", "methods", "--json") == 0
    methods = {entry["name"]: entry for entry in json.loads(capsys.readouterr().out)}
    assert {"hfedavg", "mtgc", "local_correction", "group_correction", "fedprox", "scaffold", "feddyn"} <= set(methods)
    assert methods["mtgc"]["parameters"] == {"restart": "zero"}
    assert all("\n" not in entry["summary"] and entry["summary"] for entry in methods.values())
    monkeypatch.setenv("COLUMNS", "60")
    assert command(monkeypatch, "list", "methods") == 0
    assert all(len(line) <= 60 for line in capsys.readouterr().out.splitlines())


def test_methods_lists_a_rule_of_one_s_own_whatever_it_takes(monkeypatch, capsys, tmp_path) -> None:
    monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    plugin = tmp_path / "mine.py"
    plugin.write_text(
        "from stratafl import average, register\n"
        "@register('wants', summary='[red] as it is')\n"
        "def wants(share, kind=print): return average()\n"
    )
    assert command(monkeypatch, "list", "methods", "--plugin", plugin, "--json") == 0
    (mine,) = [each for each in json.loads(capsys.readouterr().out) if each["name"] == "wants"]
    assert mine["parameters"] == {"share": None, "kind": "<built-in function print>"}
    monkeypatch.setenv("COLUMNS", "200")
    assert command(monkeypatch, "list", "methods", "--plugin", plugin) == 0
    shown = capsys.readouterr().out
    assert "[red] as it is" in shown
    assert "share, kind=<built-in function print>" in shown


def test_demo_compares_four_methods_and_draws_them(monkeypatch, capsys, tmp_path) -> None:
    from stratafl.cli import demo

    settings = demo.settings
    monkeypatch.setattr(demo, "settings", lambda *given: {**settings(*given), "rounds": 2, "seed": 0})
    picture = tmp_path / "demo.png"
    assert command(monkeypatch, "demo", "--quiet", "--out", picture) == 0
    table = capsys.readouterr().out
    assert all(title in table for title in demo.METHODS)
    assert ">2" in table
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert [p.name for p in tmp_path.iterdir()] == ["demo.png"]


@pytest.mark.parametrize("out", ["small.toml/picture.png", "picture.txt", "."])
def test_a_picture_that_cannot_be_written_is_refused_before_the_work(out, config, monkeypatch, capsys) -> None:
    assert command(monkeypatch, "demo", "--out", config.parent / out) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("error: ") and shown.count("\n") == 1


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
    assert command(monkeypatch, "list", "datasets", "--json") == 0
    states = {each["name"]: each["state"] for each in json.loads(capsys.readouterr().out)}
    assert states["digits"] == "embedded"
    assert states["cifar10"] == "not prepared"
    assert command(monkeypatch, "data", "prepare", "cifar10", "--from", tmp_path) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert command(monkeypatch, "data", "prepare", "cifar") == 2
    assert "did you mean 'cifar10'" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_models_lists_the_paper_s_with_their_sizes(monkeypatch, capsys) -> None:
    assert command(monkeypatch, "list", "models", "--json") == 0
    sizes = {each["name"]: each["parameters"] for each in json.loads(capsys.readouterr().out)}
    assert sizes == {"logistic": 7850, "mlp": 199210, "cnn": 797962, "resnet18_gn": 11227812, "lstm": 133520}


BROKEN = """
import torch

class Broken(torch.nn.Module):
    def __init__(self, input_shape, classes):
        super().__init__()
        self.out = torch.nn.Linear(input_shape[-1] * input_shape[-2], classes)

    def forward(self, x):
        x = self.out(x.flatten(1))
        return x * float("nan") if self.training else x
"""


def test_a_run_in_which_everything_is_refused_fails_in_one_line(config, monkeypatch, capsys, caplog, tmp_path) -> None:
    (tmp_path / "broken.py").write_text(BROKEN)
    changes = ["--set", "model.name=broken.py:Broken", "--set", "rounds=50", "--set", "storage.checkpoint_every=2"]
    assert command(monkeypatch, "run", config, "--quiet", *changes) == 2
    (last,) = capsys.readouterr().err.splitlines()
    assert caplog.messages[0].startswith("round 1: every update was refused")
    assert last.startswith("error: round = 3: every update was refused, 3 rounds in a row: not finite: 0/0, 0/1")
    (path,) = (tmp_path / "runs").iterdir()
    run = read_run(path)
    assert (run.status, run.round, len(run.rounds)) == ("failed", 3, 3)
    assert f"error: {run.reason}" == last
    # gone on with, it fails again after a round
    assert command(monkeypatch, "resume", path, "--quiet") == 2
    assert "every update was refused, 3 rounds in a row" in capsys.readouterr().err


def test_what_was_refused_is_told_with_its_reason() -> None:
    from stratafl.cli.run import _refusals

    refused = {str(node): 3 for node in range(30_000)}
    lines = list(_refusals(refused, {"1": 3, "2": 1}))
    assert lines[:3] == [
        "refused 3 times, its update was not finite: 0",
        "refused 3 times, its update was far too large: 1",
        "refused 3 times, its update was not finite, or 1 times far too large: 2",
    ]
    assert lines[-1] == "refused, too: 29,990 more, all in summary.json" and len(lines) == 11
    assert list(_refusals({}, {})) == []
