"""`stratafl.tune` from Python."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import stratafl
from stratafl.base.errors import InvalidInput
from tests.commands import command
from tests.tuning.conftest import TARGET

SPACE = {"defaults": False, "lr": [0.05, 0.1]}


def test_a_search_continues_where_the_command_began_it(file: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "space.toml").write_text("[tune]\ndefaults = false\nlr = [0.05, 0.1]\n")
    words = [
        "--target",
        TARGET,
        "--trials",
        1,
        "--seeds",
        1,
        "--search-space",
        "space.toml",
        "-o",
        "out",
        "--json",
        "-q",
    ]
    assert command(monkeypatch, "tune", file, "-n", "plato", *words) == 0
    printed = json.loads(capsys.readouterr().out)
    result = stratafl.tune(file, "plato", TARGET, trials=1, seeds=1, search_space=SPACE, out="out")
    assert result.is_complete and json.loads(Path("out/plan.json").read_text()) == printed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"network": []}, "network = None: must be given"),
        ({"minimize": "tea"}, "minimize = 'tea': unknown"),
        ({"time_limit": "soon"}, "time_limit = 'soon': must be a time above 0, such as 90s, 30m or 8h"),
        ({"budget": {"tea": 1}}, "budget = 'tea': unknown"),
        ({"target": "f1=x"}, "target = 'f1=x': must look like"),
        ({"search_space": {"defaults": False}}, "tune = "),
    ],
)
def test_errors_name_the_argument(options: dict, message: str, file: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput) as problem:
        stratafl.tune(file, **{"network": "plato", "target": 0.8, "out": tmp_path / "out", **options})
    assert str(problem.value).startswith(message)
