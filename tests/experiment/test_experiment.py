"""Experiments from files: what they may say, and the errors where they are wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from stratafl import InvalidInput
from stratafl.experiment.experiment import Experiment
from stratafl.experiment.sections import Data
from stratafl.rules import registry
from stratafl.simulation.build import build

GOOD = """
rounds = 2

[tree]
shape = [2, 3]

[data]
partition = [{ name = "iid" }, { name = "dirichlet", alpha = 0.3 }]

[model]
name = "logistic"

[method]
name = "fedprox"
mu = 0.1

[schedule]
periods = [2, 3]
participation = [1.0, 0.5]

[client]
lr = 0.2
batch_size = "full"
clip_norm = 5.0
lr_schedule = { name = "step", every = 1, factor = 0.5 }
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "run.toml"
    file.write_text(GOOD)
    return file


def test_a_config_becomes_the_run_it_describes(path: Path) -> None:
    simulation = build(Experiment.from_toml(path))
    assert simulation.federation.tree.sizes == (1, 2, 5)
    assert simulation.schedule.periods == (2, 3)
    assert simulation.engine.training.batch_size is None
    assert [simulation.client_update.lr(r) for r in range(2)] == [0.2, 0.1]
    assert [rule.local is not None for rule in simulation.federation.rules] == [False, True]
    history = simulation.run().history
    assert [r.round for r in history] == [1, 2]
    assert history[-1].metrics["accuracy"] > 0.5


def test_a_bare_value_stands_for_what_a_section_is_about(path: Path) -> None:
    experiment = Experiment.from_toml(path, ["schedule=[4, 3]", "client=0.1", "data=digits", "client.batch_size=4"])
    assert experiment.schedule.periods == [4, 3]
    assert (experiment.client.lr, experiment.client.batch_size, experiment.client.clip_norm) == (0.1, 4, None)
    assert experiment.data == Data("digits")


def test_changes_are_toml_values_or_plain_text(path: Path) -> None:
    changed = Experiment.from_toml(
        path, ["seed=7", "client.sampling=replacement", "tree.shape='2x2'", "client.lr=1e-2"]
    )
    client = changed.client
    assert (changed.seed, client.sampling, changed.tree.shape, client.lr) == (7, "replacement", "2x2", 0.01)


def test_a_rule_from_the_user_s_own_file_can_be_named(path: Path, tmp_path: Path) -> None:
    plugin = tmp_path / "mine.py"
    plugin.write_text(
        "from stratafl import average, register\n"
        "@register('halfway')\n"
        "def halfway(share: float = 0.5):\n"
        '    """The parent goes only part of the way to the mean."""\n'
        "    return average()._replace(merge=lambda memory, start, mean, weight:\n"
        "        (memory, start + share * (mean['model'] - start)))\n"
    )
    changes = ["method.name=halfway", f"plugins=['{plugin}']", "method.share=0.25", "rounds=1"]
    config = path.read_text().replace("mu = 0.1\n", "")
    path.write_text(config)
    simulation = build(Experiment.from_toml(path, changes))
    start = simulation.federation.levels[0].model[0].clone()
    simulation.run()
    assert not torch.equal(simulation.federation.levels[0].model[0], start)
    with pytest.raises(InvalidInput, match=r"halfway parameter = 'shares'.*did you mean 'share'"):
        build(Experiment.from_toml(path, [*changes, "method.shares=1"]))


