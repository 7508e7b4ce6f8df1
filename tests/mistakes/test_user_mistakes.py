"""Errors in user models, losses and the like: one line that names the function.

The user's frames follow it. This holds in any round, in a deployed tree and on several ranks.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stratafl import InvalidInput, Rule, UserCodeError, average
from stratafl.core.client_update import corrections
from stratafl.distributed.communicator import Communicator
from stratafl.rules.checks import UserFunction
from tests.deploy.trees import Deployed, simulation
from tests.flat import client_options
from tests.mistakes.own_code import INPUTS, TARGETS, complaint_of, run

# -- models, losses, transforms and the like, in any round -----------------------------------------


class Fails(nn.Module):
    """Raises in a chosen call."""

    def __init__(self, problem: Exception, after: int = 40, classes: int = 2):
        super().__init__()
        self.layer, self.calls, self.after = nn.Linear(4, classes), 0, after
        self.problem = lambda: problem  # itself, also in a copy of the module

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls > self.after:
            raise self.problem()
        return self.layer(x)


class Later:
    """A function that raises from a chosen call on."""

    def __init__(self, function: Callable, after: int):
        self.function, self.after, self.calls = function, after, 0

    def __call__(self, *given: Any) -> Any:
        self.calls += 1
        if self.calls > self.after:
            raise RuntimeError("not now")
        return self.function(*given)


ODD = {
    "nothing": (lambda outputs, each: None, "gave NoneType"),
    "without a gradient": (lambda outputs, each: torch.zeros(()), "gave a number without a gradient"),
    "each sample's": (lambda outputs, each: each, r"gave a tensor of shape \(2,\)"),
}


@pytest.mark.parametrize("engine", ["loop", "stacked"])
@pytest.mark.parametrize("name", ODD)
def test_a_loss_that_gives_something_else_for_some_samples(name: str, engine: str) -> None:
    wrong, told = ODD[name]

    def loss(outputs: Tensor, targets: Tensor) -> Any:
        each = F.cross_entropy(outputs, targets % 2, reduction="none")
        return wrong(outputs, each) if (targets == 7).any() else each.mean()

    labels = torch.where(torch.arange(16) == 14, 7, TARGETS)  # not among the few that it is tried on
    problem = complaint_of(lambda: run(loss=loss, engine=engine, data=(INPUTS, labels), test=None).run())
    assert re.search(rf"loss = 'loss': {told}.* one number with a gradient for all", str(problem))
    assert problem.frames[0].function == "loss" and problem.frames[0].file == __file__


def warming(round: int) -> float:
    return [0.1][round]


def biased(draw: Any) -> np.ndarray:
    if draw.round:
        raise LookupError("nobody")
    return np.ones(4, dtype=bool)


def stage(direction: Tensor, x: Tensor, correct: Callable) -> Tensor:
    return direction.reshape(3, 7)


def transforms(stage: Callable) -> dict[str, Any]:
    """Options of clients with a transform of the user's."""
    return client_options(gradient_transforms=[corrections, stage])


def late_rule() -> Rule:
    calls: list[int] = []

    def merge(memory: dict, start: Tensor, mean: dict, share: Tensor) -> tuple[dict, Any]:
        calls.append(1)
        return memory, mean["model"] if len(calls) < 12 else None

    return average()._replace(merge=merge)


