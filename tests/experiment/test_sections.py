"""Sections of an experiment: every option in files, tables and Python, and its errors."""

from __future__ import annotations

import copy
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stratafl import (
    Client,
    Cosine,
    Data,
    Evaluation,
    Execution,
    Experiment,
    InvalidInput,
    Method,
    Model,
    Schedule,
    StepDecay,
    Tree,
)
from stratafl.experiment import legacy
from stratafl.experiment.errors import InvalidExperiment
from stratafl.experiment.experiment import SECTIONS, all_options
from stratafl.experiment.fields import Option, options
from stratafl.experiment.legacy import RENAMED, REPLACED
from stratafl.runs.provenance import essence
from stratafl.simulation.build import build

EXAMPLES = Path(__file__).parents[2] / "examples"
CONFIGS = ["cifar10", "digits", "hospitals", "own_rule", "own_text"]
OPTIONS, SCHEMA = all_options(), Experiment.schema()

# -- generated experiments -------------------------------------------------------------------------

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
FLOATS = st.floats(min_value=1e-300, max_value=1e30)
FRACTIONS = st.floats(min_value=1e-6, max_value=1)
COUNTS = st.integers(1, 1 << 31)
PLAIN = st.recursive(
    st.booleans() | st.integers(-(1 << 60), 1 << 60) | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
TABLES = st.dictionaries(TEXT, PLAIN, max_size=3)
NAMES = st.one_of(TEXT, st.builds(lambda name, rest: {**rest, "name": name}, TEXT, TABLES))
LR_SCHEDULES = st.one_of(
    st.just("constant"),
    st.builds(lambda rounds: {"name": "cosine", "rounds": rounds}, COUNTS),
    st.builds(lambda every, factor: {"name": "step", "every": every, "factor": factor}, COUNTS, FRACTIONS),
)
PARTICIPATION = st.just("all") | FRACTIONS | COUNTS

FREE: dict[str, st.SearchStrategy[Any]] = {
    "model.name": TEXT,
    "model.initial": TEXT,
    "model.local_parameters": TEXT | st.lists(TEXT, max_size=3),
    "data.source": TEXT,
    "data.test": TEXT | FRACTIONS,
    "data.partition": st.lists(NAMES, max_size=3),
    "data.test_partition": st.just("like_train"),
    "data.augment": TEXT,
    "tree.shape": TEXT | COUNTS | st.lists(COUNTS, max_size=3) | st.dictionaries(TEXT, COUNTS, max_size=3),
    "tree.weights": st.sampled_from(["uniform", "samples"]) | st.lists(FLOATS, max_size=3),
    "method.name": TEXT.map(str.lower),
    "method.rules": st.lists(NAMES, max_size=3),
    "schedule.periods": st.lists(COUNTS, max_size=3),
    "schedule.participation": PARTICIPATION | st.lists(PARTICIPATION, max_size=3),
    "schedule.wait": st.just("all") | st.fixed_dictionaries({"deadline": FLOATS}),
    "client.lr_schedule": LR_SCHEDULES,
    "client.optimizer": NAMES,
    "aggregation.update_factor": FLOATS | st.lists(FLOATS, max_size=3),
    "evaluation.metrics": st.lists(NAMES, max_size=3) | TABLES,
    "evaluation.levels": st.lists(st.integers(1, 9) | st.just("clients"), max_size=3),
    "evaluation.stop_when": FRACTIONS | TEXT | TABLES,
    "network": TEXT | TABLES,
    "execution.device": TEXT,
    "loss": NAMES,
    "plugins": st.lists(TEXT, max_size=3),
    "storage.tags": st.lists(TEXT.filter(bool), max_size=3),
}
"""Values of the options that accept more than one kind."""
PYTHON_ONLY = {"client.gradient_transforms"}
KINDS = {
    "a whole number of at least 1": COUNTS,
    "a whole number of at least 0": COUNTS | st.just(0),
    "a whole number": st.integers(-(1 << 60), 1 << 60),
    "a finite number above 0": FLOATS,
    "a finite number of at least 0": FLOATS | st.just(0.0),
    'a whole number of at least 1, or "full"': COUNTS | st.just("full"),
    "true or false": st.booleans(),
    "a table": TABLES,
    "the path of a file": TEXT,
}


def values_of(option: Option) -> st.SearchStrategy[Any]:
    """Values that an option accepts in a file."""
    if option.key in FREE:
        return FREE[option.key]
    return st.sampled_from(option.choices) if option.choices else KINDS[option.accepts]


def sections() -> st.SearchStrategy[dict[str, Any]]:
    """Tables of an experiment with some of its options."""
    tops: dict[str, st.SearchStrategy[Any]] = {}
    for key, option in OPTIONS.items():
        if "." not in key:
            tops[key] = values_of(option)
    for name, section in SECTIONS.items():
        keys = {key: f"{name}.{key}" for key in options(section)}
        entries = {key: values_of(OPTIONS[dotted]) for key, dotted in keys.items() if dotted not in PYTHON_ONLY}
        tops[name] = st.fixed_dictionaries({}, optional=entries).map(one_method if name == "method" else dict)
    return st.fixed_dictionaries({}, optional=tops)


def one_method(table: Mapping[str, Any]) -> dict[str, Any]:
    """The table with either a method's name and parameters, or rules."""
    dropped = ("rules",) if "name" in table else ("params",) if "rules" in table else ("rules", "params")
    return {key: value for key, value in table.items() if key not in dropped}


@settings(max_examples=500, deadline=None)
@given(sections())
def test_an_experiment_comes_back_from_its_file(tables: dict[str, Any]) -> None:
    experiment = Experiment(**{name: SECTIONS[name](**t) if name in SECTIONS else t for name, t in tables.items()})
    assert Experiment.from_table(tables) == experiment
    assert Experiment.from_table(tomllib.loads(experiment.to_toml())) == experiment
    assert Experiment.from_table(experiment.to_table()) == experiment
    assert Experiment.from_table(experiment.to_table(defaults=False)) == experiment
    assert essence(tables) == essence(experiment)


@pytest.mark.parametrize("name", CONFIGS)
def test_an_example_comes_back_from_its_file(name: str, tmp_path: Path) -> None:
    experiment = Experiment.from_toml(EXAMPLES / f"{name}.toml")
    (tmp_path / "again.toml").write_text(experiment.to_toml())
    again = Experiment.from_toml(tmp_path / "again.toml")
    assert again == experiment and essence(again) == essence(experiment)
    assert "rounds = 20" not in again.to_toml(), "defaults are left out"


# -- forms -----------------------------------------------------------------------------------------

FORMS: dict[str, tuple[dict[str, Any], str]] = {
    "sections": (
        {
            "tree": Tree("2x3", weights="samples"),
            "model": Model("mlp", params={"hidden": [32]}),
            "method": Method("fedprox", params={"mu": 0.1}),
            "schedule": Schedule([3, 4], participation=(1.0, 0.5)),
            "client": Client(0.2, batch_size=20, lr_schedule=Cosine(floor=0.01), optimizer={"name": "adam"}),
            "evaluation": Evaluation(["f1"], levels=("clients",)),
            "rounds": 3,
        },
        """
        rounds = 3
        [tree]
        shape = "2x3"
        weights = "samples"
        [model]
        name = "mlp"
        hidden = [32]
        [method]
        name = "fedprox"
        mu = 0.1
        [schedule]
        periods = [3, 4]
        participation = [1.0, 0.5]
        [client]
        lr = 0.2
        batch_size = 20
        lr_schedule = { name = "cosine", floor = 0.01 }
        optimizer = { name = "adam" }
        [evaluation]
        metrics = ["f1"]
        levels = ["clients"]
        """,
    ),
    "bare values": (
        {
            "tree": 4,
            "data": "digits",
            "model": "logistic",
            "method": ["median"],
            "schedule": [5],
            "client": 1,
            "execution": "cuda",
        },
        """
        tree = 4
        data = "digits"
        model = "logistic"
        method = ["median"]
        schedule = [5]
        client = 1
        execution = "cuda"
        """,
    ),
    "other notations": (
        {
            "tree": {"paris": 3, "rome": 2},
            "data": Data(Path("table.csv"), test=0.2, columns={"targets": "y"}),
            "model": Model(base=Path("w.pt")),
            "client": Client(lr_schedule=StepDecay(3), batch_size="FULL"),
            "execution": Execution(engine="LOOP"),
            "plugins": [Path("mine.py")],
            "rounds": 4.0,
        },
        """
        rounds = 4
        plugins = ["mine.py"]
        execution = { engine = "loop" }
        [tree.shape]
        paris = 3
        rome = 2
        [data]
        source = "table.csv"
        test = 0.2
        columns = { targets = "y" }
        [model]
        base = "w.pt"
        [client]
        lr_schedule = { name = "step", every = 3 }
        batch_size = "full"
        """,
    ),
}


@pytest.mark.parametrize(("arguments", "text"), FORMS.values(), ids=FORMS.keys())
def test_python_and_toml_make_the_same_experiment(arguments: dict[str, Any], text: str) -> None:
    python, file = Experiment(**arguments), Experiment.from_table(tomllib.loads(text))
    assert python == file
    assert essence(python) == essence(file)
    assert Experiment().replace(arguments) == python


# -- what is said about options --------------------------------------------------------------------


@pytest.mark.parametrize("option", OPTIONS.values(), ids=OPTIONS)
def test_every_option_is_explained(option: Option) -> None:
    assert len(option.meaning) > 10 and option.accepts not in ("", "any value")
    lines = Experiment.explain(option.key).splitlines()
    assert lines[0].startswith(f"{option.key}: {option.accepts} (default: ")
    assert lines[1].strip() == " ".join(option.meaning.split())
    section, _, name = option.key.rpartition(".")
    if section:
        assert f"  {option.key}: {option.accepts}" in Experiment.explain(section).splitlines()
    table = SCHEMA["$defs"][SECTIONS[section].__name__] if section else SCHEMA
    assert table["properties"][name]["description"] == option.meaning


def test_an_unknown_option_is_not_explained() -> None:
    with pytest.raises(InvalidInput, match=r"option = 'client.lrr': unknown; did you mean 'client.lr'"):
        Experiment.explain("client.lrr")


@pytest.mark.parametrize("name", CONFIGS)
def test_examples_fit_the_schema(name: str) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    config = tomllib.loads((EXAMPLES / f"{name}.toml").read_text())
    jsonschema.validate(config, SCHEMA)
    jsonschema.validate(Experiment.from_table(config).to_table(), SCHEMA)
    for mistake in ({"rounds": 0}, {"client": {"lrr": 1}}, {"clint": {}}, {"execution": {"engine": "lop"}}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**config, **mistake}, SCHEMA)


