"""Odd values: a run works or is refused in one short line, and never hangs."""

from __future__ import annotations

import copy
import datetime
import random
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from stratafl import InvalidInput
from stratafl.cli.main import main
from stratafl.experiment.experiment import Experiment, all_options
from stratafl.simulation.build import build
from stratafl.sweeps import Sweep
from tests.flat import simulate
from tests.slow import slow

EXAMPLES = Path(__file__).parents[2] / "examples"
NAN, INF = float("nan"), float("inf")
LONGEST_LINE, SECONDS = 620, 10


def nested(depth: int) -> list:
    inside: list = []
    for _ in range(depth):
        inside = [inside]
    return inside


PLAIN: list[Any] = [
    None, True, False, 0, 1, -1, 2, 10**30, -(10**30), 10**5000, 16**5000, 0.5, -0.5, 1.5, NAN, INF, -INF, 1e-320,
    1e308, "", "a", "a" * 10_000, "\x1b[31m\n\ud800", "\0", [], [[]], [[[1]]], [1, [2]], [None], ["x"], [NAN], [1, 1],
    [2, 2], [10**30, 10**30], [2**62] * 4, ["a" * 5_000, "\x1b"], nested(5), nested(500), {}, {"name": []},
    {"name": {"a": 1}}, {"name": "iid"}, {"a": {"b": 1}}, {"x" * 1_000: 1}, {1: 2}, {"lognormal": NAN},
    [{"name": [1]}, {"name": "iid"}], datetime.date(2020, 1, 1), b"x", object(),
]  # fmt: skip
"""Values that a TOML table can hold, or that a user may enter."""

SYNTHETIC = tomllib.loads("""
rounds = 1
seed = 3
loss = { name = "cross_entropy", label_smoothing = 0.1 }
plugins = []

[tree]
shape = { a = ["x", "y"], b = 2 }
weights = [1.0, 2.0, 3.0, 4.0]

[data]
source = "synthetic"
arguments = { samples = 20, alpha = [1.0, 0.5], beta = 1.0, features = 5, classes = 3, test_share = 0.2 }

[model]
name = "mlp"
hidden = [4]
local_parameters = ["3.bias"]

[method]
rules = ["average", { name = "fedprox", mu = 0.1 }]

[schedule]
periods = [2, 1]
participation = [1.0, 0.5]
wait = "all"

[client]
lr = 0.1
lr_schedule = { name = "step", every = 1, factor = 0.5 }
batch_size = 8
sampling = "replacement"
optimizer = { name = "sgd", momentum = 0.1 }
clip_norm = 1.0
weight_decay = 0.01

[aggregation]
update_limit = 100.0
update_factor = [0.0, 8.0]

[evaluation]
metrics = ["f1"]
every = 1
levels = [1, "clients"]
stop_when = 0.9
drift = "ideal"

[storage]
checkpoint_every = 1
keep_state = false

[execution]
device = "cpu"
engine = "loop"
precision = "fp32"
""")


def examples() -> list[dict[str, Any]]:
    """Small valid configs that together use every option."""
    digits = tomllib.loads((EXAMPLES / "digits.toml").read_text())
    hospitals = tomllib.loads((EXAMPLES / "hospitals.toml").read_text())
    own_rule = tomllib.loads((EXAMPLES / "own_rule.toml").read_text())
    digits["schedule"]["periods"] = [1, 1, 2]
    digits["data"] |= {"rotation": {"start": -50, "step": 10, "level": 1}, "augment": "flip_and_crop"}
    hospitals["schedule"]["periods"] = own_rule["schedule"]["periods"] = [1, 2]
    hospitals["data"]["partition"] = [{"name": "iid", "sizes": [400, 400]}, {"name": "classes", "k": 9}]
    own_rule["plugins"] = [str(EXAMPLES / "own_rule.py")]
    for config in (digits, hospitals, own_rule):
        config["model"]["hidden"] = [4]
        config["rounds"] = 1
    return [digits, hospitals, own_rule, SYNTHETIC]


def places(value: Any, path: tuple = ()) -> Iterator[tuple]:
    if path:
        yield path
    if isinstance(value, dict | list):
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(each, (*path, key))


def changed(values: dict[str, Any], path: tuple, value: Any) -> dict[str, Any]:
    values = copy.deepcopy(values)
    inside: Any = values
    for key in path[:-1]:
        inside = inside[key]
    inside[path[-1]] = value
    return values


def judged(call: Callable[[], object], label: object) -> bool:
    """Whether a call works; otherwise it must be refused in one short line, and both quickly."""
    began, said = time.perf_counter(), ""
    try:
        call()
    except InvalidInput as problem:
        said = str(problem)
    except BaseException as problem:
        pytest.fail(f"{label}: {type(problem).__name__}: {problem}")
    assert said.isprintable() and len(said) <= LONGEST_LINE, label
    assert time.perf_counter() - began < SECONDS, label
    return not said


def tried(simulation: Any) -> None:
    """Run the first round, unless it has many steps."""
    if simulation.schedule.steps[0] < 20:
        next(simulation)