@pytest.mark.parametrize(
    ("change", "field", "said"),
    [
        ("client.lrr=0.1", "client key", "did you mean 'lr'"),
        ("clint.lr=0.1", "experiment key", "did you mean 'client'"),
        ("client.lr='fast'", "client.lr = 'fast'", "must be a finite number above 0"),
        ("client.lr=-1", "client.lr", "above 0"),
        ("client.lr=nan", "client.lr", "finite"),
        ("client.batch_size=-3", "client.batch_size = -3", "at least 1"),
        ("client.sampling='epochs'", "client.sampling", "known: replacement, shuffle"),
        ("client.lr_schedule='cosinus'", "client.lr_schedule", "did you mean 'cosine'"),
        ("client.lr_schedule={name='step'}", "client.lr_schedule.every", "must be given"),
        ("client.lr_schedule={name='cosine', flor=1}", "client.lr_schedule key", "did you mean 'floor'"),
        ("client.optimizer={name='sgd', momentum=1}", "client.optimizer.momentum", "below 1"),
        ("client.clip_norm=0", "client.clip_norm", "above 0"),
        ("tree.shape='4y5'", "tree.shape = '4y5'", "joined by x"),
        ("tree.shape=[[2], 3]", "tree.shape", "same depth"),
        ("tree.weights='counts'", "tree.weights", "samples"),
        ("schedule.periods=[2]", "schedule.periods", "2 of them"),
        ("schedule.periods=6", "schedule.periods = 6", "2 of them"),
        ("schedule.steps_per_sync=[6, 4]", "schedule.steps_per_sync = [6, 4]", "is schedule.periods now"),
        ("schedule.participation=2.5", "schedule.participation", "at most 1"),
        ("method.name='fedprx'", "method", "did you mean 'fedprox'"),
        ("method.nu=1", "fedprox parameter", "did you mean 'mu'"),
        ("method.mu=-1", "fedprox.mu", "at least 0"),
        ("method.rules=['average']", "method", "either a name or rules"),
        ("model.name='mpl'", "model.name", "did you mean 'mlp'"),
        ("model.hidden=[3]", "model key", "unknown"),
        ("model", "--set", "section.key=value"),
        ("data.source='digit'", "data.source", "did you mean 'digits'"),
        ("data.partition=[{name='iid'}]", "data.partition", "2 of them"),
        ("data.partition='iid'", "data.partition", "must be a list"),
        ("data.partition=[{name='iid'}, {name='dirichlet', alpha=-1}]", "data.partition[1]", "alpha"),
        ("rounds=0", "rounds", "at least 1"),
        ("rounds=2.5", "rounds", "whole number"),
        ("evaluation.levels=[7]", "evaluation.levels", "at most 2"),
        ("execution.device='gpu'", "execution.device", ""),
        ("plugins=['none.py']", "plugins", "no such Python file"),
        (f"plugins=['{'a' * 5_000}.py']", "plugins", "no such Python file"),
        ("plugins=[['none.py']]", "plugins", "must be a list of paths"),
        ("execution.device='meta'", "execution.device", "meta"),
        ("data.partition=[{name=['iid']}, {name='iid'}]", "data.partition[0].name", "unknown"),
        ("data.partition=[{name='iid'}, {name={a=1}}]", "data.partition[1].name", "unknown"),
        ("data.partition=[{name='iid'}, {name='iid', sizes=[1, [2]]}]", "data.partition[1].sizes", "whole number"),
        (f"data.partition=[{{name='iid'}}, {{name='classes', k={10**30}}}]", "data.partition[1].k", "at most"),
        (f"data.rotation={{start={10**30}}}", "data.rotation.start", "at most 1e+06"),
        ("data.rotation={step=inf}", "data.rotation.step", "finite"),
        (f"tree.shape='{'x'.join(['1'] * 2_000)}'", "tree.shape", "at most 100 levels"),
        (f"tree.shape={'[' * 130}1{']' * 130}", "tree.shape", "at most 120 lists"),
        (f"tree.shape={'[' * 5_000}1{']' * 5_000}", "--set", "nested too deeply"),
        ("schedule.periods=[1, 1000000000]", "schedule.periods", "at most 1,000,000 local steps"),
        (f"seed={'9' * 5_000}", "--set", "number is too long"),
        (f"seed=0x{'f' * 5_000}", "seed", "too large"),
        (f"model.width=0x{'f' * 5_000}", "model.width", "too large"),
        ("model.classes=3", "model key", "unknown"),
        (f"client.{'a' * 5_000}=1", "client key", "unknown"),
        ("client.\x1b[31m=1", "client key", "unknown"),
        ("run.rounds=5", "run.rounds = 5", "is rounds now"),
        ("leaf.epochs=5", "leaf.epochs = 5", "is the last of schedule.periods now"),
        ("objective='mse'", "objective = 'mse'", "loss and evaluation.metrics"),
        ("model.name='builtins:exit'", "model.name", "is a part of Python itself"),
        ("model.name='time:sleep'", "model.name", "is a part of Python itself"),
        ("model.name='torch:rand'", "model.name", "torch.nn.Module's class"),
        ("model.name='torch.nn:Linear'", "model.name", "cannot be made"),
    ],
)
def test_one_line_says_what_is_wrong(path: Path, change: str, field: str, said: str) -> None:
    with pytest.raises(InvalidInput) as problem:
        build(Experiment.from_toml(path, [change]))
    message = str(problem.value)
    assert message.startswith(field), message
    assert said in message
    assert message.isprintable()
    assert len(message) <= 620


