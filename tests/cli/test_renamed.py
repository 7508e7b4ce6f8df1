"""Former names of commands and options."""

from __future__ import annotations

import json
import shlex

import pytest

from stratafl.cli.renamed import present_words
from tests.commands import command


@pytest.mark.parametrize(
    ("former", "present"),
    [
        ("plan c.toml --minimise=bytes --max-seconds 60", "tune c.toml --minimize=bytes --time-limit 60"),
        ("plan c.toml --space s.toml --resume", "tune c.toml --search-space s.toml --resume"),
        ("price runs -n plato --csv a.csv --figure=b.png", "cost runs -n plato --out a.csv --out=b.png"),
        ("price runs --timeline t.png --round 3", "cost timeline runs --out t.png --round 3"),
        ("methods --plugin p.py", "list methods --plugin p.py"),
        ("models", "list models"),
        ("networks --json", "list networks --json"),
        ("networks show plato --tree 2x2", "list networks plato --tree 2x2"),
        ("data list", "list datasets"),
        ("data prepare mnist --partial", "data prepare mnist --allow-partial"),
        ("run --resume runs/a --force -q", "resume runs/a --allow-changes -q"),
        ("run -q --set rounds=9 --resume=runs/a", "resume runs/a -q --set rounds=9"),
        ("runs", "runs list"),
        ("runs other --status done", "runs list other --status done"),
        ("runs other --pack a.tgz --where seed=1", "runs export a.tgz other --where seed=1"),
    ],
)
def test_a_former_command_is_the_present_one(former: str, present: str, capsys) -> None:
    assert present_words(former.split()) == present.split()
    assert capsys.readouterr().err == f"note: this is now: stratafl {present}\n"


@pytest.mark.parametrize(
    "present", ["", "--help", "run c.toml", "runs --help", "runs list methods", "data show c.toml", "sweep plan"]
)
def test_a_present_command_stays_as_it_is(present: str, capsys) -> None:
    assert present_words(shlex.split(present)) == shlex.split(present)
    assert capsys.readouterr().err == ""


def test_a_former_command_does_what_it_did(monkeypatch, capsys) -> None:
    assert command(monkeypatch, "networks", "--json") == 0
    shown = capsys.readouterr()
    assert "lan_wan" in {each["name"] for each in json.loads(shown.out)}
    assert shown.err == "note: this is now: stratafl list networks --json\n"


def test_the_benchmark_is_a_module_of_the_repository(monkeypatch, capsys) -> None:
    assert command(monkeypatch, "bench", "--model", "cnn") == 2
    assert "python -m benchmarks.speed" in capsys.readouterr().err
