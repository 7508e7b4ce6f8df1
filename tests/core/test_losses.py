"""Losses by name, by import path, and as functions, from Python and from a config."""

from __future__ import annotations

import functools
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from stratafl import InvalidInput, Simulation
from stratafl.core.losses import LOSSES, ignore_index, is_additive, parse_loss, unwrap_loss
from stratafl.experiment.experiment import Experiment
from stratafl.simulation.build import build
from tests.flat import simulate

random = torch.Generator().manual_seed(1)
VALUES, TARGETS = torch.randn(7, generator=random), torch.randn(7, generator=random)
SCORES, LABELS = torch.randn(7, 3, generator=random), torch.randint(3, (7,), generator=random)
BY_NAME = [
    ("cross_entropy", SCORES, LABELS, F.cross_entropy(SCORES, LABELS)),
    (
        {"name": "cross_entropy", "label_smoothing": 0.2},
        SCORES,
        LABELS,
        F.cross_entropy(SCORES, LABELS, label_smoothing=0.2),
    ),
    ("nll", SCORES.log_softmax(1), LABELS, F.cross_entropy(SCORES, LABELS)),
    ("mse", VALUES, TARGETS, F.mse_loss(VALUES, TARGETS)),
    ("l1", VALUES, TARGETS, F.l1_loss(VALUES, TARGETS)),
    ("huber", VALUES, TARGETS, F.huber_loss(VALUES, TARGETS)),
    ({"name": "huber", "delta": 0.3}, VALUES, TARGETS, F.huber_loss(VALUES, TARGETS, delta=0.3)),
    ({"name": "smooth_l1", "beta": 0.3}, VALUES, TARGETS, F.smooth_l1_loss(VALUES, TARGETS, beta=0.3)),
    ("poisson_nll", VALUES, TARGETS.abs(), F.poisson_nll_loss(VALUES, TARGETS.abs())),
    ("bce_with_logits", VALUES, LABELS, F.binary_cross_entropy_with_logits(VALUES, LABELS.float())),
    (
        {"name": "bce_with_logits", "pos_weight": 3},
        VALUES,
        LABELS.clamp(max=1),
        F.binary_cross_entropy_with_logits(VALUES, LABELS.clamp(max=1).float(), pos_weight=torch.tensor(3.0)),
    ),
]


@pytest.mark.parametrize(("loss", "outputs", "targets", "expected"), BY_NAME, ids=[str(case[0]) for case in BY_NAME])
def test_by_name(loss: Any, outputs: torch.Tensor, targets: torch.Tensor, expected: torch.Tensor) -> None:
    assert parse_loss(loss)(outputs, targets) == expected
    assert parse_loss(loss)({"logits": outputs}, targets) == expected
    assert {name if isinstance(name, str) else name["name"] for name, *_ in BY_NAME} == set(LOSSES)


PYTORCHS = [F.mse_loss, nn.MSELoss(), nn.L1Loss(), functools.partial(F.huber_loss, delta=0.3), nn.SmoothL1Loss()]
PYTORCHS += [nn.PoissonNLLLoss(), "torch.nn:MSELoss"]


def named(loss: Any) -> str:
    """Name of a case, without an address, which differs between processes."""
    loss = getattr(loss, "func", loss)
    return getattr(loss, "__name__", str(loss))