# -- mistakes --------------------------------------------------------------------------------------

WRONG: dict[str, Any] = {
    "model.name": "mpl",
    "model.params": 3,
    "model.initial": "none.pt",
    "model.base": "none.pt",
    "model.lora": {"rnk": 2},
    "model.local_parameters": "batch_nrm",
    "data.source": "digit",
    "data.test": 0.2,
    "data.partition": ["idd", "iid"],
    "data.test_partition": "like_test",
    "data.columns": {"target": "y"},
    "data.arguments": {"samples": 3},
    "data.lazy": "yes",
    "data.scale": "units",
    "data.augment": "flip",
    "data.rotation": {"stop": 3},
    "tree.shape": "4y5",
    "tree.weights": "sizes",
    "method.name": "mtgcc",
    "method.params": [0.1],
    "method.rules": ["averge", "mtgc"],
    "schedule.periods": [2, 0],
    "schedule.unit": "step",
    "schedule.participation": 1.5,
    "schedule.wait": {"deadlin": 1},
    "client.lr": "fast",
    "client.lr_schedule": "cosin",
    "client.batch_size": 0,
    "client.sampling": "shufle",
    "client.optimizer": "adm",
    "client.optimizer_state": "kep",
    "client.clip_norm": 0,
    "client.weight_decay": -1,
    "client.gradient_transforms": 3,
    "aggregation.update_limit": -1,
    "aggregation.update_factor": "8",
    "evaluation.metrics": ["f2"],
    "evaluation.every": 0,
    "evaluation.levels": [3],
    "evaluation.stop_when": "accuracy above 0.9",
    "evaluation.drift": "non",
    "network": "nowhere",
    "execution.device": "gpu",
    "execution.engine": "lop",
    "execution.precision": "fp8",
    "storage.checkpoint_every": -1,
    "storage.keep_state": 1,
    "storage.tags": [1],
    "rounds": 2.5,
    "seed": "today",
    "loss": "mea",
    "plugins": ["none.py"],
}
SMALL = {"tree": "2x2", "model": "logistic", "schedule": [1, 1], "rounds": 1}


