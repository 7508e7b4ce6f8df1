"""What a config file may say, and what is said when it is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from stratafl import InvalidInput
from stratafl.config.schema import Config
from stratafl.config.setup import experiment
from stratafl.rules import registry

GOOD = """
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
[leaf]
lr = 0.2
batch = 0
clip = 5.0
schedule = { name = "step", every = 1, factor = 0.5 }
[run]
rounds = 2
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "run.toml"
    file.write_text(GOOD)
    return file


def test_a_config_becomes_the_run_it_describes(path: Path) -> None:
    simulation = experiment(Config.load(path))
    assert simulation.federation.tree.sizes == (1, 2, 5)
    assert simulation.schedule.periods == (2, 3)
    assert simulation.engine.training.batch_size is None
    assert [simulation.leaf.lr(r) for r in range(2)] == [0.2, 0.1]
    assert [rule.local is not None for rule in simulation.federation.rules] == [False, True]
    history = simulation.run().history
    assert [r.round for r in history] == [1, 2]
    assert history[-1].metrics["accuracy"] > 0.5


def test_the_paper_s_steps_per_sync_mean_the_same_as_periods(path: Path) -> None:
    changes = ["schedule={ steps_per_sync = [6, 3] }", "run.rounds=1"]
    with pytest.raises(InvalidInput, match="must look like"):
        Config.load(path, changes)
    text = GOOD.replace("periods = [2, 3]", "steps_per_sync = [6, 3]")
    path.write_text(text)
    assert experiment(Config.load(path)).schedule.periods == (2, 3)


def test_changes_are_toml_values_or_plain_text(path: Path) -> None:
    config = Config.load(path, ["run.seed=7", "leaf.sampling=replacement", "tree.shape='2x2'", "leaf.lr=1e-2"])
    assert (config.run.seed, config.leaf.sampling, config.tree.shape, config.leaf.lr) == (7, "replacement", "2x2", 0.01)


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
    changes = ["method.name=halfway", f"run.plugins=['{plugin}']", "method.share=0.25", "run.rounds=1"]
    config = path.read_text().replace("mu = 0.1\n", "")
    path.write_text(config)
    simulation = experiment(Config.load(path, changes))
    start = simulation.federation.levels[0].model[0].clone()
    simulation.run()
    assert not torch.equal(simulation.federation.levels[0].model[0], start)
    with pytest.raises(InvalidInput, match=r"halfway parameter = 'shares'.*did you mean 'share'"):
        experiment(Config.load(path, [*changes, "method.shares=1"]))


@pytest.mark.parametrize(
    ("change", "field", "said"),
    [
        ("leaf.lrr=0.1", "leaf key", "did you mean 'lr'"),
        ("lief.lr=0.1", "config key", "did you mean 'leaf'"),
        ("leaf.lr='fast'", "leaf.lr", "must be a number"),
        ("leaf.lr=-1", "leaf.lr", "above 0"),
        ("leaf.lr=nan", "leaf.lr", "finite"),
        ("leaf.batch=-3", "batch", "at least 1"),
        ("leaf.sampling='shuffle'", "sampling", "known: epochs, replacement"),
        ("leaf.schedule='cosinus'", "leaf.schedule", "did you mean 'cosine'"),
        ("leaf.schedule={name='step'}", "leaf.schedule", "needs every"),
        ("leaf.schedule={name='cosine', flor=1}", "leaf.schedule key", "did you mean 'floor'"),
        ("leaf.momentum=1", "leaf.momentum", "below 1"),
        ("leaf.clip=0", "leaf.clip", "above 0"),
        ("tree.shape='4y5'", "tree", "joined by x"),
        ("tree.shape=[[2], 3]", "tree", "same depth"),
        ("tree.weights='counts'", "weights", "samples"),
        ("schedule.periods=[2]", "periods", "2 of them"),
        ("schedule.periods=6", "schedule.periods", "must be a list"),
        ("schedule.steps_per_sync=[6, 4]", "schedule.periods", "either periods or steps_per_sync"),
        ("schedule.participation=2.5", "participation", "at most 1"),
        ("method.name='fedprx'", "method", "did you mean 'fedprox'"),
        ("method.nu=1", "fedprox parameter", "did you mean 'mu'"),
        ("method.mu=-1", "fedprox.mu", "at least 0"),
        ("method.rules=['average']", "method", "either a name or rules"),
        ("model.name='mpl'", "model.name", "did you mean 'mlp'"),
        ("model.hidden=[3]", "model key", "unknown"),
        ("model='mlp'", "--set", "section.key=value"),
        ("data.name='digit'", "data set", "did you mean 'digits'"),
        ("data.partition=[{name='iid'}]", "data.partition", "2 of them"),
        ("data.partition='iid'", "data.partition", "must be a list"),
        ("data.partition=[{name='iid'}, {name='dirichlet', alpha=-1}]", "data.partition[1]", "alpha"),
        ("run.rounds=0", "rounds", "at least 1"),
        ("run.rounds=2.5", "rounds", "whole number"),
        ("run.evaluate_levels=[7]", "evaluate_levels", "at most 2"),
        ("run.device='gpu'", "run.device", ""),
        ("run.plugins=['none.py']", "run.plugins", "no such Python file"),
        (f"run.plugins=['{'a' * 5_000}.py']", "run.plugins", "no such Python file"),
        ("run.plugins=[['none.py']]", "run.plugins", "must be paths"),
        ("run.device='meta'", "run.device", "meta"),
        ("data.partition=[{name=['iid']}, {name='iid'}]", "data.partition[0].name", "unknown"),
        ("data.partition=[{name='iid'}, {name={a=1}}]", "data.partition[1].name", "unknown"),
        ("data.partition=[{name='iid'}, {name='iid', sizes=[1, [2]]}]", "data.partition[1].sizes", "whole number"),
        (f"data.partition=[{{name='iid'}}, {{name='classes', k={10**30}}}]", "data.partition[1].k", "at most"),
        (f"data.rotation={{start={10**30}}}", "data.rotation.start", "at most 1e+06"),
        ("data.rotation={step=inf}", "data.rotation.step", "finite"),
        (f"tree.shape='{'x'.join(['1'] * 2_000)}'", "tree", "at most 100 levels"),
        (f"tree.shape={'[' * 130}1{']' * 130}", "tree.shape", "at most 120 lists"),
        (f"tree.shape={'[' * 5_000}1{']' * 5_000}", "--set", "nested too deeply"),
        ("schedule.periods=[1, 1000000000]", "periods", "at most 1,000,000 local steps"),
        (f"run.seed={'9' * 5_000}", "--set", "number is too long"),
        (f"run.seed=0x{'f' * 5_000}", "run.seed", "too large"),
        (f"model.width=0x{'f' * 5_000}", "model.width", "too large"),
        ("model.classes=3", "model key", "unknown"),
        (f"leaf.{'a' * 5_000}=1", "leaf key", "unknown"),
        ("run.\x1b[31m=1", "run key", "unknown"),
        ("model.name='builtins:exit'", "model.name", "is a part of Python itself"),
        ("model.name='time:sleep'", "model.name", "is a part of Python itself"),
        ("model.name='torch:rand'", "model.name", "torch.nn.Module's class"),
        ("model.name='torch.nn:Linear'", "model.name", "cannot be made"),
    ],
)
def test_one_line_says_what_is_wrong(path: Path, change: str, field: str, said: str) -> None:
    with pytest.raises(InvalidInput) as problem:
        experiment(Config.load(path, [change]))
    message = str(problem.value)
    assert message.startswith(field), message
    assert said in message
    assert message.isprintable()
    assert len(message) <= 620


