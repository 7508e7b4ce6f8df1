"""The example configs are read and set up, and train a round."""

from __future__ import annotations

from pathlib import Path

import pytest

from stratafl.experiment.experiment import Experiment
from stratafl.simulation.build import build

EXAMPLES = Path(__file__).parent.parent / "examples"
WITH_DATA_AT_HAND = ["digits", "hospitals", "own_rule", "own_text"]


def test_all_configs_are_known() -> None:
    others = {"cifar10", "sweep", "topology"}  # data to prepare first; no configs of a run
    assert {file.stem for file in EXAMPLES.glob("*.toml")} == {*WITH_DATA_AT_HAND, *others}


@pytest.mark.parametrize("name", WITH_DATA_AT_HAND)
def test_an_example_trains_a_round_from_any_folder(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    periods = [1] * len(Experiment.from_toml(EXAMPLES / f"{name}.toml").schedule.periods)
    experiment = Experiment.from_toml(EXAMPLES / f"{name}.toml", ["rounds=1", f"schedule.periods={periods}"])
    assert next(build(experiment)).metrics["accuracy"] > 0
