"""Models that return a table, an object or a tuple train and are evaluated like those that return
their scores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stratafl import InvalidInput, Simulation, simulate
from stratafl.core import losses
from tests.metrics.evaluated import evaluated

random = torch.Generator().manual_seed(0)
X = torch.randn(60, 6, generator=random, dtype=torch.float64)
Y = (X @ torch.randn(6, 3, generator=random, dtype=torch.float64)).argmax(dim=1)
PARTS = [range(15 * client, 15 * client + 15) for client in range(4)]


@dataclass
class Record:
    hidden: Tensor
    logits: Tensor


class Named(NamedTuple):
    hidden: Tensor
    logits: Tensor


class Thing:
    def __init__(self, hidden: Tensor, logits: Tensor):
        self.hidden, self.logits = hidden, logits


def hugging_face(hidden: Tensor, logits: Tensor) -> Any:
    from transformers.modeling_outputs import SequenceClassifierOutput

    return SequenceClassifierOutput(logits=logits, hidden_states=(hidden,))


FORMS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "tensor": lambda hidden, logits: logits,
    "table": lambda hidden, logits: {"hidden": hidden, "logits": logits},
    "tuple": lambda hidden, logits: (logits, hidden),
    "data class": Record,
    "named tuple": Named,
    "object": Thing,
    "hugging face": hugging_face,
}
STRUCTURED = [name for name in FORMS if name != "tensor"]


class Net(nn.Module):
    def __init__(self, form: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.into, self.out, self.form = nn.Linear(6, 8), nn.Linear(8, 3), form

    def forward(self, x: Tensor) -> Any:
        hidden = torch.relu(self.into(x))
        return self.form(hidden, self.out(hidden))


def run(form: str, engine: str, **settings: Any) -> Simulation:
    made = {"periods": [2, 2], "rounds": 2, "leaf": 0.3, "batch": 4, "test": (X, Y), "evaluate_levels": [0, 2]}
    return simulate(
        lambda: Net(FORMS[form]).double(), (X, Y), PARTS, "2x2", "mtgc", engine=engine, seed=3, **{**made, **settings}
    )


def test_every_form_has_its_scores() -> None:
    hidden, logits = torch.zeros(2, 8), torch.zeros(2, 3)
    assert all(losses.require_scores(make(hidden, logits)) is logits for make in FORMS.values())
    for nothing in ({"out": logits}, "logits", None, (), ("a", logits), Thing(hidden, 3)):  # type: ignore[arg-type]
        assert losses.find_scores(nothing) is None
    with pytest.raises(TypeError, match="dict of out holds no scores"):
        losses.require_scores({"out": logits})


@pytest.mark.parametrize("form", STRUCTURED)
@pytest.mark.parametrize("engine", ["loop", "vmap", "stacked"])
def test_any_form_gives_what_the_scores_alone_give(form: str, engine: str) -> None:
    """Drift with ideal corrections, gradients, and the evaluation of every client among it."""
    settings = {"diagnose": "ideal", "metrics": ["f1"]}
    told, plain = run(form, engine, **settings), run("tensor", engine, **settings)
    result, right = told.run(), plain.run()
    assert told.engine.description == engine
    torch.testing.assert_close(result.models, right.models, rtol=1e-12, atol=1e-12)
    for one, other in zip(result.history, right.history, strict=True):
        assert one.metrics == pytest.approx(other.metrics) and set(one.metrics) == {"loss", "accuracy", "f1"}
        assert one.nodes["1/1"] == pytest.approx(other.nodes["1/1"])
        assert one.drift["2"] == pytest.approx(other.drift["2"], rel=1e-6)


@pytest.mark.parametrize("form", STRUCTURED)
@pytest.mark.parametrize("engine", ["loop", "vmap", "stacked"])
def test_a_loss_of_one_s_own_is_given_all_of_it(form: str, engine: str) -> None:
    """It fails where it is given anything else."""

    def hidden_of(given: Any) -> Tensor:
        if isinstance(given, dict) and "hidden_states" in given:
            return given["hidden_states"][0]
        if isinstance(given, dict):
            return given["hidden"]
        return given[1] if type(given) is tuple else given.hidden

    def loss(given: Any, targets: Tensor) -> Tensor:
        logits = losses.require_scores(given)
        weights = torch.tensor([1.0, 2.0, 3.0], dtype=logits.dtype)
        return F.cross_entropy(logits, targets, weights) + 0.1 * hidden_of(given).square().mean()

    told, loop = run(form, engine, loss=loss), run(form, "loop", loss=loss)
    assert told.engine.description == engine
    result, right = told.run(), loop.run()
    torch.testing.assert_close(result.models, right.models, rtol=1e-12, atol=1e-12)
    found = loss(result.module(X), Y).detach()
    assert result.history[-1].metrics["loss"] == pytest.approx(float(found))
    assert result.history[-1].metrics["accuracy"] == pytest.approx(
        float((losses.require_scores(result.module(X)).argmax(dim=1) == Y).double().mean())
    )


@pytest.mark.parametrize("form", STRUCTURED)
def test_a_loss_sees_all_samples_at_once_whatever_they_are_in(form: str) -> None:
    """What it divides by is its own affair, so a mean over chunks would be another number."""

    def loss(given: Any, targets: Tensor) -> Tensor:
        assert type(given) is type(FORMS[form](X[:1], X[:1]))
        return losses.require_scores(given).sum().square() / len(targets)

    def predict(x: Tensor) -> Any:
        return FORMS[form](x, x[:, :3])

    whole = float(loss(predict(X), Y))
    assert evaluated(predict, loss, X, Y, chunk=7)["loss"] == pytest.approx(whole)


def test_what_has_no_entry_for_each_sample_is_taken_part_by_part() -> None:
    def predict(x: Tensor) -> Any:
        return {"logits": x[:, :3], "temperature": torch.ones(())}

    def loss(given: Any, targets: Tensor) -> Tensor:
        return F.cross_entropy(given["logits"] * given["temperature"], targets)

    found = evaluated(predict, loss, X, Y, chunk=15)
    assert found["loss"] == pytest.approx(float(F.cross_entropy(X[:, :3], Y)))


@pytest.mark.parametrize("loss", [None, F.cross_entropy, nn.CrossEntropyLoss(), "cross_entropy"])
def test_pytorch_s_own_losses_take_the_scores(loss: Any) -> None:
    found, right = (made.run().history for made in (run("table", "loop", loss=loss), run("tensor", "loop")))
    assert [each.metrics for each in found] == [each.metrics for each in right]


class Wordy(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        return {"out": super().forward(x)}


def test_an_output_without_scores_is_refused_in_a_line_that_helps() -> None:
    with pytest.raises(InvalidInput, match=r"'dict of out': must be a tensor of scores.*'logits'.*loss of your own"):
        simulate(lambda: Wordy(6, 3).double(), (X, Y), PARTS, "2x2", periods=[1, 1], rounds=1, test=(X, Y))

    def loss(given: Any, targets: Tensor) -> Tensor:
        return F.cross_entropy(given["out"], targets)

    made = simulate(
        lambda: Wordy(6, 3).double(), (X, Y), PARTS, "2x2", periods=[1, 1], rounds=1, test=(X, Y), loss=loss,
        metrics={"largest": lambda given, targets: given["out"].abs().max()},
    )  # fmt: skip
    assert set(made.run().history[0].metrics) == {"loss", "largest"}
    with pytest.raises(InvalidInput, match=r"metrics\.f1 = 'dict of out': needs scores"):
        simulate(
            lambda: Wordy(6, 3).double(), (X, Y), PARTS, "2x2", periods=[1, 1], rounds=1, test=(X, Y), loss=loss,
            metrics=["f1"],
        )  # fmt: skip