LATER: dict[str, tuple[Callable[[], object], str]] = {
    "forward": (lambda: run(model=lambda: Fails(ValueError("too late"))),
        "model 'Fails': Fails.forward raised ValueError: too late, in round"),
    "forward ends an iteration": (lambda: run(model=lambda: Fails(StopIteration())),
        "model 'Fails': Fails.forward raised StopIteration, in round"),
    "forward of a part": (lambda: run(model=lambda: nn.Sequential(nn.Linear(4, 4), Fails(KeyError("a")))),
        "model 'Sequential': Fails.forward raised KeyError: 'a', in round"),
    "loss": (lambda: run(loss=Later(F.cross_entropy, 40)),
        "loss Later.__call__ raised RuntimeError: not now, in round"),
    "augment": (lambda: run(augment=Later(lambda inputs, *more: inputs, 20)),
        "augment Later.__call__ raised RuntimeError: not now, in round"),
    "learning rate": (lambda: run(leaf=client_options(warming)),
        "learning rate warming raised IndexError: list index out of range, in round 2"),
    "participation": (lambda: run(participation=biased),
        "schedule.participation = 'biased': failed: LookupError: nobody"),
    "transform": (lambda: run(leaf=transforms(Later(lambda direction, *more: direction, 20))),
        "transform Later.__call__ raised RuntimeError: not now, in round"),
    "rule": (lambda: run(late_rule()), "the rule of edge level 2: merge returned None as the model, must be a tensor"),
}  # fmt: skip


@pytest.mark.parametrize(("make", "told"), LATER.values(), ids=LATER.keys())
def test_a_mistake_in_a_later_round(make: Callable[[], Any], told: str) -> None:
    simulation = make()
    problem = complaint_of(simulation.run)
    assert str(problem).startswith(told)
    assert problem.frames
    assert all(frame.file == __file__ for frame in problem.frames), "no line of the package's or of torch's"
    if "returned" not in told:
        assert problem.__cause__ is not None, "what was raised"


@pytest.mark.parametrize("engine", ["loop", "stacked", "vmap"])
def test_every_engine_names_the_loss(engine: str) -> None:
    def heavy(outputs: Tensor, targets: Tensor) -> Tensor:
        if HEAVY:
            raise ArithmeticError("heavy")
        return F.cross_entropy(outputs, targets)

    HEAVY: list[int] = []
    simulation = run(loss=heavy, engine=engine)
    next(simulation)
    HEAVY.append(1)
    problem = complaint_of(simulation.run)
    assert "heavy raised ArithmeticError: heavy, in round 2" in str(problem)
    assert problem.frames[-1].source == 'raise ArithmeticError("heavy")'


class Numbers(torch.utils.data.Dataset):
    def __init__(self, item: Callable[[int], object]):
        self.item = item

    def __len__(self) -> int:
        return 16

    def __getitem__(self, number: int) -> object:
        return self.item(number)


SET_UP: dict[str, tuple[Callable[[], object], str]] = {
    "a data set": (lambda: run(data=Numbers(lambda number: {}["x"])),
        "data.source = 'Numbers': cannot be read: KeyError: 'x'"),
    "a model that cannot be made": (lambda: run(model=lambda: Fails()),
        "model = '<lambda>': cannot be made: TypeError"),
    "a first forward": (lambda: run(model=lambda: Fails(ValueError("no"), 0)),
        "model = 'Fails': cannot take data.source inputs"),
    "a first loss": (lambda: run(loss=Later(F.cross_entropy, 0)), "loss = "),
    "a first augment": (lambda: run(augment=Later(F.cross_entropy, 0)), "data.augment = "),
    "a first stage": (lambda: run(leaf=transforms(stage)), "client.gradient_transforms = 'stage': fails on"),
    "a first learning rate": (lambda: run(leaf=client_options(lambda round: 1 / 0)),
        "client.lr_schedule = '<lambda>': failed"),
}  # fmt: skip


@pytest.mark.parametrize(("call", "told"), SET_UP.values(), ids=SET_UP.keys())
def test_a_mistake_at_set_up(call: Callable[[], object], told: str) -> None:
    problem = complaint_of(call)
    assert str(problem).startswith(told)
    assert problem.frames
    assert {frame.file for frame in problem.frames} == {__file__}