@pytest.mark.parametrize("count", [200, slow(500)])
def test_every_key_of_a_config_may_hold_anything(count: int) -> None:
    configs = examples()
    assert all(judged(lambda: tried(build(Experiment.from_table(config))), config) for config in configs)
    cases = [(i, path, odd) for i, config in enumerate(configs) for path in places(config) for odd in PLAIN]
    chosen = random.Random(0).sample(cases, count)
    worked = 0
    for number, path, odd in chosen:
        values = changed(configs[number], path, odd)
        worked += judged(lambda: tried(build(Experiment.from_table(values))), (number, path, type(odd)))
    assert 0 < worked < len(chosen) / 2


def test_every_key_of_a_sweep_may_hold_anything() -> None:
    sweep = tomllib.loads((EXAMPLES / "sweep.toml").read_text())
    sweep["variants"] = {"short": {"rounds": 3}, "fast": {"client": {"lr": 0.3}}}
    assert judged(lambda: Sweep.of(sweep, "study", EXAMPLES), sweep)
    cases = [(path, odd) for path in places(sweep) for odd in PLAIN]
    for path, odd in random.Random(3).sample(cases, 200):
        values = changed(sweep, path, odd)
        judged(lambda: Sweep.of(values, "study", EXAMPLES), (path, type(odd)))


WORDS = [
    "", "0", "-1", "1e400", "nan", "true", "9" * 5_000, "0x" + "f" * 5_000, '"' + "a" * 5_000 + '"', '"\\u001b[31m\\n"',
    "[]", "[[1]]", "[" * 3_000 + "]" * 3_000, "{}", "{name = []}", "{name = {a = 1}}", "2020-01-01", "12:00:00",
    "[1, 9999999999]", "builtins:exit", "time:sleep", "meta", "\x1b[31m", "\udc80",
]  # fmt: skip
"""Values as typed after `--set section.key=`."""
SMALL = """
rounds = 1

[tree]
shape = "2x2"

[model]
name = "logistic"

[schedule]
periods = [1, 1]
"""


def test_every_change_on_the_command_line_may_be_anything(tmp_path, monkeypatch, capsys) -> None:
    """Exit code 0 means that there is a run; 2 means one line of error and no run."""
    config, runs = tmp_path / "small.toml", tmp_path / "runs"
    config.write_text(SMALL)
    keys = [*all_options(), "data.rotation.start", "data.arguments.alpha", "none.at.all"]
    keys.remove("rounds")
    for key, word in random.Random(1).sample([(key, word) for key in keys for word in WORDS], 150):
        before = len(list(runs.iterdir())) if runs.exists() else 0
        arguments = ["run", config, "--quiet", "--runs", runs, "--set", f"{key}={word}"]
        monkeypatch.setattr(sys, "argv", ["stratafl", *map(str, arguments)])
        label = f"{key}={word[:40]}"
        began = time.perf_counter()
        with pytest.raises(SystemExit) as ended:
            main()
        assert time.perf_counter() - began < SECONDS, label
        shown = capsys.readouterr()
        there = len(list(runs.iterdir())) - before if runs.exists() else 0
        assert (ended.value.code, there) in ((0, 1), (None, 1), (2, 0)), label
        if ended.value.code == 2:
            assert shown.err.startswith("error: ") and shown.err.count("\n") == 1, label
            assert shown.err[:-1].isprintable() and len(shown.err) <= LONGEST_LINE, label


INPUTS, LABELS = torch.arange(24.0).reshape(8, 3) / 24, torch.arange(8) % 2
CALL: dict[str, Any] = {
    "model": nn.Linear(3, 2), "data": (INPUTS, LABELS), "partition": [[0, 1], [2, 3], [4, 5], [6, 7]], "tree": "2x2",
    "method": "mtgc", "periods": [1, 2], "rounds": 1, "leaf": 0.1, "batch": 2, "sampling": "shuffle",
    "test": (INPUTS, LABELS), "loss": None, "weights": "uniform", "participation": "all", "seed": 0, "initial": None,
    "evaluate_every": 1, "evaluate_levels": [1], "stop_when": None, "augment": "none", "device": "cpu",
    "engine": "loop", "precision": "fp32", "drift": "drift", "ranks": None,
}  # fmt: skip
OBJECTS: list[Any] = [
    *PLAIN, torch.zeros(2), torch.zeros(()), torch.zeros(2, device="meta"), np.zeros(4), np.array(1), np.arange(8),
    np.array(["a", "b"]), np.array([None]), torch.eye(3).to_sparse(), nn.Flatten(), nn.Linear, print, len, int, dict,
    lambda: None, lambda *given: given[0], lambda *given: None, lambda *given: sys.exit(), {1, 2}, range(2), iter([1]),
    1j, Exception("odd"), type, (torch.zeros(8, 3, device="meta"), LABELS), (INPUTS, np.arange(8) > 3),
    ([[1.0], [1.0, 2.0]], [0, 1]), (INPUTS, ["cat"] * 8), [range(2)] * 4, [INPUTS] * 4, {"weight": 1, "bias": 2},
]  # fmt: skip


@pytest.mark.filterwarnings("ignore")
def test_every_argument_may_be_anything() -> None:
    cases = [(name, odd) for name in CALL for odd in OBJECTS]
    worked = 0
    for name, odd in random.Random(2).sample(cases, 500):
        worked += judged(lambda: tried(simulate(**{**CALL, name: odd})), (name, type(odd)))
    assert 0 < worked < 250
