"""Labels that are no class of the model's are refused before the first round, however the loss was
named; what is read anew is looked at whenever it is."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from stratafl import InvalidInput
from stratafl.base.errors import UserCodeError
from stratafl.experiment.experiment import Experiment
from stratafl.simulation.deployed import leaf_trainer, part_of, root_of
from tests.flat import simulate

INPUTS, LABELS = torch.arange(24.0).reshape(8, 3) / 24, torch.arange(8) % 2
PARTS = [[0, 1], [2, 3], [4, 5], [6, 7]]


class OwnLoss(nn.CrossEntropyLoss):
    """A user's own idea of labels, which are theirs to look at: here counted from 5."""

    def forward(self, scores: Tensor, labels: Tensor) -> Tensor:
        return super().forward(scores, labels - 5)


class Scored(nn.Module):
    """Scores of two classes at each of three places, as (samples, classes, places)."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x[..., None]).mT


def labels(**changes: int) -> Tensor:
    """The labels with some changed, by their numbers: `_6=2` is a label 2 of sample 6."""
    changed = LABELS.clone()
    for name, value in changes.items():
        changed[int(name[1:])] = value
    return changed


def run(labels: object, **more: object):
    settings = {"data": (INPUTS, labels), "partition": PARTS, "tree": "2x2", "rules": "mtgc", "periods": [1, 2]}
    return simulate(**{"model": lambda: nn.Linear(3, 2), "rounds": 1, **settings, **more})


LOSSES = {
    "none": None,
    "name": "cross_entropy",
    "table": {"name": "cross_entropy", "label_smoothing": 0.1},
    "likelihood by name": "nll",
    "function": F.cross_entropy,
    "likelihood": F.nll_loss,
    "module": nn.CrossEntropyLoss(),
    "likelihood module": nn.NLLLoss(),
    "partial": functools.partial(F.cross_entropy, label_smoothing=0.1),
    "method": nn.CrossEntropyLoss().forward,
    "margin": F.multi_margin_loss,
    "margin module": nn.MultiMarginLoss(),
    "path of a function": "torch.nn.functional:cross_entropy",
    "path of a class": "torch.nn:CrossEntropyLoss",
    "path with parameters": {"name": "torch.nn:CrossEntropyLoss", "label_smoothing": 0.1},
}


@pytest.mark.parametrize("engine", ["loop", "stacked"])
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_however_the_loss_is_named(loss: object, engine: str) -> None:
    with pytest.raises(InvalidInput, match="labels go from 0 to 2, so 3 classes are needed"):
        run(labels(_6=2), loss=loss, engine=engine)
    with pytest.raises(InvalidInput, match=r"-1 to .*: classes are counted from 0"):
        run(labels(_6=-1), loss=loss, engine=engine)


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_floating_labels_are_named_as_such(loss: object) -> None:
    with pytest.raises(
        InvalidInput, match=r"data.source labels = 'float32': classes are whole numbers, such as y\.long"
    ):
        run(LABELS.float(), loss=loss)


def test_a_probability_of_every_class_is_a_target() -> None:
    run(F.one_hot(LABELS).float(), loss="cross_entropy").run()


@pytest.mark.parametrize(
    "loss", [None, "cross_entropy", F.nll_loss, nn.CrossEntropyLoss()], ids=["none", "name", "function", "module"]
)
def test_of_test_data_and_of_each_client_s_own(loss: object) -> None:
    wrong = INPUTS, labels(_6=2)
    with pytest.raises(InvalidInput, match="test labels go from 0 to 2"):
        run(LABELS, loss=loss, test=wrong)
    data_sets = [(INPUTS, LABELS)] * 3 + [wrong]
    with pytest.raises(InvalidInput, match="test_partition labels go from 0 to 2"):
        run(LABELS, loss=loss, test=(INPUTS, LABELS), test_partition=data_sets)


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_places_of_a_sequence_have_labels_too(engine: str) -> None:
    places = LABELS[:, None].expand(8, 3).clone()
    run(places, model=Scored, loss="cross_entropy", engine=engine).run()
    places[6, 1] = 2
    with pytest.raises(InvalidInput, match="labels go from 0 to 2"):
        run(places, model=Scored, loss="cross_entropy", engine=engine)


def one_hot_loss(scores: Tensor, labels: Tensor) -> Tensor:
    return -(scores.log_softmax(1) * F.one_hot(labels, 2)).sum(1).mean()


@pytest.mark.parametrize("engine", ["loop", "stacked"])
@pytest.mark.parametrize(("label", "told"), [(2, "must be smaller"), (-1, "must be non-negative")])
def test_a_loss_of_one_hot_labels_finds_what_is_no_class(label: int, told: str, engine: str) -> None:
    """`torch.func.vmap` gives such a label a row of zeros."""
    with pytest.raises(UserCodeError, match=f"Class values {told}"):
        run(labels(_6=label), loss=one_hot_loss, engine=engine).run()


IGNORING = {
    "the library's own": ("cross_entropy", -100),
    "by a table": ({"name": "cross_entropy", "ignore_index": 9}, 9),
    "a negative one": ({"name": "nll", "ignore_index": -1}, -1),
    "by a module": (nn.CrossEntropyLoss(ignore_index=9), 9),
    "by a partial": (functools.partial(F.cross_entropy, ignore_index=9), 9),
    "by a method": (nn.CrossEntropyLoss(ignore_index=9).forward, 9),
    "by a partial of a module": (functools.partial(nn.CrossEntropyLoss(ignore_index=9)), 9),
}


@pytest.mark.parametrize(("loss", "ignored"), IGNORING.values(), ids=IGNORING)
def test_the_label_that_is_passed_over_is_no_mistake(loss: object, ignored: int) -> None:
    assert run(labels(_6=ignored), loss=loss).run().refused == {}
    with pytest.raises(InvalidInput, match="labels"):
        run(labels(_6=ignored, _7=-3), loss=loss)


def test_another_than_the_one_that_is_passed_over_is_one() -> None:
    with pytest.raises(InvalidInput, match=r"-100 to .* 9 is a label to ignore"):
        run(labels(_6=-100), loss={"name": "cross_entropy", "ignore_index": 9})


def one_score(targets: Tensor, loss: object, **more: object):
    return run(targets, model=lambda: nn.Linear(3, 1), loss=loss, **more)


SHARES = {
    "name": "bce_with_logits",
    "table": {"name": "bce_with_logits", "pos_weight": 2.0},
    "function": F.binary_cross_entropy_with_logits,
    "module": nn.BCEWithLogitsLoss(),
    "margin": F.multilabel_soft_margin_loss,
}
SIGNS = {"function": F.soft_margin_loss, "module": nn.SoftMarginLoss(), "hinge": nn.HingeEmbeddingLoss()}


@pytest.mark.parametrize("loss", SHARES.values(), ids=SHARES)
def test_what_is_neither_yes_nor_no_is_refused(loss: object) -> None:
    answers = LABELS[:, None].float()
    one_score(0.8 * answers, loss).run()
    for label in (7, -1, 1.5):
        answers[6] = label
        with pytest.raises(InvalidInput, match=f"data.source labels = '{label}': must be from 0 to 1"):
            one_score(answers, loss)


@pytest.mark.parametrize("loss", SIGNS.values(), ids=SIGNS)
def test_a_no_is_minus_1_where_the_loss_wants_that(loss: object) -> None:
    one_score(2.0 * LABELS[:, None] - 1, loss).run()
    with pytest.raises(InvalidInput, match=r"data.source labels = '0': must be -1 or 1"):
        one_score(1.0 * LABELS[:, None], loss)


def test_answers_of_test_data_and_those_read_anew_are_looked_at() -> None:
    answers = LABELS.float()[:, None]
    with pytest.raises(InvalidInput, match="test labels = '2'"):
        one_score(answers, "bce_with_logits", test=(INPUTS, 2 * answers))
    data = Rereading(INPUTS, answers)
    with pytest.raises(InvalidInput, match=r"^data.source\[6\] label = 2.0: must be from 0 to 1"):
        one_score(answers, "bce_with_logits", data=data, lazy=True, rounds=4).run()


def test_what_is_no_class_to_the_loss_is_left_alone() -> None:
    run(F.one_hot(labels(), 2).float(), loss="cross_entropy").run()  # probabilities
    run(labels() + 5, loss=OwnLoss()).run()
    run(INPUTS.sum(dim=1, keepdim=True) + 5, model=lambda: nn.Linear(3, 1), loss="mse").run()


# -- lazy data -------------------------------------------------------------------------------------


class Rereading(TensorDataset):
    """A data set that changes the label of sample 6 at the fourth reading, after the set-up."""

    times, later = 0, 2

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        inputs, label = super().__getitem__(number)
        self.times += number == 6
        return inputs, torch.full_like(label, self.later) if number == 6 and self.times > 3 else label


@pytest.mark.parametrize("engine", ["loop", "stacked"])
@pytest.mark.parametrize("later", [2, -1])
def test_labels_of_lazy_data_are_checked_at_every_reading(engine: str, later: int) -> None:
    data = Rereading(INPUTS, LABELS)
    data.later = later
    sim = run(LABELS, data=data, lazy=True, loss="cross_entropy", engine=engine, rounds=4)
    with pytest.raises(InvalidInput, match=rf"^data.source\[6\] label = {later}: must be a class, 0 to 1"):
        sim.run()


def test_a_label_that_becomes_ignored_is_left_out() -> None:
    """The mean is over the labels that are not ignored, in both engines."""
    models = []
    for engine in ("loop", "stacked"):
        data = Rereading(INPUTS.double(), LABELS)
        data.later, more = -100, {"model": lambda: nn.Linear(3, 2).double(), "engine": engine, "rounds": 4}
        sim = run(LABELS, data=data, lazy=True, loss="cross_entropy", **more)
        data.times = 4
        models.append(sim.run().models[0])
    torch.testing.assert_close(*models, rtol=0, atol=1e-12)


# -- deployed --------------------------------------------------------------------------------------

MODEL = """
from torch import nn


def narrow(input_shape, classes):
    return nn.Linear(*input_shape, classes - 1)
"""


@pytest.mark.parametrize("loss", [None, "cross_entropy"])
@pytest.mark.parametrize("setting_up", [lambda c: leaf_trainer(c, 3, *part_of(c, 3)), root_of], ids=["leaf", "root"])
def test_of_deployed_sites(tmp_path: Path, setting_up: Callable[[Experiment], object], loss: str | None) -> None:
    (tmp_path / "own_model.py").write_text(MODEL)
    data = {"source": "synthetic", "arguments": {"samples": 25, "features": 5, "classes": 3}}
    objective = {} if loss is None else {"loss": loss}
    model = {"name": f"{tmp_path / 'own_model.py'}:narrow"}
    config = Experiment.from_table({"tree": {"shape": "2x2"}, "data": data, "model": model, **objective})
    with pytest.raises(InvalidInput, match="labels go from 0 to 2, so 3 classes are needed"):
        setting_up(config)
