"""Wrong arguments: each error is one line that names the field and shows the value."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import pytest
import torch

from stratafl import (
    InvalidInput,
    SyncSchedule,
    Topology,
    adam,
    feddyn,
    fedprox,
    momentum,
    mtgc,
    place,
    register,
    yogi,
)
from stratafl.core.optimizer import cosine, step_decay
from stratafl.rules import registry
from tests.flat import client_options
from tests.mistakes.studies import INF, INPUTS, LABELS, NAN, PARTS, Wrong, deep, parts, raising, study
from tests.mistakes.wrong_data import DATA, MODELS

RULES: list[Wrong] = [
    ("unknown", lambda: study(method="mtgcc"), "method", "'mtgcc'", "did you mean 'mtgc'"),
    ("far off", lambda: study(method="zzzz"), "method", "'zzzz'", "known: adam"),
    ("in a list", lambda: study(method=["avrage", "mtgc"]), "method.rules[0]", "'avrage'", "'average'"),
    (
        "parameter",
        lambda: study(method={"name": "fedprox", "mue": 1}),
        "fedprox parameter",
        "'mue'",
        "did you mean 'mu'",
    ),
    (
        "no parameters",
        lambda: study(method={"name": "scaffold", "mu": 1}),
        "scaffold parameter",
        "'mu'",
        "unknown",
    ),
    ("nameless", lambda: study(method={"mu": 1}), "method", "{'mu': 1}", "needs the name of a method"),
    ("no rule", lambda: study(method=["mtgc", 3]), "method.rules[1]", "3", "a table with a name, or a Rule"),
    ("too few", lambda: study(method=["mtgc"]), "method.rules", "['mtgc']", "2 of them"),
    ("too many", lambda: study(method=["mtgc"] * 3), "method.rules", "'mtgc'", "2 of them"),
    ("one for two", lambda: study(method=mtgc()), "method.rules", "'one Rule'", "2 of them, in a list"),
    ("a number", lambda: study(method=5), "method.rules", "5", "rule"),
    ("restart", lambda: mtgc("zeroo"), "mtgc.restart", "'zeroo'", "did you mean 'zero'"),
    ("restart array", lambda: mtgc(np.array(["a", "b"])), "mtgc.restart", "array(", "known: gradient, keep, zero"),
    ("pull array", lambda: feddyn(pull=np.array(["a", "b"])), "feddyn.pull", "array(", "before_clip"),
    ("depth", lambda: place("mtgc", [2]), "depth", "[2]", "whole number"),
    ("mu", lambda: fedprox(-0.1), "fedprox.mu", "-0.1", "at least 0"),
    ("mu nan", lambda: fedprox(NAN), "fedprox.mu", "nan", "finite"),
    ("mu text", lambda: place({"name": "fedprox", "mu": "1"}, 2), "fedprox.mu", "'1'", "number"),
    ("alpha", lambda: feddyn(0), "feddyn.alpha", "0", "above 0"),
    ("pull", lambda: feddyn(pull="after"), "feddyn.pull", "'after'", "before_clip"),
    ("alpha inf", lambda: feddyn(INF), "feddyn.alpha", "inf", "finite"),
    ("server lr", lambda: momentum(lr=-1), "momentum.lr", "-1", "above 0"),
    ("server beta", lambda: momentum(beta=1), "momentum.beta", "1", "below 1"),
    ("adam", lambda: adam(beta2=1.5), "adam.beta2", "1.5", "below 1"),
    ("yogi", lambda: yogi(tau=0), "yogi.tau", "0", "above 0"),
    ("undocumented", lambda: register("blank")(lambda: mtgc()), "register", "'blank'", "docstring"),
    ("levels leaf", lambda: register("mine", levels="leaf"), "register levels", "'leaf'", "aggregators, all"),
    ("former at", lambda: register("mine", at="every"), "register", "'at'", "levels = all, clients"),
    ("shipped rule", lambda: register("mtgc")(mtgc), "register", "'mtgc'", "another"),
    ("shipped name", lambda: register("hfedavg", levels="root"), "register", "'hfedavg'", "another"),
    ("no name", lambda: register(mtgc), "register", "mtgc", "must be a name"),
]
NUMBERS: list[Wrong] = [
    ("lr", lambda: study(leaf=0), "client.lr", "0", "above 0"),
    ("lr negative", lambda: study(leaf=-0.1), "client.lr", "-0.1", "above 0"),
    ("lr nan", lambda: study(leaf=NAN), "client.lr", "nan", "finite"),
    ("lr text", lambda: study(leaf="fast"), "client.lr", "'fast'", "number"),
    ("clip", lambda: study(leaf=client_options(clip_norm=0)), "client.clip_norm", "0", "above 0"),
    ("clip nan", lambda: study(leaf=client_options(clip_norm=NAN)), "client.clip_norm", "nan", "finite"),
    ("decay", lambda: study(leaf=client_options(weight_decay=-1)), "client.weight_decay", "-1", "at least 0"),
    ("momentum", lambda: study(leaf=client_options(momentum=1)), "client.optimizer.momentum", "1", "below 1"),
    (
        "momentum negative",
        lambda: study(leaf=client_options(momentum=-0.1)),
        "client.optimizer.momentum",
        "-0.1",
        "at least 0",
    ),
    ("every", lambda: step_decay(0.1, 0), "client.lr_schedule.every", "0", "at least 1"),
    ("factor", lambda: step_decay(0.1, 1, 2), "client.lr_schedule.factor", "2", "at most 1"),
    ("floor", lambda: cosine(0.1, 5, 0.2), "client.lr_schedule.floor", "0.2", "at most 0.1"),
    ("cosine", lambda: cosine(0.1, 1.5), "client.lr_schedule.rounds", "1.5", "whole"),
    ("rounds", lambda: study(rounds=0), "rounds", "0", "at least 1"),
    ("rounds nan", lambda: study(rounds=NAN), "rounds", "nan", "whole"),
    ("rounds half", lambda: study(rounds=2.5), "rounds", "2.5", "whole"),
    ("rounds bool", lambda: study(rounds=True), "rounds", "True", "whole"),
    ("rounds huge", lambda: study(rounds=10**400), "rounds", "1000", "at most 2,147,483,648"),
    ("batch", lambda: study(batch=0), "client.batch_size", "0", "at least 1"),
    ("batch negative", lambda: study(batch=-4), "client.batch_size", "-4", "at least 1"),
    ("batch half", lambda: study(batch=1.5), "client.batch_size", "1.5", "whole"),
    ("every round", lambda: study(evaluate_every=0), "evaluation.every", "0", "at least 1"),
    ("levels", lambda: study(evaluate_levels=[3]), "evaluation.levels", "3", "at most 2"),
    ("level", lambda: study(evaluate_levels=1), "evaluation.levels", "1", ""),
    ("seed", lambda: study(seed="today"), "seed", "'today'", "number"),
    ("seed half", lambda: study(seed=0.5), "seed", "0.5", "whole"),
    ("sampling", lambda: study(sampling="epoch"), "client.sampling", "'epoch'", "known: replacement, shuffle"),
    ("share", lambda: study(participation=0.0), "schedule.participation", "0.0", "above 0"),
    ("share nan", lambda: study(participation=NAN), "schedule.participation", "nan", "finite"),
    ("share above one", lambda: study(participation=1.5), "schedule.participation", "1.5", "at most 1"),
    ("share list", lambda: study(participation=[0.5]), "schedule.participation", "[0.5]", "2 of them"),
    ("weights", lambda: study(weights=[1, 1, 1, -1]), "tree.weights", "-1", "positive"),
    ("weights nan", lambda: study(weights=[1, 1, 1, NAN]), "tree.weights", "nan", "finite"),
    ("weights huge", lambda: study(weights=[[1, 1], [1e308] * 4]), "tree.weights", "1.e+308", "finite"),
    ("weights short", lambda: study(weights=[1, 1]), "tree.weights", "1.", "4 of them"),
    ("weights text", lambda: study(weights="size"), "tree.weights", "'size'", '"uniform"'),
    ("weights table", lambda: study(weights={1: 4, 2: 3, 3: 2, 4: 1}), "tree.weights", "{1: 4", "positive numbers"),
    ("weights unordered", lambda: study(weights={1, 2, 3, 4}), "tree.weights", "{1, 2", "positive numbers"),
    ("weights texts", lambda: study(weights=["1", "2", "3", "4"]), "tree.weights", "['1'", "positive numbers"),
    ("device", lambda: study(device="gpu"), "execution.device", "'gpu'", ""),
    ("no numbers", lambda: study(device="meta"), "execution.device", "'meta'", "meta"),
    ("batch huge", lambda: study(batch=10**30), "client.batch_size", "1000", "at most"),
    ("lr huge", lambda: study(leaf=1e300), "client.lr", "1e+300", "at most 3.40282e+38"),
    (
        "decay huge",
        lambda: study(leaf=client_options(0.1, weight_decay=1e300)),
        "client.weight_decay",
        "1e+300",
        "at most",
    ),
    ("pull huge", lambda: study(method={"name": "fedprox", "mu": 10**40}), "method", "1e+40", "at most"),
    ("lr function", lambda: study(leaf=client_options(raising)), "client.lr_schedule", "'raising'", "KeyError"),
    ("save", lambda: study(save=3), "save", "3", "the path of a folder"),
    ("ranks", lambda: study(ranks=3), "ranks", "3", "docs/ranks.md"),
]
SHAPES: list[Wrong] = [
    ("tree", lambda: study(tree="2by2"), "tree.shape", "'2by2'", "joined by x"),
    ("no tree", lambda: study(tree=None), "tree.shape", "None", "number"),
    ("levels", lambda: study(tree="x".join(["1"] * 2_000)), "tree.shape", "1x1", "at most 100 levels"),
    ("nested levels", lambda: study(tree=deep(2_000)), "tree.shape", "[[[", "100 levels"),
    ("leaves", lambda: study(tree=[9_000_000, 9_000_000]), "tree.shape", "9000000", "10,000,000 nodes"),
    ("two of a name", lambda: study(tree={"a": {"b/c": 1}, "a/b": {"c": 1}}), "tree.shape", "'a'", "'a/b/c'"),
    ("depths", lambda: Topology.of([2, [2]]), "tree.shape", "[2, [2]]", "same depth"),
    ("periods", lambda: study(periods=[2]), "schedule.periods", "[2]", "2 of them"),
    ("periods zero", lambda: study(periods=[2, 0]), "schedule.periods", "0", "at least 1"),
    ("a long period", lambda: study(periods=[1, 1e9]), "schedule.periods", "1000000000.0", "1,000,000 local steps"),
    ("periods array", lambda: study(periods=np.arange(6).reshape(3, 2)), "schedule.periods", "[[0, 1]", "2 of them"),
    ("periods table", lambda: study(periods=np.ones((2, 2))), "schedule.periods", "[1.0, 1.0]", "whole"),
    ("depth of a schedule", lambda: SyncSchedule.of([2, 2], np.array([2, 2])), "depth", "array(", "whole"),
    ("many periods", lambda: study(periods=[10**6, 2]), "schedule.periods", "1000000", "1,000,000 local steps"),
    ("steps", lambda: SyncSchedule.of_steps([10**9, 1], 2), "steps_per_sync", "1000000000", "at most 1,000,000"),
    ("period", lambda: study(periods=4), "schedule.periods", "4", "2 of them"),
    ("short schedule", lambda: study(periods=SyncSchedule((2,))), "schedule.periods", "(2,", "2 of them"),
    ("long schedule", lambda: study(periods=SyncSchedule((2, 2, 2))), "schedule.periods", "(2,", "2 of them"),
    ("lists", lambda: study(partition=PARTS[:3]), "data.partition", "3 lists", "4 of them"),
    (
        "groups",
        lambda: study(tree=[1, 2, 4], partition=[[i] for i in range(8)]),
        "data.partition",
        "8 lists",
        '"1x2x4"',
    ),
    ("fan-outs", lambda: study(tree=[2, 1, 1], periods=[1, 2, 2]), "schedule.periods", "[1, 2, 2]", '"2x1x1"'),
    ("overlap", lambda: study(partition=parts([0, 7])), "data.partition[3]", "0", "0/0 has it already"),
    ("twice", lambda: study(partition=parts([6, 6])), "data.partition[3]", "6", "1/1 has it already"),
    ("outside", lambda: study(partition=parts([6, 8])), "data.partition[3]", "8", "from 0 to 7"),
    ("negative", lambda: study(partition=parts([6, -1])), "data.partition[3]", "-1", "from 0 to 7"),
    ("floats", lambda: study(partition=parts([6.0])), "data.partition[3]", "6.0", "whole numbers"),
    ("mask", lambda: study(partition=parts([True])), "data.partition[3]", "True", "whole numbers"),
    ("nested", lambda: study(partition=parts([[6, 7]])), "data.partition[3]", "[[6, 7]]", "whole"),
    ("ragged", lambda: study(partition=parts([6, [7]])), "data.partition[3]", "[6, [7]]", "whole"),
    ("no client", lambda: study(partition=parts(6)), "data.partition[3]", "6", "whole numbers"),
    ("empty", lambda: study(partition=parts([])), "data.partition[3]", "[]", "1/1 has no samples"),
]
EVERY = {
    f"{kind}: {label}": rest
    for kind, table in {
        "rules": RULES,
        "numbers": NUMBERS,
        "shapes": SHAPES,
        "data": DATA,
        "models": MODELS,
    }.items()
    for label, *rest in table
}


@pytest.mark.parametrize(("call", "field", "value", "allowed"), EVERY.values(), ids=EVERY.keys())
def test_one_line_names_the_field(call: Callable[[], object], field: str, value: str, allowed: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        call()
    message = str(caught.value)
    assert caught.value.field == field
    assert message.startswith(f"{field} = ")
    assert "\n" not in message
    given, _, wanted = message.removeprefix(f"{field} = ").partition(": ")
    assert value in message
    assert allowed in message
    assert given
    assert wanted


def test_every_name_is_listed_once() -> None:
    assert len(EVERY) == sum(map(len, (RULES, NUMBERS, SHAPES, DATA, MODELS))) >= 40


def test_arrays_and_tensors_stand_for_lists() -> None:
    plain = study(periods=[2, 3], participation=[1.0, 0.5], evaluate_levels=[1, 2], update_factor=[0.0, 8.0])
    for kind in (np.array, torch.tensor):
        made = study(
            periods=kind([2, 3]),
            participation=kind([1.0, 0.5]),
            evaluate_levels=kind([1, 2]),
            update_factor=kind([0.0, 8.0]),
        )
        assert made.schedule == plain.schedule and made.evaluate_levels == plain.evaluate_levels == (1, 2)
        assert torch.equal(made.run().models[0], plain.run().models[0])
    assert SyncSchedule.of_steps(np.array([6, 3]), 2) == SyncSchedule.of_steps([6, 3], 2)
    for tree in (np.array([2, 3]), torch.tensor([2, 3]), list(np.array([2, 3]))):
        assert Topology.of(tree).names == Topology.of([2, 3]).names
    assert Topology.of(np.int64(4)).names == Topology.of(4).names


def test_a_name_of_ones_own_may_be_registered_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    for restart in ("zero", "keep"):
        register("mine", levels="root", summary="again")(functools.partial(mtgc, restart))
    assert registry.entry("mine").make.args == ("keep",)


def test_the_right_call_is_fine() -> None:
    assert study().run().models[0].isfinite().all()


def test_a_stacked_engine_says_when_it_cannot_hold_the_batches() -> None:
    many = {"data": (INPUTS.repeat(200, 1), LABELS.repeat(200)), "partition": np.arange(1_600).reshape(4, 400)}
    assert study(**many, batch=None, engine="auto", periods=[1, 1_000_000]).engine.how == "loop"
    for engine in ("stacked", "vmap"):
        with pytest.raises(InvalidInput, match=r"periods = \[1, 1000000\].*1,073,741,824 samples.*loop engine"):
            study(**many, batch=None, engine=engine, periods=[1, 1_000_000])


def test_a_mask_of_the_wrong_length_is_refused_when_it_is_drawn() -> None:
    sim = study(participation=lambda chance: np.ones(3, dtype=bool))
    with pytest.raises(InvalidInput, match=r"participation = .*4 nodes"):
        sim.run()


@pytest.mark.parametrize("lr", [NAN, -0.1], ids=str)
def test_a_learning_rate_function_is_held_to_the_same_bounds(lr: float) -> None:
    """With a NaN learning rate a run would do nothing, without an error."""
    with pytest.raises(InvalidInput, match="lr_schedule = "):
        study(leaf=client_options(lambda round: lr)).run()