def mistake_of(key: str, value: Any) -> InvalidInput:
    """The error about an experiment with one wrong option."""
    changes = {"method": {"rules": value}} if key == "method.rules" else {key: value}
    with pytest.raises(InvalidInput) as caught:
        build(Experiment(**SMALL).replace(changes))
    assert str(caught.value).isprintable() and len(str(caught.value)) <= 620
    return caught.value


@pytest.mark.parametrize("key", OPTIONS)
def test_a_wrong_value_is_one_line_with_its_key(key: str) -> None:
    for value in (WRONG[key], 1j):
        mistake = mistake_of(key, value)
        section, _, name = key.partition(".")
        is_bare = name and name == SECTIONS[section].SHORTHAND
        assert mistake.field.startswith(key) or (is_bare and mistake.field == section), mistake
        assert len(mistake.allowed) > 3


@pytest.mark.parametrize(
    "key", ["model.name", "data.source", "method.name", "client.optimizer", "loss", "data.augment"]
)
def test_a_wrong_name_has_the_nearest_one(key: str) -> None:
    assert "did you mean" in mistake_of(key, WRONG[key]).allowed


@pytest.mark.parametrize("key", [key for key, option in OPTIONS.items() if option.choices])
def test_a_wrong_choice_has_the_accepted_ones(key: str) -> None:
    mistake = mistake_of(key, WRONG[key])
    assert all(choice in mistake.allowed for choice in OPTIONS[key].choices)


