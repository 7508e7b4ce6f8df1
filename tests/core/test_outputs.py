"""Models that return a dict, an object or a tuple are trained and evaluated like those that return
scores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stratafl import InvalidInput, Simulation
from stratafl.core import losses
from tests.flat import simulate
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
    options = {"periods": [2, 2], "rounds": 2, "leaf": 0.3, "batch": 4, "test": (X, Y), "evaluate_levels": [0, 2]}
    return simulate(
        lambda: Net(FORMS[form]).double(),
        (X, Y),
        PARTS,
        "2x2",
        "mtgc",
        engine=engine,
        seed=3,
        **{**options, **settings},
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
def test_every_form_has_the_same_results_as_scores_alone(form: str, engine: str) -> None:
    """Including drift with ideal corrections, gradients, and the evaluation of every client."""
    settings = {"drift": "ideal", "metrics": ["f1"]}
    structured, reference = run(form, engine, **settings), run("tensor", engine, **settings)
    actual, expected = structured.run(), reference.run()
    assert structured.engine.how == engine
    torch.testing.assert_close(actual.models, expected.models, rtol=1e-12, atol=1e-12)
    for one, other in zip(actual.history, expected.history, strict=True):
        assert one.metrics == pytest.approx(other.metrics) and set(one.metrics) == {"loss", "accuracy", "f1"}
        assert one.nodes["1/1"] == pytest.approx(other.nodes["1/1"])
        assert one.drift["2"] == pytest.approx(other.drift["2"], rel=1e-6)


@pytest.mark.parametrize("form", STRUCTURED)
@pytest.mark.parametrize("engine", ["loop", "vmap", "stacked"])
def test_a_user_s_loss_gets_the_complete_output(form: str, engine: str) -> None:
    """The loss fails for anything else."""

    def hidden_of(outputs: Any) -> Tensor:
        if isinstance(outputs, dict) and "hidden_states" in outputs:
            return outputs["hidden_states"][0]
        if isinstance(outputs, dict):
            return outputs["hidden"]
        return outputs[1] if type(outputs) is tuple else outputs.hidden

    def loss(outputs: Any, targets: Tensor) -> Tensor:
        logits = losses.require_scores(outputs)
        weights = torch.tensor([1.0, 2.0, 3.0], dtype=logits.dtype)
        return F.cross_entropy(logits, targets, weights) + 0.1 * hidden_of(outputs).square().mean()

    sim, loop = run(form, engine, loss=loss), run(form, "loop", loss=loss)
    assert sim.engine.how == engine
    result, expected = sim.run(), loop.run()
    torch.testing.assert_close(result.models, expected.models, rtol=1e-12, atol=1e-12)
    value = loss(result.module(X), Y).detach()
    assert result.history[-1].metrics["loss"] == pytest.approx(float(value))
    assert result.history[-1].metrics["accuracy"] == pytest.approx(
        float((losses.require_scores(result.module(X)).argmax(dim=1) == Y).double().mean())
    )


@pytest.mark.parametrize("form", STRUCTURED)
def test_a_user_s_loss_is_evaluated_on_all_samples_at_once(form: str) -> None:
    """The mean over chunks differs if a loss is not a mean over samples."""

    def loss(outputs: Any, targets: Tensor) -> Tensor:
        assert type(outputs) is type(FORMS[form](X[:1], X[:1]))
        return losses.require_scores(outputs).sum().square() / len(targets)

    def predict(x: Tensor) -> Any:
        return FORMS[form](x, x[:, :3])

    expected = float(loss(predict(X), Y))
    assert evaluated(predict, loss, X, Y, chunk=7)["loss"] == pytest.approx(expected)


def test_outputs_without_one_entry_per_sample_are_split() -> None:
    def predict(x: Tensor) -> Any:
        return {"logits": x[:, :3], "temperature": torch.ones(())}

    def loss(outputs: Any, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs["logits"] * outputs["temperature"], targets)

    metrics = evaluated(predict, loss, X, Y, chunk=15)
    assert metrics["loss"] == pytest.approx(float(F.cross_entropy(X[:, :3], Y)))


@pytest.mark.parametrize("loss", [None, F.cross_entropy, nn.CrossEntropyLoss(), "cross_entropy"])
def test_pytorch_s_own_losses_take_the_scores(loss: Any) -> None:
    actual, expected = (sim.run().history for sim in (run("table", "loop", loss=loss), run("tensor", "loop")))
    assert [record.metrics for record in actual] == [record.metrics for record in expected]


class Wordy(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        return {"out": super().forward(x)}


def test_an_output_without_scores_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"'dict of out': must be a tensor of scores.*'logits'.*loss of your own"):
        simulate(lambda: Wordy(6, 3).double(), (X, Y), PARTS, "2x2", periods=[1, 1], rounds=1, test=(X, Y))

    def loss(outputs: Any, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs["out"], targets)

    sim = simulate(
        lambda: Wordy(6, 3).double(), (X, Y), PARTS, "2x2", periods=[1, 1], rounds=1, test=(X, Y), loss=loss,
        metrics={"largest": lambda outputs, targets: outputs["out"].abs().max()},
    )  # fmt: skip
    assert set(sim.run().history[0].metrics) == {"loss", "largest"}
    with pytest.raises(InvalidInput, match=r"metrics\.f1 = 'dict of out': needs scores"):
        simulate(
            lambda: Wordy(6, 3).double(), (X, Y), PARTS, "2x2", periods=[1, 1], rounds=1, test=(X, Y), loss=loss,
            metrics=["f1"],
        )  # fmt: skip
