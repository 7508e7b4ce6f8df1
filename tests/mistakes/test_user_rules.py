"""Errors in user rules: one line before the first round names the function."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from stratafl import Rule, average
from stratafl.core.rule import Edge
from stratafl.rules.checks import SIGNATURES, UserFunction, guarded_rule, try_rule
from stratafl.rules.registry import entries
from tests.mistakes.own_code import complaint_of, run

STATEFUL = average()._replace(init=lambda x: {"z": torch.zeros_like(x)}, open=lambda x: {"m": torch.zeros_like(x)})
CALLS: list[int] = []


def counting(memory: dict, start: Tensor, mean: dict, share: Tensor) -> tuple[dict, Tensor]:
    CALLS.append(1)
    return memory, mean["model"] / len(CALLS)


def shrinking(state: dict, x: Tensor, edge: Edge) -> tuple[dict, dict]:
    x *= 0.5
    return state, {"model": x}


def forgetful(state: dict, x: Tensor, edge: Edge) -> dict:
    state["seen"] = x
    return state


def swapping(state: dict, x: Tensor, edge: Edge) -> tuple[dict, dict]:
    edge.model.add_(1.0)
    return state, {"model": x}


def overwriting(state: dict, x: Tensor, edge: Edge) -> dict:
    edge.merged.sub_(x)
    return state


RULES: dict[str, tuple[Rule, dict[str, Any], str]] = {
    "a list for a model": (average(), {"merge": lambda memory, start, mean, share: (memory, [1, 2, 3])},
        "merge returned a list of 3 as the model, must be a tensor of shape (2, 10) like mean['model']"),
    "mean taken for a tensor": (average(), {"merge": lambda memory, start, mean, share: (memory, mean * share)},
        "merge raised TypeError: unsupported operand type(s) for *: 'dict' and 'Tensor'; it was given memory an empty "
        "dict, start a tensor of shape (2, 10), mean a dict of 'model', share a tensor of shape (2, 1)"),
    "the mean itself": (average(), {"merge": lambda memory, start, mean, share: (memory, mean)},
        "merge returned a dict of 'model' as the model, must be a tensor of shape (2, 10)"),
    "a model alone": (average(), {"merge": lambda memory, start, mean, share: mean["model"]},
        "merge returned a tensor of shape (2, 10), must be a tuple of two: (memory, model)"),
    "one row for all": (average(), {"merge": lambda memory, start, mean, share: (memory, mean["model"].mean(0))},
        "merge returned a tensor of shape (10,) as the model, must be a tensor of shape (2, 10)"),
    "another type": (average(), {"merge": lambda memory, start, mean, share: (memory, mean["model"].double())},
        "merge returned torch.float64 on cpu as the model, must be torch.float32 on cpu like mean['model']"),
    "a misspelt key": (average(), {"merge": lambda memory, start, mean, share: (memory, mean["modle"])},
        "merge raised KeyError: 'modle'"),
    "too few arguments": (average(), {"merge": lambda memory, mean: (memory, mean["model"])},
        "merge raised TypeError:"),
    "a memory that is gone": (STATEFUL, {"merge": lambda memory, start, mean, share: ({}, mean["model"])},
        "merge returned a memory that is an empty dict, must have what it had: a dict of 'm'"),
    "hidden state": (average(), {"merge": counting}, "merge returns something else when it is called again"),
    "random numbers": (average(), {"merge": lambda m, s, mean, share: (m, mean["model"] + torch.randn(s.shape))},
        "merge returns something else when it is called again"),
    "not finite": (average(), {"merge": lambda memory, start, mean, share: (memory, mean["model"] / (share - share))},
        "merge returns numbers that are not finite for finite arguments"),
    "the mean over nodes": (average(), {"merge": lambda m, s, mean, share: (m, mean["model"].mean(0).expand_as(s))},
        "merge returns something else for a node when it is called with that node's row alone"),
    "no message": (average(), {"up": lambda state, x, edge: state},
        "up returned an empty dict, must be a tuple of two"),
    "a message without a model": (average(), {"up": lambda state, x, edge: (state, {"delta": x})},
        "up returned a message that is a dict of 'delta', must have at least 'model'"),
    "a message of buffers": (average(), {"up": lambda state, x, edge: (state, {"model": x, "buffers": x})},
        "up returned a message with 'buffers', which is sent anyway"),
    "a short message": (average(), {"up": lambda state, x, edge: (state, {"model": x[:, :3]})},
        "up returned a tensor of shape (2, 3) as message['model'], must be a tensor of shape (2, 10) like x"),
    "a changed argument": (average(), {"up": shrinking}, "up changes its argument x in place: make a new tensor of it"),
    "a changed edge": (average(), {"up": swapping}, "up changes its argument edge.model in place"),
    "a changed new model": (average(), {"down": overwriting}, "down changes its argument edge.merged in place"),
    "a state of its own in down": (average(), {"down": forgetful},
        "down changes its argument state in place: return a new dict"),
    "nothing from down": (average(), {"down": lambda state, x, edge: None},
        "down returned None as its state, must be a dict of tensors with a row per node"),
    "a tensor for a state": (average(), {"init": lambda x: torch.zeros_like(x)},
        "init returned a tensor of shape (2, 10) as its state, must be a dict of tensors with 2 rows"),
    "a number in a state": (average(), {"init": lambda x: {"t": 0}},
        "init returned an int as state['t'], must be a tensor of two dimensions with 2 rows"),
    "a flat state": (average(), {"init": lambda x: {"t": torch.zeros(len(x))}},
        "init returned a tensor of shape (2,) as state['t'], must be a tensor of two dimensions with 2 rows"),
    "a list for a memory": (average(), {"open": lambda x: [x]}, "open returned a list of 1 as its memory"),
    "a state that shrinks": (STATEFUL, {"relay": lambda state: {"z": state["z"][:, :2]}},
        "relay returned a tensor of shape (2, 2) as state['z'], must be a tensor of shape (2, 10) like the state"),
    "a correction of one number": (STATEFUL, {"correction": lambda state, note: state["z"][:, :1]},
        "correction returned a tensor of shape (2, 1), must be None or a tensor of shape (2, 10) like x"),
    "a correction in a dict": (STATEFUL, {"correction": lambda state, note: state},
        "correction returned a dict of 'z', must be None or a tensor with 2 rows"),
    "a note of the model": (STATEFUL, {"note": lambda memory: {"model": memory["m"]}},
        "note returned a note with 'model', which is sent anyway"),
    "no direction": (average(), {"local": lambda x, g, edge: None},
        "local returned None, must be a tensor of shape (2, 10) like g"),
    "a direction of another name": (average(), {"local": lambda x, g, edge: g + edge.start},
        "local raised AttributeError: 'Edge' object has no attribute 'start'"),
    "gradients of nothing": (STATEFUL, {"from_gradient": lambda state, g, mean_g: mean_g - g},
        "from_gradient returned a tensor of shape (2, 10) as its state, must be a dict"),
    "a reducer of matrices": (average(), {"reduce": lambda rows, weights: rows},
        "reduce returned a tensor of shape (2, 10), must be a tensor of shape (10,) like one of its rows"),
    "no function": (average(), {"merge": None}, "merge is None, must be a function of (memory, start, mean, share)"),
    "a number for a function": (average(), {"local": 0.1},
        "local is a float, must be a function of (x, g, edge) or None"),
    "an end of the process": (average(), {"merge": lambda *given: sys.exit(3)}, "merge raised SystemExit: 3"),
}  # fmt: skip


@pytest.mark.parametrize(("rule", "changes", "told"), RULES.values(), ids=RULES.keys())
def test_a_rule_is_refused_before_the_first_round(rule: Rule, changes: dict[str, Any], told: str) -> None:
    problem = complaint_of(lambda: run(rule._replace(**changes)))
    assert str(problem).startswith(f"the rule of edge level 2: {told}")
    (name,) = changes
    if callable(changes[name]):
        assert problem.frames, "where to look"
        assert all(frame.file == __file__ for frame in problem.frames)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_sound_rule_of_ones_own_passes_and_changes_no_bit(depth: int) -> None:
    def own() -> Rule:
        def down(state: dict, x: Tensor, edge: Edge) -> dict:
            return {"z": edge.drift(x, plus=state["z"])}

        return average()._replace(
            init=lambda x: {"z": torch.zeros_like(x)},
            down=down,
            relay=lambda state: {"z": torch.zeros_like(state["z"])},
            correction=lambda state, note: state["z"],
        )

    mine = run(own(), depth=depth)
    assert any(isinstance(each, UserFunction) for each in mine.federation.rules[-1])
    method = {1: "mtgc", 2: "local_correction", 3: "local_correction"}[depth]
    assert torch.equal(mine.run().models[0], run(method, depth=depth).run().models[0])


def test_relay_is_tried_only_where_models_come_from_above() -> None:
    broken = STATEFUL._replace(relay=lambda state: None)
    run(broken, depth=1)
    assert "relay returned None" in str(complaint_of(lambda: run(broken, depth=2)))


@pytest.mark.parametrize("entry", entries(), ids=lambda entry: entry.name)
def test_every_registered_rule_passes_the_trial_of_users_rules(entry) -> None:
    made = entry.make()
    functions = {name: getattr(made, name) for name in SIGNATURES}
    watched = made._replace(**{name: UserFunction(entry.name, name, each) for name, each in functions.items() if each})
    try_rule(watched, torch.linspace(-2, 2, 12))
    try_rule(watched, torch.linspace(-2, 2, 12, dtype=torch.float64), relays=False)


def test_the_packages_own_functions_are_called_as_they_are() -> None:
    own = [entry for entry in entries() if entry.make.__module__.startswith("stratafl.")]
    assert len(own) > 8 and not any(isinstance(each, UserFunction) for entry in own for each in entry.rule())
    once = guarded_rule("a", STATEFUL)
    assert isinstance(once.init, UserFunction) and not isinstance(once.merge, UserFunction)
    assert {*SIGNATURES, "measures", "counts_late"} == set(Rule._fields)