def mistakes_of(make: Any) -> list[str]:
    with pytest.raises(InvalidExperiment) as caught:
        make()
    assert str(caught.value) == str(caught.value.mistakes[0])
    return [mistake.field for mistake in caught.value.mistakes]


def test_a_check_names_six_mistakes() -> None:
    changes = {key: WRONG[key] for key in ("loss", "evaluation.metrics", "data.augment", "client.optimizer")}
    wrong = Experiment(**SMALL).replace({**changes, "schedule.periods": [2, 0], "method.name": "mtgcc"})
    assert sorted(mistakes_of(wrong.check)) == [
        "client.optimizer",
        "data.augment",
        "evaluation.metrics[0]",
        "loss",
        "method",
        "schedule.periods",
    ]


def test_sections_name_all_their_mistakes() -> None:
    tables = {
        "rounds": 0,
        "sed": 1,
        "client": {"lr": -1, "batch": 3, "clip_norm": 0},
        "execution": {"engine": "lop", "device": "cpu"},
        "leaf": {"lr": 0.1, "epochs": 2, "none": 3},
    }
    assert sorted(mistakes_of(lambda: Experiment.from_table(tables))) == [
        "client.batch",
        "client.clip_norm",
        "client.lr",
        "execution.engine",
        "experiment key",
        "leaf.epochs",
        "leaf.lr",
        "rounds",
    ]


# -- format 1 --------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [*RENAMED, *REPLACED])
def test_an_old_key_has_a_line_with_the_new_place(key: str) -> None:
    table, _, name = key.rpartition(".")
    with pytest.raises(InvalidInput) as caught:
        Experiment.from_table({table: {name: 1}} if table else {key: {}})
    assert caught.value.field == key
    place = RENAMED.get(key, "")
    assert caught.value.allowed == (f"is {place} now" if place else REPLACED[key])
    assert not place or place in OPTIONS