@pytest.mark.parametrize("name", ["mse", "l1", "huber", "bce_with_logits", *PYTORCHS], ids=named)
def test_a_column_of_values_is_not_broadcast_to_the_targets(name: Any) -> None:
    """PyTorch would broadcast (7, 1) and (7,) to 49 pairs."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert parse_loss(name)(VALUES[:, None], TARGETS) == parse_loss(name)(VALUES, TARGETS)
    with pytest.raises(ValueError, match="one shape"):
        parse_loss(name)(SCORES, TARGETS)


def test_properties_of_losses() -> None:
    assert (
        is_additive(parse_loss(None))
        and is_additive(parse_loss("cross_entropy"))
        and is_additive(parse_loss(F.cross_entropy))
    )
    assert not is_additive(parse_loss("mse")) and unwrap_loss(parse_loss(F.mse_loss)) is F.mse_loss
    smooth = functools.partial(F.cross_entropy, ignore_index=-1)
    assert (ignore_index(parse_loss(smooth)), ignore_index(parse_loss({"name": "nll", "ignore_index": 2}))) == (-1, 2)

    def own(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
        return outputs.sum()

    assert parse_loss(own) is own


WRONG = [
    ("mean_squared", r"loss = 'mean_squared': unknown; .*mse"),
    ({"name": "mse", "delta": 1}, r"loss key = 'delta': unknown"),
    ({"delta": 1}, "must be a name, or a table with a name"),
    (3, "must be a name, a table with one, or a function"),
    ("nowhere.py:loss", "no such Python file"),
    ("os:remove", "is a part of Python itself"),
    ("stratafl.nonesuch:loss", "cannot be imported"),
]


@pytest.mark.parametrize(("loss", "message"), WRONG, ids=[str(case[0]) for case in WRONG])
def test_a_wrong_loss_is_refused_before_the_first_round(loss: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        parse_loss(loss)


FILE = """
import torch
from torch import nn

def power(outputs, targets, exponent=2.0):
    return (outputs.squeeze(-1) - targets).abs().pow(exponent).mean()

class Power(nn.Module):
    def __init__(self, exponent):
        super().__init__()
        self.exponent = exponent

    def forward(self, outputs, targets):
        return power(outputs, targets, self.exponent)

notaloss = 3
"""


def test_by_import_path(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    expected = (VALUES - TARGETS).abs().pow(3).mean()
    assert parse_loss({"name": f"{path}:power", "exponent": 3})(VALUES[:, None], TARGETS) == expected
    assert parse_loss({"name": f"{path}:Power", "exponent": 3})(VALUES[:, None], TARGETS) == expected
    assert parse_loss("torch.nn.functional:mse_loss")({"logits": VALUES}, TARGETS) == F.mse_loss(VALUES, TARGETS)
    for loss, message in (
        (f"{path}:powr", "did you mean 'power'"),
        (f"{path}:notaloss", "must be something to call, and is int"),
        ({"name": f"{path}:power", "exponents": 3}, "unexpected keyword argument 'exponents'"),
    ):
        with pytest.raises(InvalidInput, match=re.escape(message)):
            parse_loss(loss)


def regression(engine: str = "loop", **settings: Any) -> Simulation:
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(2))
    y = x @ torch.tensor([1.0, -2.0, 0.5])
    parts = [range(10 * client, 10 * client + 10) for client in range(4)]
    options = {"periods": [1, 5], "rounds": 30, "leaf": 0.1, "test": (x, y), "loss": "mse", **settings}
    return simulate(lambda: nn.Linear(3, 1), (x, y), parts, "2x2", "mtgc", engine=engine, **options)


@pytest.mark.parametrize("loss", ["mse", nn.MSELoss(), F.mse_loss], ids=["name", "module", "function"])
@pytest.mark.parametrize("engine", ["vmap", "stacked"])
def test_engines_agree_on_a_loss_of_values(engine: str, loss: Any) -> None:
    fast, slow = regression(engine, rounds=2, loss=loss), regression(rounds=2)
    assert fast.engine.how == engine
    torch.testing.assert_close(fast.run().models, slow.run().models)


CONFIG = {
    "tree": {"shape": "2x2"},
    "data": {"source": "synthetic", "arguments": {"samples": 20, "features": 5, "classes": 3}},
    "model": {"name": "logistic"},
    "schedule": {"periods": [1, 2]},
    "rounds": 1,
}


def test_a_config_names_its_loss(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "import torch.nn.functional as F\n\n\n"
        "def smooth(o, t, by):\n    return F.cross_entropy(o, t, label_smoothing=by)\n"
    )

    def models(loss: Any) -> list[torch.Tensor]:
        return build(Experiment.from_table({**CONFIG, "loss": loss})).run().models

    own = models({"name": f"{path}:smooth", "by": 0.3})
    torch.testing.assert_close(own, models({"name": "cross_entropy", "label_smoothing": 0.3}), rtol=0, atol=0)
    assert not torch.equal(own[0], models("cross_entropy")[0])
    with pytest.raises(InvalidInput, match="experiment key = 'los': unknown; did you mean 'loss'"):
        Experiment.from_table({"los": "mse"})
