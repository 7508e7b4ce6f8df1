"""What a user can get wrong: each mistake is one line that names the field and shows the value."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

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
from stratafl.base.errors import reason, shown, unknown
from stratafl.data.sampling import batches

NAN, INF = float("nan"), float("inf")
PARTS = [[0, 1], [2, 3], [4, 5], [6, 7]]
INPUTS, LABELS = torch.arange(24.0).reshape(8, 3) / 24, torch.arange(8) % 2


def study(**changes) -> object:
    call = {
        "model": lambda: nn.Linear(3, 2),
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


def deep(levels: int) -> list:
    shape: list = [1]
    for _ in range(levels):
        shape = [shape]
    return shape


def quantised() -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch means to give them up
        return torch.quantize_per_tensor(INPUTS, 0.1, 0, torch.quint8)


def ragged(layout: torch.layout) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a prototype
        return torch.nested.nested_tensor([row[: 1 + i % 2] for i, row in enumerate(INPUTS)], layout=layout)


def per_sample(outputs: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, labels, reduction="none")


def misfit(outputs: Tensor, labels: Tensor) -> Tensor:
    return (outputs * torch.zeros(5)).sum()


def plain_number(outputs: Tensor, labels: Tensor) -> float:
    return 1.0


def constant_loss(outputs: Tensor, labels: Tensor) -> Tensor:
    return torch.ones(())


def complex_loss(outputs: Tensor, labels: Tensor) -> Tensor:
    return outputs.sum() * 1j


def raising(*given: object) -> Tensor:
    raise KeyError("not there")


def leaving(*given: object) -> Tensor:
    raise SystemExit(0)


class Detached(nn.Linear):
    """Its output has lost its way back to the parameters."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).detach()


