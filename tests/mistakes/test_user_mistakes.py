"""Mistakes in a user's own code: one line that says which function did what, then the user's own
lines."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stratafl import InvalidInput, Rule, UserCodeError, average, leaf, simulate
from stratafl.base.files import read_json
from stratafl.cli.main import main
from stratafl.config.schema import Config
from stratafl.core.leaf import Leaf, constant, corrections
from stratafl.core.rule import Edge
from stratafl.ranks.collectives import Ranks
from stratafl.rules.guard import SIGNATURES, Called, guarded_rule
from stratafl.rules.registry import entries
from stratafl.rules.trial import try_rule
from stratafl.runs.sweep.worker import Answers, work
from tests.deploy.trees import Deployed, simulation

INPUTS, TARGETS = torch.linspace(-1, 1, 64).reshape(16, 4), torch.arange(16) % 2


def run(rule: Rule | str = "hfedavg", model: Callable[[], nn.Module] | None = None, **more: Any):
    """A small run, ready to iterate."""
    depth = more.pop("depth", 2)
    return simulate(
        model or (lambda: nn.Linear(4, 2)),
        more.pop("data", (INPUTS, TARGETS)),
        [np.arange(k * 4, k * 4 + 4) for k in range(4)],
        {1: 4, 2: "2x2", 3: [[1, 1], [1, 1]]}[depth],
        [average()] * (depth - 1) + [rule] if isinstance(rule, Rule) else rule,
        periods=[2] * depth,
        rounds=3,
        batch=2,
        **{"test": (INPUTS, TARGETS), **more},
    )


def complaint_of(call: Callable[[], object]) -> UserCodeError:
    with pytest.raises(UserCodeError) as caught:
        call()
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, InvalidInput), "whoever catches complaints catches these"
    return caught.value


# -- rules, before round 1 -------------------------------------------------------------------------

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
    "hidden state": (average(), {"merge": counting}, "merge gives something else when it is called again"),
    "random numbers": (average(), {"merge": lambda m, s, mean, share: (m, mean["model"] + torch.randn(s.shape))},
        "merge gives something else when it is called again"),
    "not finite": (average(), {"merge": lambda memory, start, mean, share: (memory, mean["model"] / (share - share))},
        "merge gives numbers that are not finite for such as are"),
    "the mean over nodes": (average(), {"merge": lambda m, s, mean, share: (m, mean["model"].mean(0).expand_as(s))},
        "merge gives a node something else when it is called with its row alone"),
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
    assert any(isinstance(each, Called) for each in mine.federation.rules[-1])
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
    watched = made._replace(**{name: Called(entry.name, name, each) for name, each in functions.items() if each})
    try_rule(watched, torch.linspace(-2, 2, 12))
    try_rule(watched, torch.linspace(-2, 2, 12, dtype=torch.float64), relays=False)


def test_the_packages_own_functions_are_called_as_they_are() -> None:
    own = [entry for entry in entries() if entry.make.__module__.startswith("stratafl.")]
    assert len(own) > 8 and not any(isinstance(each, Called) for entry in own for each in entry.rule())
    once = guarded_rule("a", STATEFUL)
    assert isinstance(once.init, Called) and not isinstance(once.merge, Called)
    assert {*SIGNATURES, "measures"} == set(Rule._fields)


# -- models, losses, transforms and the like, in any round -----------------------------------------


class Fails(nn.Module):
    """Raises in some call."""

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
    """A function that fails from some call on."""

    def __init__(self, function: Callable, after: int):
        self.function, self.after, self.calls = function, after, 0

    def __call__(self, *given: Any) -> Any:
        self.calls += 1
        if self.calls > self.after:
            raise RuntimeError("not now")
        return self.function(*given)


def warming(round: int) -> float:
    return [0.1][round]


def biased(draw: Any) -> np.ndarray:
    if draw.round:
        raise LookupError("nobody")
    return np.ones(4, dtype=bool)


def stage(direction: Tensor, x: Tensor, correct: Callable) -> Tensor:
    return direction.reshape(3, 7)


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
    "learning rate": (lambda: run(leaf=leaf(warming)),
        "learning rate warming raised IndexError: list index out of range, in round 2"),
    "participation": (lambda: run(participation=biased), "participation = 'biased': failed: LookupError: nobody"),
    "stage": (lambda: run(leaf=Leaf(constant(0.1), (corrections, Later(lambda direction, *more: direction, 20)))),
        "stage Later.__call__ raised RuntimeError: not now, in round"),
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
        "data = 'Numbers': cannot be read: KeyError: 'x'"),
    "a model that cannot be made": (lambda: run(model=lambda: Fails()),
        "model = '<lambda>': cannot be made: TypeError"),
    "a first forward": (lambda: run(model=lambda: Fails(ValueError("no"), 0)),
        "model = 'Fails': cannot take data inputs"),
    "a first loss": (lambda: run(loss=Later(F.cross_entropy, 0)), "loss = "),
    "a first augment": (lambda: run(augment=Later(F.cross_entropy, 0)), "augment = "),
    "a first stage": (lambda: run(leaf=Leaf(constant(0.1), (corrections, stage))), "leaf.stages = 'stage': fails on"),
    "a first learning rate": (lambda: run(leaf=leaf(lambda round: 1 / 0)), "leaf.lr = '<lambda>': failed"),
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


# -- the command line ------------------------------------------------------------------------------

CONFIG = """
[tree]
shape = "2x2"
[model]
name = "{model}"
[method]
name = "{method}"
[schedule]
periods = [2, 2]
[run]
rounds = 3
plugins = {plugins}
"""
MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, input_shape, classes):
        super().__init__()
        self.layer, self.calls = nn.Linear(64, classes), 0

    def forward(self, x):
        self.calls += 1
        if self.calls > {after}:
            raise ValueError("no more")
        return self.layer(x.flatten(1))
"""
RULE = """
from stratafl import average, register

@register("mine")
def mine():
    "A rule of my own."
    def merge(memory, start, mean, share):
        return memory, [1, 2, 3]
    return average()._replace(merge=merge)
"""
FILES: dict[str, tuple[dict[str, str], dict[str, str], list[str]]] = {
    "a rule": ({"mine.py": RULE}, {"method": "mine", "plugins": '["mine.py"]'}, [
        "error: rule 'mine': merge returned a list of 3 as the model, "
        "must be a tensor of shape (2, 650) like mean['model']",
        "  {here}/mine.py, line 7, in merge", "    def merge(memory, start, mean, share):"]),
    "a syntax error": ({"mine.py": "def (:\n"}, {"plugins": '["mine.py"]'}, [
        "error: run.plugins = '{here}/mine.py': cannot be imported: SyntaxError: invalid syntax (mine.py, line 1)",
        "  {here}/mine.py, line 1, in <module>", "    def (:"]),
    "a failing import": ({"mine.py": "1 / 0\n"}, {"plugins": '["mine.py"]'}, [
        "error: run.plugins = '{here}/mine.py': cannot be imported: ZeroDivisionError: division by zero",
        "  {here}/mine.py, line 1, in <module>", "    1 / 0"]),
    "a model at set-up": ({"net.py": MODEL.format(after=0)}, {"model": "net.py:Net"}, [
        "error: model = 'Net': cannot take data inputs of shape (1, 8, 8): ValueError: no more",
        "  {here}/net.py, line 13, in forward", '    raise ValueError("no more")']),
}  # fmt: skip