@pytest.mark.parametrize("text", ["[tree", "tree = 3", "[tree]\nshape", "\x00", "[[tree]]\nshape = 2"])
def test_broken_files(path: Path, text: str) -> None:
    path.write_text(text)
    with pytest.raises(InvalidInput):
        Config.load(path)


@pytest.mark.parametrize("alpha", ["'much'", "['much']", "[1.0]", "{a = 1}", "true", "nan", "-1.0", "1e300"])
@pytest.mark.parametrize("field", ["alpha", "beta", "samples", "features", "classes", "test_share"])
def test_synthetic_data_says_which_number_is_none(tmp_path: Path, field: str, alpha: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(f"[data]\nname = 'synthetic'\nsynthetic = {{ {field} = {alpha} }}\n[schedule]\nperiods = [1, 1]")
    with pytest.raises(InvalidInput, match=f"^data.synthetic.{field} = "):
        experiment(Config.load(path))


def test_a_number_that_is_too_long_and_a_nest_that_is_too_deep(path: Path) -> None:
    for value, said in (("9" * 5_000, "number is too long"), ("[" * 5_000 + "]" * 5_000, "nested too deeply")):
        path.write_text(f"[tree]\nshape = {value}")
        with pytest.raises(InvalidInput, match=said):
            Config.load(path)


def test_a_table_from_python_may_hold_anything_but_is_refused() -> None:
    for values in ({"tree": {1: 2}}, {"tree": {"shape": 10**5000}}, {10**5000: 1}, {"tree": {"shape": {2}}}, 3, None):
        with pytest.raises(InvalidInput):
            Config.of(values)


PLUGINS = {
    "exits": ("raise SystemExit(0)", "SystemExit: 0"),
    "fails": ("1 / 0", "ZeroDivisionError: division by zero"),
    "says much": ("raise ValueError('a' * 10_000 + chr(27))", "ValueError: aaa"),
    "no Python": ("def (", "SyntaxError"),
}


@pytest.mark.parametrize(("text", "said"), PLUGINS.values(), ids=PLUGINS.keys())
def test_a_file_of_the_user_s_that_fails_is_named(path: Path, tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "mine.py").write_text(text)
    for change in (f"run.plugins=['{tmp_path}/mine.py']", f"model.name='{tmp_path}/mine.py:Net'"):
        with pytest.raises(InvalidInput, match=said) as problem:
            experiment(Config.load(path, [change]))
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
    changes = [f"run.plugins=['{plugin}']", "method.name=picky"]
    for more, said in (
        ([], "missing 1 required"),
        (["method.share=1"], "TypeError"),
        (["method.name=none"], "must make a Rule"),
    ):
        with pytest.raises(InvalidInput, match=said):
            experiment(Config.load(path, [*changes, *more]))


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="No such file"):
        Config.load(tmp_path / "none.toml")
