"""Optimisers from a config: by name, by table, by import path; stored, killed and gone on with."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path

import pytest
import torch

from stratafl.base.errors import InvalidInput
from stratafl.core.optimizer import SGD, Adam, AdamW
from stratafl.experiment.algorithm import client_update
from stratafl.experiment.experiment import Experiment
from stratafl.runs.provenance import source_files
from stratafl.simulation.build import build
from stratafl.simulation.deployed import leaf_trainer, part_of
from tests.runs.conftest import Server, contents, server
from tests.slow import slow

__all__ = ["server"]

DOCS = Path(__file__).parent.parent.parent / "docs" / "optimisers.md"
CONFIG = """
rounds = {rounds}

[tree]
shape = "2x2"

[model]
name = "logistic"

[schedule]
periods = [2, 2]
participation = [1.0, 1]

[client]
lr = 0.01
batch_size = 10
optimizer = {optimizer}
optimizer_state = "keep"

[storage]
checkpoint_every = 1
keep_state = true

[evaluation]
every = 20
"""


def config(optimizer: object, **more: object) -> Experiment:
    return Experiment.from_table(
        {"client": {"lr": 0.1, "optimizer": optimizer, **more}, "schedule": {"periods": [1, 1]}}
    )


def own(folder: Path) -> Path:
    """The example of the docs, in a file."""
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.S) if "class Signs" in block]
    path = folder / "my_optimiser.py"
    path.write_text(code)
    return path


def test_names_tables_and_paths(tmp_path: Path) -> None:
    assert client_update(config("sgd")).optimizer == SGD()
    assert client_update(config({"name": "sgd", "momentum": 0.5})).optimizer == SGD(0.5)
    assert client_update(config("adam")).optimizer == Adam()
    chain = client_update(config({"name": "adamw", "betas": [0.8, 0.9], "weight_decay": 0.1}, optimizer_state="keep"))
    assert chain.optimizer == AdamW((0.8, 0.9), weight_decay=0.1) and chain.keeps_optimizer_state
    path = own(tmp_path)
    assert client_update(config({"name": f"{path}:Signs", "beta": 0.5})).optimizer == (0.5,)
    assert client_update(config(f"{path}:Signs")).optimizer == (0.9,)
    # a run notices when the file changes
    for optimizer in (f"{path}:Signs", {"name": f"{path}:Signs"}):
        assert path in source_files(config(optimizer).to_table()).values()


@pytest.mark.parametrize(
    ("name", "words"),
    [("Sign", "Signs"), ("Tensor", "cannot be made"), ("Signs", "cannot be made")],
)
def test_a_wrong_path_or_parameter_is_one_line(tmp_path: Path, name: str, words: str) -> None:
    path = own(tmp_path)
    with pytest.raises(InvalidInput, match=words) as caught:
        client_update(config({"name": f"{path}:{name}", "gamma": 1}))
    assert str(caught.value).startswith("client.optimizer")


def test_a_deployed_leaf_has_the_config_s_optimiser() -> None:
    study = config("adam", optimizer_state="keep")
    engine = leaf_trainer(study, 1, *part_of(study, 1)).engine
    assert engine.client_update.optimizer == Adam() and engine.client_update.keeps_optimizer_state


def test_the_example_learns_on_every_engine(tmp_path: Path) -> None:
    path = own(tmp_path)
    text = CONFIG.format(optimizer=f'"{path}:Signs"', rounds=3)
    (tmp_path / "study.toml").write_text(text)
    models = []
    for engine in ("loop", "stacked", "vmap"):
        sim = build(Experiment.from_toml(tmp_path / "study.toml", [f"execution.engine={engine}"]))
        models.append(sim.run().models[0])
        assert sim.engine.name == engine
    assert sim.history[-1].metrics["accuracy"] > 0.5
    for other in models[1:]:
        torch.testing.assert_close(models[0], other, rtol=0, atol=0.02)  # a sign may fall either way


@pytest.mark.parametrize("optimizer", [slow('{ name = "adamw", betas = [0.9, 0.99] }'), '"my_optimiser.py:Signs"'])
def test_a_run_that_is_killed_goes_on_to_the_same_bits(server: Server, tmp_path: Path, optimizer: str) -> None:
    own(tmp_path)
    study = tmp_path / "study.toml"
    study.write_text(CONFIG.format(optimizer=optimizer, rounds=30))
    code, output = server.run("run", study, "--quiet", "--runs", tmp_path / "whole", cwd=tmp_path)
    assert code == 0, output
    process = server.start("run", study, "--quiet", "--runs", tmp_path / "killed", cwd=tmp_path)
    until = time.monotonic() + 300
    while not list((tmp_path / "killed").glob("*/checkpoints/00000[2-9]")):
        assert time.monotonic() < until, process.said()
        time.sleep(0.001)
    process.kill(signal.SIGKILL)
    assert process.ends() == -signal.SIGKILL
    (run,) = (path for path in (tmp_path / "killed").iterdir() if not path.name.startswith("."))
    code, output = server.run("run", "--resume", run, "--quiet", cwd=tmp_path)
    assert code == 0, output
    (uninterrupted,) = (tmp_path / "whole").iterdir()
    assert contents(run) == contents(uninterrupted)
    assert '"optimizer"' in (uninterrupted / "checkpoints" / "000030" / "state.json").read_text()