def told_by(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[int, list[str]]:
    monkeypatch.setattr(sys, "argv", ["stratafl", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0), capsys.readouterr().err.splitlines()


def written(folder: Path, files: dict[str, str], **changes: str) -> Path:
    for name, text in files.items():
        (folder / name).write_text(text)
    values = {"model": "logistic", "method": "hfedavg", "plugins": "[]", **changes}
    (folder / "c.toml").write_text(CONFIG.format(**values))
    return folder / "c.toml"


@pytest.mark.parametrize(("files", "changes", "lines"), FILES.values(), ids=FILES.keys())
def test_the_command_line_shows_the_line_and_the_users_frames(
    files: dict, changes: dict, lines: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    path = written(tmp_path, files, **changes)
    code, said = told_by(capsys, monkeypatch, "run", path.name)
    assert code == 4
    here = Path(tmp_path).resolve()
    assert said == [each.replace("{here}", str(here)) for each in lines]


def test_a_run_folder_has_the_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path, {"net.py": MODEL.format(after=30)}, model="net.py:Net")
    code, said = told_by(capsys, monkeypatch, "run", "c.toml", "--quiet")
    assert code == 4
    line = "model 'Net': Net.forward raised ValueError: no more, in round 2"
    assert said[0] == f"error: {line}"
    assert len(said) == 3
    (folder,) = (tmp_path / "runs").iterdir()
    status = read_json(folder / "status.json")
    assert (status["status"], status["reason"]) == ("failed", line)


def test_a_run_of_a_sweep_tells_the_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = written(tmp_path, {"net.py": MODEL.format(after=30)}, model="net.py:Net")
    said = io.StringIO()
    task = {"name": "a", "config": Config.load(path).as_dict(), "folder": "runs", "resume": None}
    work(task, Answers(said))
    *_, ended = map(json.loads, said.getvalue().splitlines())
    assert (ended["status"], ended["reason"]) == (
        "failed",
        "model 'Net': Net.forward raised ValueError: no more, in round 2",
    )


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


class Both(Ranks):
    """Two ranks, of which the other one says what it is to say."""

    def __init__(self, other: Callable[[Any], Any]):
        super().__init__(0, 2)
        self.other = other

    def all(self, value: Any) -> list[Any]:
        return [value, self.other(value)]


def test_what_one_rank_complains_of_is_a_complaint_of_all() -> None:
    mine = Called("rule 'mine'", "merge", lambda *given: None).complaint("returned None")

    def fail(ranks: Ranks) -> None:
        with ranks.together():
            raise mine

    def follow(ranks: Ranks) -> None:
        with ranks.together():
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


def test_a_rank_leaves_its_last_word() -> None:
    store = torch.distributed.HashStore()
    first, second = Ranks(0, 2, store=store), Ranks(1, 2, store=store)
    assert first.last_word() == ""
    second.leave_word("model 'Net': Net.forward raised ValueError: no")
    assert first.last_word() == "model 'Net': Net.forward raised ValueError: no"
    assert Ranks().last_word() == ""