@pytest.mark.parametrize(
    "problem", [KeyError("a"), OSError(2, "b"), AttributeError("c"), UnicodeDecodeError("utf-8", b"d", 0, 1, "e")]
)
def test_whoever_catches_what_was_raised_still_does(problem: Exception) -> None:
    caught = complaint_of(run(model=lambda: Fails(problem)).run)
    assert isinstance(caught, type(problem)) or isinstance(problem, UnicodeDecodeError), "which takes five arguments"
    assert str(caught).startswith(f"model 'Fails': Fails.forward raised {type(problem).__name__}")
    assert caught.__cause__ is problem


def test_a_kind_that_is_made_in_a_way_of_its_own() -> None:
    class Odd(Exception):
        def __new__(cls, *, secret: int) -> Odd:
            return super().__new__(cls)

        def __init__(self, *, secret: int):
            super().__init__(f"secret {secret}")

    problem = complaint_of(run(model=lambda: Fails(Odd(secret=3))).run)
    assert "raised Odd: secret 3" in str(problem)


def test_what_is_nobodys_mistake_stays_what_it_is() -> None:
    with pytest.raises(MemoryError, match="full"):
        run(model=lambda: Fails(MemoryError("full"))).run()
    with pytest.raises(InvalidInput) as caught:
        run(model=lambda: nn.Linear(5, 2))
    assert not isinstance(caught.value, UserCodeError), "nothing of the user's was called but torch's"


# -- a deployed tree, and several ranks ------------------------------------------------------------


def test_a_deployed_leaf_tells_the_line() -> None:
    tree = Deployed(simulation("hfedavg", 1, model=lambda: Fails(ValueError("too late"), 15, 3)))
    problem = complaint_of(tree.run)
    assert str(problem).startswith("model 'Fails': Fails.forward raised ValueError: too late, in round")
    assert {frame.file for frame in problem.frames} == {__file__}


def test_a_deployed_parent_tells_the_line(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[int] = []

    def merge(memory: dict, start: Tensor, mean: dict, share: Tensor) -> tuple[dict, Any]:
        calls.append(1)
        return memory, mean["model"] if len(calls) < 8 else mean

    sim = simulation([average()._replace(merge=merge)], 1)
    Deployed(sim).run()
    told = "cannot be merged: the rule of edge level 1: merge returned a dict of 'model' as the model"
    assert told in caplog.text


class Both(Communicator):
    """Two ranks, of which the other one sends given values."""

    def __init__(self, other: Callable[[Any], Any]):
        super().__init__(0, 2)
        self.other = other

    def all_gather(self, value: Any) -> list[Any]:
        return [value, self.other(value)]


def test_what_one_rank_complains_of_is_a_complaint_of_all() -> None:
    mine = UserFunction("rule 'mine'", "merge", lambda *given: None).error("returned None")

    def fail(ranks: Communicator) -> None:
        with ranks.raise_together():
            raise mine

    def follow(ranks: Communicator) -> None:
        with ranks.raise_together():
            pass

    assert complaint_of(lambda: fail(Both(lambda value: value))) is mine
    sent: list[Any] = []
    complaint_of(lambda: fail(Both(sent.append)))
    heard = complaint_of(lambda: follow(Both(lambda value: ["rule 'mine'", "x", "rule 'mine': merge returned None"])))
    assert str(heard) == "rule 'mine': merge returned None (on rank 1)"
    with pytest.raises(InvalidInput) as other:
        follow(Both(lambda value: ["lr", "must be above 0", False]))
    assert str(other.value) == "lr = 'on rank 1': must be above 0"
    assert not isinstance(other.value, UserCodeError)


def test_rank_records_why_it_failed() -> None:
    store = torch.distributed.HashStore()
    first, second = Communicator(0, 2, store=store), Communicator(1, 2, store=store)
    assert first.failure_reason() == ""
    second.record_failure("model 'Net': Net.forward raised ValueError: no")
    assert first.failure_reason() == "model 'Net': Net.forward raised ValueError: no"
    assert Communicator().failure_reason() == ""