DEFAULTS = {
    "tree": {"shape": "4x5", "weights": "uniform"},
    "data": {
        "name": "digits",
        "arguments": {},
        "columns": {},
        "test": None,
        "lazy": False,
        "partition": [],
        "rotation": None,
        "augment": "none",
        "synthetic": {},
        "test_partition": None,
    },
    "objective": {"loss": None, "metrics": None},
    "schedule": {"periods": None, "steps_per_sync": None, "participation": None},
    "leaf": {
        "lr": 0.1,
        "batch": 32,
        "sampling": "epochs",
        "clip": None,
        "weight_decay": 0.0,
        "momentum": 0.0,
        "optimiser": None,
        "optimiser_state": "restart",
        "epochs": None,
        "schedule": "constant",
    },
    "run": {
        "rounds": 20,
        "seed": 0,
        "evaluate_every": 1,
        "evaluate_levels": [0],
        "stop_at": None,
        "stop_when": None,
        "checkpoint_every": 10,
        "keep_state": False,
        "device": "cpu",
        "engine": None,
        "precision": "fp32",
        "diagnose": "drift",
        "update_limit": None,
        "update_factor": None,
        "initial": None,
        "plugins": [],
    },
}
"""Tables that a stored run of format 1 had in addition to those of its file."""


def partition(*alphas: float, name: str = "dirichlet") -> list[dict[str, Any]]:
    return [{"name": name, "alpha": alpha} for alpha in alphas]