class Unlearning(nn.Linear):
    """Without a gradient while it is trained, and only then."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(not self.training):
            return super().forward(x)


class Leaving(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        raise SystemExit(0)


class FailsInTraining(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            raise NotImplementedError("only for looking")
        return super().forward(x)


class Lengths(TensorDataset):
    """A data set whose inputs are not all as long."""

    def __getitem__(self, index: int) -> tuple:
        inputs, label = super().__getitem__(index)
        return inputs[: 1 + index % 2], label


class Broken(TensorDataset):
    def __getitem__(self, index: int) -> tuple:
        raise OSError("the disk is gone")


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
    ("no numbers", lambda: study(device="meta"), "device", "'meta'", "meta"),
    ("batch huge", lambda: study(batch=10**30), "batch", "1000", "at most"),
    ("lr huge", lambda: study(leaf=1e300), "leaf.lr", "1e+300", "at most 3.40282e+38"),
    ("decay huge", lambda: study(leaf=leaf(0.1, weight_decay=1e300)), "leaf.weight_decay", "1e+300", "at most"),
    ("pull huge", lambda: study(rules={"name": "fedprox", "mu": 10**40}), "rules", "1e+40", "at most"),
    ("lr function", lambda: study(leaf=leaf(raising)), "leaf.lr", "'raising'", "KeyError"),
    ("ranks", lambda: study(ranks=3), "ranks", "3", "docs/ranks.md"),
]
SHAPES: list[Wrong] = [
    ("tree", lambda: study(tree="2by2"), "tree", "'2by2'", "joined by x"),
    ("no tree", lambda: study(tree=None), "tree", "None", "number"),
    ("levels", lambda: study(tree="x".join(["1"] * 2_000)), "tree", "1x1", "at most 100 levels"),
    ("nested levels", lambda: study(tree=deep(2_000)), "tree", "[[[", "100 levels"),
    ("leaves", lambda: study(tree=[9_000_000, 9_000_000]), "tree", "9000000", "10,000,000 nodes"),
    ("two of a name", lambda: study(tree={"a": {"b/c": 1}, "a/b": {"c": 1}}), "tree", "'a'", "'a/b/c'"),
    ("depths", lambda: Tree.of([2, [2]]), "tree", "[2, [2]]", "same depth"),
    ("periods", lambda: study(periods=[2]), "periods", "[2]", "2 of them"),
    ("periods zero", lambda: study(periods=[2, 0]), "periods", "0", "at least 1"),
    ("a long period", lambda: study(periods=[1, 1e9]), "periods", "1000000000.0", "1,000,000 local steps"),
    ("many periods", lambda: study(periods=[10**6, 2]), "periods", "1000000", "1,000,000 local steps"),
    ("steps", lambda: Schedule.of_steps([10**9, 1], 2), "steps_per_sync", "1000000000", "at most 1,000,000"),
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
    ("ragged", lambda: study(data=([[1.0], [1.0, 2.0]], [0, 1])), "data", "'list'", "as long in every row"),
    ("unlike samples", lambda: study(data=Lengths(INPUTS, LABELS)), "data", "'Lengths'", "one shape"),
    ("broken", lambda: study(data=Broken(INPUTS, LABELS)), "data", "'Broken'", "the disk is gone"),
    ("masked", lambda: study(data=(np.ma.masked_less(INPUTS.numpy(), 0.5), LABELS)), "data", "Masked", "masked"),
    ("meta", lambda: study(data=(INPUTS.to("meta"), LABELS)), "data", "'Tensor'", "meta device"),
    ("meta labels", lambda: study(data=(INPUTS, LABELS.to("meta"))), "data", "'Tensor'", "meta device"),
    ("sparse", lambda: study(data=(INPUTS.to_sparse(), LABELS)), "data", "'Tensor'", "to_dense()"),
    ("quantised", lambda: study(data=(quantised(), LABELS)), "data", "'Tensor'", "dequantize()"),
    ("nested", lambda: study(data=(ragged(torch.strided), LABELS)), "data", "'Tensor'", "nested"),
    ("jagged", lambda: study(data=(ragged(torch.jagged), LABELS)), "data", "Tensor'", "nested"),
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
    ("meta model", lambda: study(model=nn.Linear(3, 2, device="meta")), "model", "'Linear'", "weight is on the meta"),
    ("maker", lambda: study(model=raising), "model", "'raising'", "KeyError"),
    ("maker leaves", lambda: study(model=leaving), "model", "'leaving'", "SystemExit: 0"),
    ("forward leaves", lambda: study(model=Leaving(3, 2)), "model", "'Leaving'", "SystemExit: 0"),
    ("training", lambda: study(model=FailsInTraining(3, 2)), "model", "'FailsInTraining'", "only for looking"),
    ("detached", lambda: study(model=Detached(3, 2)), "model output", "'Detached'", "no gradient"),
    ("no grad", lambda: study(model=Unlearning(3, 2)), "model output", "'Unlearning'", "no gradient"),
    ("loss constant", lambda: study(loss=constant_loss), "loss", "'constant_loss'", "no gradient"),
    ("loss complex", lambda: study(loss=complex_loss), "loss", "'complex_loss'", "one number"),
    ("loss fails", lambda: study(loss=raising), "loss", "'raising'", "KeyError"),
    ("loss leaves", lambda: study(loss=leaving), "loss", "'leaving'", "SystemExit"),
    ("augment", lambda: study(augment=3), "augment", "3", "must be a function"),
    ("augment fails", lambda: study(augment=raising), "augment", "'raising'", "KeyError"),
    ("augment kind", lambda: study(augment=lambda x, *at: x.numpy()), "augment", "<lambda>", "not ndarray"),
    ("augment loses", lambda: study(augment=lambda x, *at: x[:1]), "augment", "<lambda>", "as many inputs"),
    ("augment shape", lambda: study(augment=lambda x, *at: x[:, :2]), "augment", "<lambda>", "(2, 2)"),
    ("augment type", lambda: study(augment=lambda x, *at: x.double()), "augment", "<lambda>", "float64"),
    ("no state", lambda: study(initial=[1]), "initial", "[1]", "state dict"),
    ("initial text", lambda: study(initial={"weight": "a", "bias": 1}), "initial.weight", "'str'", "array of numbers"),
    ("initial complex", lambda: study(initial={"weight": INPUTS * 1j}), "initial.weight", "complex64", "real"),
    ("initial key", lambda: study(initial={1: INPUTS}), "initial key", "1", "text"),
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


ODD = {
    "a huge number": 10**5000,
    "a list of them": [10**5000] * 50,
    "depth": deep(10_000),
    "text": "long " * 1_000,
    "codes of a terminal": "\x1b[31m" * 100,
    "lines": "first\nsecond\r\nthird\u2028fourth",
    "half a letter": "\ud800",
    "a tensor": torch.zeros(300, 300),
    "an array": np.array([10**5000, "a"], dtype=object),
    "a table": {"k" * 500: {"b": [1] * 1_000}},
    "a path": Path("/" + "deep/" * 100 + "end.toml"),
}


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD.keys())
def test_a_complaint_is_one_short_printable_line(odd: object) -> None:
    """Wherever the odd value stands in it."""
    words = odd if isinstance(odd, str) else "words"
    for message in (
        str(InvalidInput("field", odd, "allowed")),
        str(InvalidInput(f"field {words}", 1, f"allowed {words}")),
        str(unknown("field", odd, ["known", *[words] * 100])),
    ):
        assert message.isprintable()
        assert len(message) <= 620
    assert len(shown(odd)) <= 200


def test_of_a_long_path_the_end_is_shown() -> None:
    assert shown(ODD["a path"]).endswith("deep/end.toml'")


def test_what_an_exception_says_is_one_short_printable_line() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise ValueError

    assert reason(ValueError("first\nsecond")) == "ValueError: first"
    assert reason(ValueError("\x1b[31m")) == "ValueError: \\x1b[31m"
    assert reason(ValueError()) == "ValueError"
    assert reason(Mute()) == "Mute"
    assert len(reason(ValueError("a" * 10_000))) < 220


def test_values_to_start_from_may_be_arrays() -> None:
    start = nn.Linear(3, 2).state_dict()
    arrays = {name: value.numpy() for name, value in start.items()}
    backwards = np.flip(np.flip(arrays["weight"]).copy())
    assert backwards.strides[0] < 0
    backwards.flags.writeable = False
    foreign = arrays["weight"].astype(">f4")
    expected = study(initial=start).run().models[0]
    for weight in (arrays["weight"], backwards, foreign):
        assert torch.equal(study(initial={**arrays, "weight": weight}).run().models[0], expected)


def test_batches_of_a_far_meeting_are_drawn_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = study(periods=[1, 20]).run().models[0]
    drawn: list[int] = []

    def watched(seed: int, client: int, size: int, first: int, steps: int, *rest: object) -> list[Tensor]:
        drawn.append(steps)
        return batches(seed, client, size, first, steps, *rest)

    monkeypatch.setattr("stratafl.engine.loop.AHEAD", 8)
    monkeypatch.setattr("stratafl.engine.loop.batches", watched)
    assert torch.equal(study(periods=[1, 20]).run().models[0], expected)
    assert drawn == [8, 8, 4] * 4


def test_an_engine_of_all_clients_at_once_says_when_it_cannot_hold_the_batches() -> None:
    many = {"data": (INPUTS.repeat(200, 1), LABELS.repeat(200)), "partition": np.arange(1_600).reshape(4, 400)}
    for engine in ("stacked", "vmap", "auto"):
        with pytest.raises(InvalidInput, match=r"periods = \[1, 1000000\].*1,073,741,824 samples.*loop engine"):
            study(**many, batch=None, engine=engine, periods=[1, 1_000_000])


@pytest.mark.parametrize("engine", ["loop", "vmap", "stacked"])
@pytest.mark.parametrize("rules", ["mtgc", "scaffold", "median", "adam"])
def test_a_module_may_be_of_bfloat16(engine: str, rules: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).bfloat16()
    sim = study(model=model, engine=engine, rules=rules, test=(INPUTS, LABELS), diagnose="ideal")
    result = sim.run()
    assert result.models[0].dtype == torch.bfloat16
    assert result.models[0].isfinite().all()
    assert not result.refused
    assert result.history[-1].metrics["loss"] < 1


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