@pytest.mark.parametrize("text", ["[tree", "client = true", "[tree]\nshape", "\x00", "[[client]]\nlr = 2"])
def test_broken_files(path: Path, text: str) -> None:
    path.write_text(text)
    with pytest.raises(InvalidInput):
        Experiment.from_toml(path)


@pytest.mark.parametrize("alpha", ["'much'", "['much']", "[1.0]", "{a = 1}", "true", "nan", "-1.0", "1e300"])
@pytest.mark.parametrize("field", ["alpha", "beta", "samples", "features", "classes", "test_share"])
def test_synthetic_data_says_which_number_is_none(tmp_path: Path, field: str, alpha: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(f"[data]\nsource = 'synthetic'\narguments = {{ {field} = {alpha} }}\n[schedule]\nperiods = [1, 1]")
    with pytest.raises(InvalidInput, match=f"^data.arguments.{field} = "):
        build(Experiment.from_toml(path))


def test_a_number_that_is_too_long_and_a_nest_that_is_too_deep(path: Path) -> None:
    for value, said in (("9" * 5_000, "number is too long"), ("[" * 5_000 + "]" * 5_000, "nested too deeply")):
        path.write_text(f"[tree]\nshape = {value}")
        with pytest.raises(InvalidInput, match=said):
            Experiment.from_toml(path)


def test_a_table_from_python_may_hold_anything_but_is_refused() -> None:
    for values in ({"tree": {1: 2}}, {"tree": {"shape": 10**5000}}, {10**5000: 1}, {"tree": {"shape": {2}}}, 3, None):
        with pytest.raises(InvalidInput):
            Experiment.from_table(values)


PLUGINS = {
    "exits": ("raise SystemExit(0)", "SystemExit: 0"),
    "fails": ("1 / 0", "ZeroDivisionError: division by zero"),
    "says much": ("raise ValueError('a' * 10_000 + chr(27))", "ValueError: aaa"),
    "no Python": ("def (", "SyntaxError"),
}


@pytest.mark.parametrize(("text", "said"), PLUGINS.values(), ids=PLUGINS.keys())
def test_a_file_of_the_user_s_that_fails_is_named(path: Path, tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "mine.py").write_text(text)
    for change in (f"plugins=['{tmp_path}/mine.py']", f"model.name='{tmp_path}/mine.py:Net'"):
        with pytest.raises(InvalidInput, match=said) as problem:
            build(Experiment.from_toml(path, [change]))
        assert "mine.py" in str(problem.value)
        assert str(problem.value).isprintable()


def test_a_rule_of_the_user_s_that_cannot_be_made_is_named(path: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    plugin = tmp_path / "mine.py"
    plugin.write_text(
        "from stratafl import register\n"
        "@register('picky', summary='x')\ndef picky(share): return share['no']\n"
        "@register('none', summary='x')\ndef none(): return None\n"
    )
    path.write_text(path.read_text().replace("mu = 0.1\n", ""))
    changes = [f"plugins=['{plugin}']", "method.name=picky"]
    for more, said in (
        ([], "missing 1 required"),
        (["method.share=1"], "TypeError"),
        (["method.name=none"], "must make a Rule"),
    ):
        with pytest.raises(InvalidInput, match=said):
            build(Experiment.from_toml(path, [*changes, *more]))


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="No such file"):
        Experiment.from_toml(tmp_path / "none.toml")
