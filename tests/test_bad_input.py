"""What a user can get wrong: each mistake is one line that names the field and shows the value."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from stratafl import (
    InvalidInput,
    Schedule,
    Tree,
    adam,
    cosine,
    feddyn,
    fedprox,
    leaf,
    momentum,
    mtgc,
    place,
    register,
    simulate,
    step_decay,
    yogi,
)

NAN, INF = float("nan"), float("inf")
PARTS = [[0, 1], [2, 3], [4, 5], [6, 7]]
INPUTS, LABELS = torch.arange(24.0).reshape(8, 3) / 24, torch.arange(8) % 2


def study(**changes) -> object:
    call = {
        "model": nn.Linear(3, 2),
        "data": (INPUTS, LABELS),
        "partition": PARTS,
        "tree": "2x2",
        "rules": "mtgc",
        "periods": [2, 2],
        "rounds": 1,
        **changes,
    }
    return simulate(**call)


def parts(last: object) -> list:
    return [*PARTS[:3], last]


def per_sample(outputs: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, labels, reduction="none")


def misfit(outputs: Tensor, labels: Tensor) -> Tensor:
    return (outputs * torch.zeros(5)).sum()


def plain_number(outputs: Tensor, labels: Tensor) -> float:
    return 1.0


class Uneven(TensorDataset):
    """A data set whose entries are no pairs."""

    def __getitem__(self, index: int) -> tuple:
        return (*super().__getitem__(index), 0)


Wrong = tuple[str, Callable[[], object], str, str, str]
"""A label, the call, the field, and two fragments of the message: the value and what is allowed."""

RULES: list[Wrong] = [
    ("unknown", lambda: study(rules="mtgcc"), "method", "'mtgcc'", "did you mean 'mtgc'"),
    ("far off", lambda: study(rules="zzzz"), "method", "'zzzz'", "known: adam"),
    ("in a list", lambda: study(rules=["avrage", "mtgc"]), "rules", "'avrage'", "'average'"),
    (
        "parameter",
        lambda: study(rules={"name": "fedprox", "mue": 1}),
        "fedprox parameter",
        "'mue'",
        "did you mean 'mu'",
    ),
    (
        "no parameters",
        lambda: study(rules={"name": "scaffold", "mu": 1}),
        "scaffold parameter",
        "'mu'",
        "unknown",
    ),
    ("nameless", lambda: study(rules={"mu": 1}), "method", "{'mu': 1}", "a table with a name"),
    ("no rule", lambda: study(rules=["mtgc", 3]), "rules", "3", "a table with a name, or a Rule"),
    ("too few", lambda: study(rules=["mtgc"]), "rules", "['mtgc']", "2 of them"),
    ("too many", lambda: study(rules=["mtgc"] * 3), "rules", "'mtgc'", "2 of them"),
    ("one for two", lambda: study(rules=mtgc()), "rules", "['Rule']", "2 of them"),
    ("a number", lambda: study(rules=5), "rules", "5", "rule"),
    ("restart", lambda: mtgc("zeroo"), "mtgc.restart", "'zeroo'", '"zero"'),
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
]
NUMBERS: list[Wrong] = [
    ("lr", lambda: study(leaf=0), "leaf.lr", "0", "above 0"),
    ("lr negative", lambda: study(leaf=-0.1), "leaf.lr", "-0.1", "above 0"),
    ("lr nan", lambda: study(leaf=NAN), "leaf.lr", "nan", "finite"),
    ("lr text", lambda: study(leaf="fast"), "leaf.lr", "'fast'", "number"),
    ("clip", lambda: leaf(clip_norm=0), "leaf.clip", "0", "above 0"),
    ("clip nan", lambda: leaf(clip_norm=NAN), "leaf.clip", "nan", "finite"),
    ("decay", lambda: leaf(weight_decay=-1), "leaf.weight_decay", "-1", "at least 0"),
    ("momentum", lambda: leaf(momentum=1), "leaf.momentum", "1", "below 1"),
    ("momentum negative", lambda: leaf(momentum=-0.1), "leaf.momentum", "-0.1", "at least 0"),
    ("every", lambda: step_decay(0.1, 0), "leaf.schedule.every", "0", "at least 1"),
    ("factor", lambda: step_decay(0.1, 1, 2), "leaf.schedule.factor", "2", "at most 1"),
    ("floor", lambda: cosine(0.1, 5, 0.2), "leaf.schedule.floor", "0.2", "at most 0.1"),
    ("cosine", lambda: cosine(0.1, 1.5), "leaf.schedule.rounds", "1.5", "whole"),
    ("rounds", lambda: study(rounds=0), "rounds", "0", "at least 1"),
    ("rounds nan", lambda: study(rounds=NAN), "rounds", "nan", "whole"),
    ("rounds half", lambda: study(rounds=2.5), "rounds", "2.5", "whole"),
    ("rounds bool", lambda: study(rounds=True), "rounds", "True", "whole"),
    ("rounds huge", lambda: study(rounds=10**400), "rounds", "1000", "number"),
    ("batch", lambda: study(batch=0), "batch", "0", "at least 1"),
    ("batch negative", lambda: study(batch=-4), "batch", "-4", "at least 1"),
    ("batch half", lambda: study(batch=1.5), "batch", "1.5", "whole"),
    ("every round", lambda: study(evaluate_every=0), "evaluate_every", "0", "at least 1"),
    ("levels", lambda: study(evaluate_levels=[3]), "evaluate_levels", "3", "at most 2"),
    ("level", lambda: study(evaluate_levels=1), "evaluate_levels", "1", ""),
    ("seed", lambda: study(seed="today"), "seed", "'today'", "number"),
    ("seed half", lambda: study(seed=0.5), "seed", "0.5", "whole"),
    ("sampling", lambda: study(sampling="epoch"), "sampling", "'epoch'", "did you mean 'epochs'"),
    ("share", lambda: study(participation=0.0), "participation", "0.0", "above 0"),
    ("share nan", lambda: study(participation=NAN), "participation", "nan", "finite"),
    ("share above one", lambda: study(participation=1.5), "participation", "1.5", "at most 1"),
    ("share list", lambda: study(participation=[0.5]), "participation", "[0.5]", "2 of them"),
    ("weights", lambda: study(weights=[1, 1, 1, -1]), "weights", "-1", "positive"),
    ("weights nan", lambda: study(weights=[1, 1, 1, NAN]), "weights", "nan", "finite"),
    ("weights short", lambda: study(weights=[1, 1]), "weights", "1.", "4 of them"),
    ("weights text", lambda: study(weights="size"), "weights", "'size'", '"uniform"'),
    ("device", lambda: study(device="gpu"), "device", "'gpu'", ""),
]
SHAPES: list[Wrong] = [
    ("tree", lambda: study(tree="2by2"), "tree", "'2by2'", "joined by x"),
    ("no tree", lambda: study(tree=None), "tree", "None", "number"),
    ("depths", lambda: Tree.of([2, [2]]), "tree", "[2, [2]]", "same depth"),
    ("periods", lambda: study(periods=[2]), "periods", "[2]", "2 of them"),
    ("periods zero", lambda: study(periods=[2, 0]), "periods", "0", "at least 1"),
    ("period", lambda: study(periods=4), "periods", "4", "2 of them"),
    ("short schedule", lambda: study(periods=Schedule((2,))), "periods", "2", "2 of them"),
    ("long schedule", lambda: study(periods=Schedule((2, 2, 2))), "periods", "2", "2 of them"),
    ("lists", lambda: study(partition=PARTS[:3]), "partition", "3 lists", "4 of them"),
    ("no partition", lambda: study(partition=None), "partition", "None", ""),
    ("overlap", lambda: study(partition=parts([0, 7])), "partition[3]", "0", "0/0 has it already"),
    ("twice", lambda: study(partition=parts([6, 6])), "partition[3]", "6", "1/1 has it already"),
    ("outside", lambda: study(partition=parts([6, 8])), "partition[3]", "8", "from 0 to 7"),
    ("negative", lambda: study(partition=parts([6, -1])), "partition[3]", "-1", "from 0 to 7"),
    ("floats", lambda: study(partition=parts([6.0])), "partition[3]", "6.0", "whole numbers"),
    ("mask", lambda: study(partition=parts([True])), "partition[3]", "True", "whole numbers"),
    ("nested", lambda: study(partition=parts([[6, 7]])), "partition[3]", "[[6, 7]]", "whole"),
    ("ragged", lambda: study(partition=parts([6, [7]])), "partition[3]", "[6, [7]]", "whole"),
    ("no client", lambda: study(partition=parts(6)), "partition[3]", "6", "whole numbers"),
    ("empty", lambda: study(partition=parts([])), "partition[3]", "[]", "1/1 has no samples"),
]
DATA: list[Wrong] = [
    ("lengths", lambda: study(data=(INPUTS, LABELS[:7])), "data shapes", "(7,)", "as many targets"),
    ("nothing", lambda: study(data=(INPUTS[:0], LABELS[:0])), "data shapes", "(0,", "at least one"),
    ("scalar", lambda: study(data=(INPUTS, 3)), "data shapes", "()", "as many targets"),
    ("no pair", lambda: study(data=INPUTS), "data", "'Tensor'", "(inputs, targets)"),
    ("none", lambda: study(data=None), "data", "'NoneType'", "(inputs, targets)"),
    ("three", lambda: study(data=(INPUTS, LABELS, LABELS)), "data", "'tuple'", "(inputs, targets)"),
    ("triples", lambda: study(data=Uneven(INPUTS, LABELS)), "data", "'Uneven'", "such pairs"),
    ("text", lambda: study(data=(INPUTS, ["cat"] * 8)), "data", "", ""),
    ("test", lambda: study(test=(INPUTS, LABELS[:2])), "test shapes", "(2,)", "as many targets"),
]
MODELS: list[Wrong] = [
    ("inputs", lambda: study(model=nn.Linear(4, 2)), "model", "'Linear'", "of shape (3,)"),
    ("classes", lambda: study(model=nn.Linear(3, 1)), "model output", "1 classes", "2 classes are"),
    (
        "negative label",
        lambda: study(data=(INPUTS, LABELS - 1)),
        "model output",
        "2 classes",
        "go from -1 to 0",
    ),
    ("float labels", lambda: study(data=(INPUTS, LABELS / 2)), "model output", "(2,)", "float32"),
    (
        "one-hot labels",
        lambda: study(data=(INPUTS, torch.eye(2)[LABELS].long())),
        "model output",
        "(2,)",
        "of shape (2,)",
    ),
    (
        "test labels",
        lambda: study(test=(INPUTS, LABELS + 5)),
        "model output",
        "2 classes",
        "5 to 6",
    ),
    ("test inputs", lambda: study(test=(INPUTS[:, :2], LABELS)), "model", "'Linear'", "test"),
    ("loss per sample", lambda: study(loss=per_sample), "loss", "'per_sample'", "one number"),
    ("loss misfit", lambda: study(loss=misfit), "loss", "'misfit'", "size"),
    ("loss no tensor", lambda: study(loss=plain_number), "loss", "'plain_number'", "one number"),
    ("no model", lambda: study(model="resnet"), "model", "'resnet'", ""),
    ("no module", lambda: study(model=lambda: 3), "model", "", ""),
    ("lazy", lambda: study(model=nn.LazyLinear(2)), "model", "'LazyLinear'", "lazy"),
    ("frozen", lambda: study(model=nn.Flatten()), "model", "'Flatten'", "no trainable"),
    ("initial", lambda: study(initial={}), "initial", "[]", "lacks 'weight'"),
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


def test_the_right_call_is_fine() -> None:
    assert study().run().models[0].isfinite().all()


def test_a_long_value_is_cut_short() -> None:
    with pytest.raises(InvalidInput) as caught:
        study(partition=parts(list(np.arange(500) / 2)))
    assert len(str(caught.value)) < 160
    assert "..." in str(caught.value)


@pytest.mark.parametrize("whole", [{"batch": 2.0}, {"rounds": 2.0}, {"evaluate_levels": [1.0]}], ids=str)
def test_a_whole_float_is_a_number_like_any_other(whole: dict) -> None:
    assert study(**whole, test=(INPUTS, LABELS)).run().models[0].isfinite().all()


def test_numpy_numbers_are_numbers() -> None:
    result = study(rounds=np.int64(2), batch=np.int64(2), leaf=np.float32(0.1)).run()
    assert len(result.history) == 2


def test_a_mask_of_the_wrong_length_is_refused_when_it_is_drawn() -> None:
    sim = study(participation=lambda chance: np.ones(3, dtype=bool))
    with pytest.raises(InvalidInput, match=r"participation = .*4 nodes"):
        sim.run()


@pytest.mark.parametrize("lr", [NAN, -0.1], ids=str)
def test_a_learning_rate_function_is_held_to_the_same_bounds(lr: float) -> None:
    """Otherwise a NaN learning rate would be a run in which silently nothing happens."""
    with pytest.raises(InvalidInput, match="lr = "):
        study(leaf=leaf(lambda round: lr)).run()
