"""Search spaces, and configs as files."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stratafl.base.errors import InvalidInput
from stratafl.config.schema import Config
from stratafl.tune.output import toml
from stratafl.tune.task import budgets_of, space_of


def config(**changes: Any) -> Config:
    tables = {
        "tree": {"shape": "2x3"},
        "method": {"name": "fedprox", "mu": 0.1},
        "schedule": {"periods": [4, 10]},
        "leaf": {"lr": 0.1, "batch": 20},
        "run": {"rounds": 8},
    }
    return Config.of({**tables, **changes})


def test_a_config_has_neighbours() -> None:
    space = space_of(config())
    axes = {axis.name: axis.values for axis in space.axes}
    assert axes["periods.1"] == (1, 2, 4, 8, 16) and axes["periods.2"] == (2, 5, 10, 20, 40)
    assert axes["lr"] == (0.025, 0.05, 0.1, 0.2, 0.4) and axes["batch"] == (10, 20, 40)
    assert axes["participation"] == (0.5, 1.0)
    assert [each["name"] for each in axes["method"]] == ["fedprox", "hfedavg", "mtgc"]
    assert space.baseline is not None and space.config_of(space.baseline) == space.config


def test_longer_periods_have_fewer_rounds() -> None:
    space = space_of(config(), {"defaults": False, "periods": [[4, 8], [10, 3]]})
    rounds = {tuple(c.schedule.periods): c.run.rounds for c in map(space.config_of, [(0, 1), (1, 1), (0, 0)])}
    assert rounds == {(4, 10): 8, (8, 10): 4, (4, 3): 27}
    double = space_of(config(), {"effort": 2.0})
    assert double.baseline is None, "it is another run"
    places = tuple(axis.baseline or 0 for axis in double.axes)
    assert double.config_of(places).run.rounds == 16


def test_passes_are_the_lowest_period() -> None:
    base = config(schedule={"periods": [4]}, leaf={"lr": 0.1, "batch": 20, "epochs": 2})
    space = space_of(base, {"defaults": False, "periods": [[4], [1, 2]]})
    one = space.config_of((0,))
    assert (one.schedule.periods, one.leaf.epochs, one.run.rounds) == ([4], 1, 16)


def test_participation_is_the_clients() -> None:
    base = config(schedule={"periods": [4, 10], "participation": [1.0, 0.75]})
    space = space_of(base, {"defaults": False, "participation": [0.75, 0.5]})
    assert space.config_of((0,)).schedule.participation == [1.0, 0.5]
    assert space.config_of((1,)) == base


def test_any_key_can_be_searched() -> None:
    space = space_of(config(), {"defaults": False, "leaf.momentum": [0.9, 0.0], "leaf": {"clip": [1.0]}})
    chosen = space.config_of((1, 0))
    assert chosen.leaf.momentum == 0.9 and chosen.leaf.clip == 1.0
    assert space.label((1, 0)) == "leaf.momentum 0.9 leaf.clip 1.0"


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"defaults": False}, "leaves nothing to choose"),
        ({"defaults": False, "lr": [0.1]}, "leaves nothing to choose"),
        ({"lr": []}, "plan.lr = .*must be a list of values"),
        ({"lr": 0.1}, "plan.lr = 0.1: must be a list of values"),
        ({"lr": [0.1, 0.1]}, "has a value twice"),
        ({"lr": [0.1, -1.0]}, "lr = -1.0"),
        ({"rate": [0.1]}, "plan key = 'rate': unknown"),
        ({"periods": [[1, 2]]}, "a list of values per edge level, root first, 2 of them"),
        ({"periods": [[1, 2], [0, 4]]}, "periods = 0"),
        ({"method": ["mtgcc", "mtgc"]}, "did you mean 'mtgc'"),
        ({"effort": 0}, "plan.effort"),
        ({"defaults": 1}, "plan.defaults"),
        ({"leaf.speed": [1, 2]}, "leaf key = 'speed'"),
    ],
)
def test_what_cannot_be_searched_is_refused_before_anything_is_trained(plan: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        space_of(config(), plan)


def test_the_guide_has_a_table_that_can_be_searched() -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "plan.md").read_text()
    text = page.partition("```toml\n")[2].partition("```")[0]
    for given in (text, text.replace("# participation", "participation").replace("# batch", "batch")):
        space = space_of(config(), tomllib.loads(given)["plan"])
        assert {"periods.1", "periods.2", "lr", "method", "leaf.momentum"} <= {axis.name for axis in space.axes}


def test_a_file_with_a_plan_is_a_config_all_the_same() -> None:
    assert Config.of({"plan": {"lr": [0.1, 0.2]}, "leaf": {"lr": 0.3}}).leaf.lr == 0.3


@pytest.mark.parametrize(
    "given",
    [
        config(),
        config(leaf={"lr": 1e-5, "batch": None, "schedule": {"name": "step", "every": 3}}),
        config(method={"rules": ["average", {"name": "fedprox", "mu": 0.5}]}),
        config(data={"name": 'a "file"\\ü.csv', "columns": {"inputs": ["a b", "c"], "tab\t": "\x7f"}}),
        replace(config(), run=replace(config().run, stop_when="loss <= 0.1", evaluate_levels=(0, 1))),
    ],
)
def test_a_config_as_a_file_is_the_same_config(given: Config) -> None:
    def plain(each: Config) -> dict[str, Any]:
        tables = each.as_dict()
        tables["leaf"]["batch"] = tables["leaf"]["batch"] or 0
        tables["run"] = {key: list(v) if isinstance(v, tuple) else v for key, v in tables["run"].items()}
        return tables

    assert plain(Config.of(tomllib.loads(toml(given)))) == plain(given)


def test_budgets() -> None:
    assert budgets_of(["seconds=3600", "bytes=1e9"]) == {"seconds": 3600.0, "bytes": 1e9}
    for texts in (["seconds"], ["seconds=0"], ["tea=1"], ["seconds=1", "seconds=2"]):
        with pytest.raises(InvalidInput):
            budgets_of(texts)
