"""A deployed tree trains with the config's loss and measures its metrics: leaves and root have the
user's own files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from stratafl import InvalidInput
from stratafl.deploy.sites.assemble import Assembled, reference_simulation
from stratafl.deploy.sites.provision import DeploymentTopology, provision
from tests.deploy.sites.one_process import OneProcess

pytestmark = pytest.mark.usefixtures("in_a_task")

OWN = """
import torch.nn.functional as F
from beside import BY


def smooth(outputs, targets, by=BY):
    return F.cross_entropy(outputs, targets, label_smoothing=by)


def sure(outputs, targets):
    return outputs.softmax(dim=1).amax(dim=1).mean()
"""
OBJECTIVE = """
loss = "mine.py:smooth"
[evaluation]
stop_when = "f1 >= 0.4"
metrics = { f1 = "f1", sure = { name = "mine.py:sure", better = "lower" } }
"""


def test_loss_metrics_and_stopping_are_the_simulation_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    (tmp_path / "beside.py").write_text("BY = 0.4\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    tree = OneProcess(tmp_path, "2x2", [2, 5], options=OBJECTIVE)
    for folder in tree.folders.values():
        assert {path.name for path in (folder / "code").iterdir()} >= {"mine.py", "beside.py"}
    tree.run()
    history = reference_simulation(tree.experiment).run().history
    assert [line["round"] for line in tree.rounds] == [result.round for result in history]
    assert len(history) < 4, "the run ends early"
    for line, result in zip(tree.rounds, history, strict=True):
        assert line["metrics"] == pytest.approx(result.metrics, abs=1e-4) and "sure" in line["metrics"]
    assert tree.difference() < 1e-6
    told = json.loads((tree.folders["root"] / "run.json").read_text())["better"]
    assert told == {"loss": "lower", "accuracy": "higher", "f1": "higher", "sure": "lower"}


def test_a_site_has_its_own_copy_of_a_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = tmp_path / "study"
    study.mkdir()
    (study / "mine.py").write_text(OWN)
    (study / "beside.py").write_text("BY = 0.4\n")
    (study / "run.toml").write_text(
        'loss = { name = "mine.py:smooth", by = 0.3 }\n[tree]\nshape = "2"\n[schedule]\nperiods = [2]\n'
    )
    (study / "topology.toml").write_text('config = "run.toml"\n')
    folders = provision(DeploymentTopology.load(study / "topology.toml"), tmp_path / "sites")
    for path in study.iterdir():
        path.rename(tmp_path / f"gone-{path.name}")
    monkeypatch.chdir("/")
    here = Assembled.of(folders["0"])
    here.durable.close()
    loss = here.leaf().engine.training.loss
    assert loss.keywords == {"by": 0.3} and loss.func.__name__ == "smooth"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ('data.test_partition = "like_train"', r"data\.test_partition = 'like_train': only the root"),
        ('loss = "mean"', "loss = 'mean': unknown"),
        ('evaluation.metrics = ["auc"]', r"metrics\[0\] = 'auc': unknown"),
        ('loss = "nowhere.py:loss"', "no such Python file"),
        ("evaluation.stop_when = { auc = 0.9 }", "'auc' is not measured"),
    ],
)
def test_what_cannot_be_deployed_is_refused_before_anything_is_made(tmp_path: Path, options: str, said: str) -> None:
    (tmp_path / "run.toml").write_text(f'{options}\n[tree]\nshape = "2"\n[schedule]\nperiods = [2]\n')
    (tmp_path / "topology.toml").write_text('config = "run.toml"\n')
    with pytest.raises(InvalidInput, match=said):
        provision(DeploymentTopology.load(tmp_path / "topology.toml"), tmp_path / "sites")
    assert not (tmp_path / "sites").exists()