OLD_EXAMPLES: dict[str, dict[str, Any]] = {
    "cifar10": {
        "tree": {"shape": "10x10"},
        "data": {
            "name": "cifar10",
            "partition": partition(0.1, 0.1, name="release_dirichlet"),
            "augment": "flip_and_crop",
        },
        "model": {"name": "cnn"},
        "method": {"name": "mtgc"},
        "schedule": {"periods": [10, 20]},
        "leaf": {"lr": 0.1, "batch": 50, "clip": 10.0, "weight_decay": 1e-3},
        "run": {"rounds": 60},
    },
    "digits": {
        "tree": {"shape": "2x3x4", "weights": "samples"},
        "data": {"name": "digits", "partition": partition(1.0, 0.3, 0.1)},
        "model": {"name": "mlp", "hidden": [32]},
        "method": {"name": "mtgc"},
        "schedule": {"periods": [3, 4, 5], "participation": [1.0, 1.0, 0.75]},
        "leaf": {
            "lr": 0.1,
            "batch": 20,
            "clip": 10.0,
            "weight_decay": 1e-3,
            "schedule": {"name": "cosine", "floor": 0.01},
        },
        "run": {"rounds": 10, "seed": 0, "evaluate_levels": [1]},
    },
    "hospitals": {
        "tree": {"shape": {"paris": ["north", "south"], "rome": ["east", "west"]}, "weights": "samples"},
        "data": {"name": "digits", "partition": partition(1.0, 0.3)},
        "model": {"name": "mlp", "hidden": [32]},
        "method": {"name": "mtgc"},
        "schedule": {"periods": [3, 10]},
        "leaf": {"lr": 0.1, "batch": 20},
        "run": {"rounds": 10, "update_factor": 8},
    },
    "own_rule": {
        "tree": {"shape": "4x5"},
        "data": {"name": "digits", "partition": partition(0.5, 0.1)},
        "model": {"name": "mlp", "hidden": [32]},
        "method": {"rules": ["mtgc", {"name": "homesick", "pull": 0.02}]},
        "schedule": {"periods": [5, 5]},
        "leaf": {"lr": 0.2, "batch": 20},
        "run": {"rounds": 5, "plugins": ["own_rule.py"]},
    },
    "own_text": {
        "tree": {"shape": "2x3"},
        "data": {"name": "own_text.py:load"},
        "model": {"name": "own_text.py:Classifier"},
        "method": {"name": "mtgc"},
        "objective": {"metrics": ["f1"]},
        "schedule": {"periods": [2, 5]},
        "leaf": {"lr": 0.003, "batch": 20, "clip": 1.0, "optimiser": "adamw"},
        "run": {"rounds": 12, "checkpoint_every": 2},
    },
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_of_format_1_is_translated(name: str) -> None:
    file = OLD_EXAMPLES[name]
    stored = {table: {**DEFAULTS.get(table, {}), **file.get(table, {})} for table in {**DEFAULTS, **file}}
    example = Experiment.from_table(tomllib.loads((EXAMPLES / f"{name}.toml").read_text()))
    # a stored run of format 1 kept no state unless its config said so
    for old, expected in ((file, example), (stored, example.one_of_many())):
        before = copy.deepcopy(old)
        assert Experiment.from_table(legacy.translated(old)) == expected
        assert Experiment.from_table(legacy.current(old)) == expected
        assert old == before
        assert essence(legacy.translated(old)) == essence(expected)


TRANSLATED = {
    "momentum": ({"leaf": {"momentum": 0.9}}, {"client": {"optimizer": {"name": "sgd", "momentum": 0.9}}}),
    "no momentum": ({"leaf": {"momentum": 0.0, "optimiser": "adam"}}, {"client": {"optimizer": "adam"}}),
    "steps per sync": ({"schedule": {"steps_per_sync": [600, 20]}, "run": {}}, {"schedule": {"periods": [30, 20]}}),
    "epochs": (
        {"leaf": {"epochs": 2}, "schedule": {"periods": [3], "steps_per_sync": None}},
        {"schedule": {"unit": "epochs", "periods": [3, 2]}},
    ),
    "epochs from Python": (
        {"leaf": {"epochs": 2}, "schedule": {"periods": [3, 2]}},
        {"schedule": {"unit": "epochs", "periods": [3, 2]}},
    ),
    "full batches": ({"leaf": {"batch": 0}}, {"client": {"batch_size": "full"}}),
    "sampling": (
        {"leaf": {"sampling": "epochs", "optimiser_state": "keep"}},
        {"client": {"sampling": "shuffle", "optimizer_state": "keep"}},
    ),
    "a target": ({"run": {"stop_at": 0.9}}, {"evaluation": {"stop_when": "accuracy >= 0.9"}}),
    "levels": ({"run": {"evaluate_levels": [0, 2, "clients"]}}, {"evaluation": {"levels": [2, "clients"]}}),
    "synthetic data": (
        {"data": {"name": "synthetic", "synthetic": {"samples": 20}}, "run": {}},
        {"data": {"source": "synthetic", "arguments": {"samples": 20}}},
    ),
    "a start": (
        {"run": {"initial": "w.pt"}, "model": {"name": "mlp", "keep_at_home": "batch_norm", "hidden": [3]}},
        {"model": {"name": "mlp", "initial": "w.pt", "local_parameters": "batch_norm", "hidden": [3]}},
    ),
    "a new config": ({"client": {"lr": 1}, "rounds": 3}, {"client": {"lr": 1}, "rounds": 3}),
}


@pytest.mark.parametrize(("old", "new"), TRANSLATED.values(), ids=TRANSLATED.keys())
def test_notations_of_format_1_are_translated(old: dict[str, Any], new: dict[str, Any]) -> None:
    assert Experiment.from_table(legacy.current(old)) == Experiment.from_table(new)


@pytest.mark.parametrize(("keyword", "option"), legacy.KEYWORDS.items())
def test_a_keyword_of_earlier_versions_names_its_option(keyword: str, option: str) -> None:
    with pytest.raises(InvalidInput, match=rf"^{keyword} = \[1\]: is {option} now$"):
        Experiment(**{keyword: [1]})
    assert option in all_options() or option in SECTIONS


@pytest.mark.parametrize("engine", ["auto", "loop", "stacked", "vmap"])
def test_an_engine_is_no_device(engine: str) -> None:
    with pytest.raises(InvalidInput, match=f'execution.device = .*: is an engine: engine = "{engine}"'):
        Experiment(execution=engine)
