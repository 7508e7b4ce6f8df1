"""Modules, data and losses with habits of their own: each run is held against plain PyTorch, or
says what is wrong."""

from __future__ import annotations

import copy
import functools
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from stratafl import InvalidInput, simulate
from stratafl.core.measure.metrics import evaluate
from stratafl.data.sampling import batches

ENGINES = ["loop", "vmap", "stacked"]
PARTS = [list(range(0, 7)), list(range(7, 15)), list(range(15, 24))]


def data(features: int = 4) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(1)
    return torch.randn(24, features, generator=random, dtype=torch.float64), torch.arange(24) % 3


def plain_rounds(
    module: nn.Module, pair: tuple[Tensor, Tensor], rounds: int, steps: int, batch: int, loss=F.cross_entropy
):
    """Averaging of three clients, written out: everything in a state dict goes along."""
    module = copy.deepcopy(module).train()
    for round in range(rounds):
        trained = []
        for client, part in enumerate(PARTS):
            mine = copy.deepcopy(module)
            for chosen in batches(0, client, len(part), round * steps, steps, batch):
                numbers = torch.tensor(part)[chosen]
                mine.zero_grad()
                loss(mine(pair[0][numbers].clone()), pair[1][numbers]).backward()
                with torch.no_grad():
                    for parameter in mine.parameters():
                        if parameter.grad is not None:
                            parameter -= 0.1 * parameter.grad
            trained.append(mine.state_dict())
        mean = {
            name: sum(each[name] for each in trained) / 3 if value.is_floating_point() else value
            for name, value in trained[0].items()
        }
        module.load_state_dict(mean)
    return module


def run(module, pair, engine: str = "loop", rounds: int = 2, steps: int = 3, batch: int = 5, **more):
    return simulate(
        module, pair, PARTS, 3, "hfedavg", periods=[steps], rounds=rounds, batch=batch, engine=engine, **more
    )


def furthest(module: nn.Module, other: nn.Module) -> float:
    pairs = zip(module.state_dict().values(), other.state_dict().values(), strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs if a.is_floating_point())


class Changing(nn.Module):
    """Writes into what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.LeakyReLU(0.1, inplace=True)
        self.out = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x -= 1
        return self.out(self.first(x))


class Recomputed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.inner, self.middle, self.out = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = checkpoint(lambda h: self.middle(h).tanh(), self.inner(x), use_reentrant=self.reentrant)
        return self.out(h)


class Masked(nn.Module):
    """Looks at what comes before, as a language model does, by a mask of zeros and infinities."""

    def __init__(self) -> None:
        super().__init__()
        self.score, self.out = nn.Linear(1, 4), nn.Linear(4, 3)
        self.register_buffer("mask", torch.full((4, 4), -torch.inf).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.out((torch.softmax(self.score(x[..., None]) + self.mask, dim=-1) @ x[..., None])[..., 0])


def cumulative() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5, momentum=None), nn.Linear(5, 3))


def partly_evaluating() -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, 3))
    module[1].eval()
    module[2].eval()
    return module


MODULES = {
    "changes its input": Changing,
    "recomputed": lambda: Recomputed(reentrant=False),
    "recomputed, re-entrant": lambda: Recomputed(reentrant=True),
    "cumulative batch norm": cumulative,
}


def made(make) -> nn.Module:
    torch.manual_seed(0)
    return make().double()


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # the library's, in an evaluation
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", MODULES)
def test_rounds_are_those_of_plain_pytorch(name: str, engine: str) -> None:
    module, pair = made(MODULES[name]), data()
    before = [each.clone() for each in pair]
    result = run(module, pair, engine, test=pair).run()
    assert all(torch.equal(now, was) for now, was in zip(pair, before, strict=True))
    expected = plain_rounds(module, before, 2, 3, 5)
    assert furthest(result.module, expected) < 1e-12
    expected.eval()
    with torch.no_grad():
        loss = F.cross_entropy(expected(before[0].clone()), before[1])
    assert result.history[-1].metrics["loss"] == pytest.approx(float(loss), abs=1e-12)


def test_data_that_shares_memory_with_the_user_s_arrays_stays_as_it_is() -> None:
    inputs, targets = (each.numpy().copy() for each in data())
    before = inputs.copy(), targets.copy()

    def greedy(outputs: Tensor, targets: Tensor) -> Tensor:
        value = F.cross_entropy(outputs.clone(), targets.clone())
        outputs.zero_()
        targets.fill_(0)
        return value

    losses = [r.metrics["loss"] for r in run(made(Changing), (inputs, targets), test=(inputs, targets), loss=greedy)]
    assert (inputs == before[0]).all() and (targets == before[1]).all()
    right = [r.metrics for r in run(made(Changing), before, test=before)]
    assert losses == pytest.approx([each["loss"] for each in right], abs=1e-12)


@pytest.mark.parametrize("engine", ENGINES)
def test_parts_given_in_evaluation_mode_stay_in_it(engine: str) -> None:
    module, pair = made(partly_evaluating), data()
    result = run(module, pair, engine).run()
    for part in (module[1], module[2]):
        part.train = lambda mode=True, part=part: part  # in the plain loop, too
    assert furthest(result.module, plain_rounds(module, pair, 2, 3, 5)) < 1e-12
    assert torch.equal(result.module[1].running_mean, module[1].running_mean)


def test_a_module_handed_out_in_evaluation_mode_is_trained() -> None:
    module = made(lambda: nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))).eval()
    assert not torch.equal(run(module, data()).run().module[1].running_mean, module[1].running_mean)
    assert not module.training


@pytest.mark.parametrize("engine", ENGINES)
def test_the_older_weight_norm(engine: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        module = made(lambda: nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 5)), nn.Tanh(), nn.Linear(5, 3)))
    newer = made(
        lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 5)), nn.Tanh(), nn.Linear(5, 3))
    )
    result, expected = run(module, data(), engine, test=data()).run(), run(newer, data(), engine, test=data()).run()
    old, new = (result.module(data()[0]), expected.module(data()[0]))
    torch.testing.assert_close(old, new, rtol=0, atol=1e-12)


def test_what_cannot_be_copied_is_one_line() -> None:
    module = nn.Linear(4, 3)
    module.handle = (each for each in ())  # a generator
    with pytest.raises(InvalidInput, match="cannot be copied") as problem:
        run(module, data())
    assert "\n" not in str(problem.value)


# -- initial values --------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.again, self.out = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.again.weight = self.first.weight
        self.register_buffer("scale", torch.ones(4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.again(self.first(x).tanh() * self.scale))


def test_a_state_dict_of_a_tied_module_is_one_to_start_from() -> None:
    start, other = made(Tied), made(Tied)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.5)
    expected = run(other, data()).run()
    state = other.state_dict()
    assert {"first.weight", "again.weight"} <= set(state) and "scale" not in state
    under_one_name = {name: value for name, value in state.items() if name != "first.weight"}
    for initial in (state, under_one_name, {**state, "scale": torch.ones(4).double()}):
        assert torch.equal(run(start, data(), initial=initial).run().models[0], expected.models[0])
    with pytest.raises(InvalidInput, match=r"initial.again.weight.*same tensor as 'first.weight'"):
        run(start, data(), initial={**state, "again.weight": state["again.weight"] + 1})
    with pytest.raises(InvalidInput, match=r"lacks 'first\.weight'"):
        run(start, data(), initial={"out.weight": state["out.weight"]})


# -- codes and batches -----------------------------------------------------------------------------


class Codes(nn.Module):
    def __init__(self, vocabulary: int = 8, computed: bool = False) -> None:
        super().__init__()
        self.embed, self.out, self.computed = nn.Embedding(vocabulary, 3), nn.Linear(3, 3), computed

    def forward(self, codes: Tensor) -> Tensor:
        codes = codes * (9 - codes) if self.computed else codes
        return self.out(self.embed(codes.long()).mean(dim=1))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("wrong", [-1, 8, 1000])
def test_a_code_beyond_the_vocabulary_is_said_before_the_first_round(wrong: int, engine: str) -> None:
    codes = torch.randint(8, (24, 5), generator=torch.Generator().manual_seed(0))
    codes[20, 3] = wrong
    with pytest.raises(InvalidInput, match="beyond its embedding of 8 entries"):
        run(made(Codes), (codes, data()[1]), engine)


def test_a_model_may_bring_its_codes_into_the_vocabulary_itself() -> None:
    codes = torch.arange(24 * 5).reshape(24, 5)
    for way in (lambda codes: codes.clamp(max=7), lambda codes: codes % 8):
        model = made(Codes)
        model.register_forward_pre_hook(lambda _, given, way=way: (way(given[0]),))
        result, expected = (run(model, (each, data()[1]), test=(each, data()[1])).run() for each in (codes, way(codes)))
        assert torch.equal(result.models[0], expected.models[0])


@pytest.mark.parametrize("engine", ENGINES)
def test_a_code_computed_beyond_the_vocabulary_reads_nobody_s_entry(engine: str) -> None:
    """One that neither the smallest nor the largest of the inputs shows."""
    known = torch.tensor([0, 1, 8, 9])
    codes = known[torch.randint(4, (24, 5), generator=torch.Generator().manual_seed(0))]
    codes[20, 3] = 3
    simulation = run(made(lambda: Codes(10, computed=True)), (codes, data()[1]), engine)
    assert simulation.engine.name == engine
    with pytest.raises(IndexError, match="out of range"):
        simulation.run()


def normed() -> nn.Module:
    return made(lambda: nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)))


@pytest.mark.parametrize(("batch", "names"), [(3, "0"), (1, "0, 1, 2"), (7, "1")])
def test_a_batch_of_one_where_two_are_needed_is_said_before_the_first_round(batch: int, names: str) -> None:
    with pytest.raises(InvalidInput, match=f"leaves {names} a batch of one sample.*[0-9] would not") as problem:
        run(normed(), data(), batch=batch)
    assert "\n" not in str(problem.value)
    better = int(str(problem.value).split(" would not")[0].split("(")[-1])
    assert len(run(normed(), data(), batch=better, rounds=3).run().history) == 3
    run(made(lambda: nn.Linear(4, 3)), data(), batch=batch).run()


def test_training_that_fails_where_evaluation_does_not_is_one_line() -> None:
    class Fails(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                raise RuntimeError("not like this\nor that")
            return super().forward(x)

    with pytest.raises(InvalidInput, match="cannot be trained: RuntimeError: not like this") as problem:
        run(Fails(4, 3), tuple(each.float() if each.is_floating_point() else each for each in data()))
    assert "\n" not in str(problem.value)


# -- what is said ----------------------------------------------------------------------------------


class Drawing(nn.Linear):
    """Noise from a generator that is not torch's."""

    def __init__(self, draw) -> None:
        super().__init__(4, 3)
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (self.draw() if self.training else 1)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("draw", "said"),
    [
        (lambda: np.random.rand(), "NumPy's generator"),
        (functools.partial(np.random.default_rng(0).normal, 0, 10), "from the same weights"),
    ],
)
def test_what_cannot_be_repeated_is_said_once(draw, said: str, engine: str, capsys) -> None:
    state = np.random.get_state()[1].copy()
    simulation = run(made(lambda: Drawing(draw)), data(), engine, rounds=3)
    assert (np.random.get_state()[1] == state).all(), "set-up leaves the user's generator alone"
    simulation.run()
    assert capsys.readouterr().err.count(said) == 1
    assert sum(said in note for note in simulation.notes) == 1


def test_an_engine_that_cannot_be_had_is_said_once(capsys) -> None:
    module = made(lambda: nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 3)))
    simulation = run(module, data(), "vmap", precision="bf16")
    assert (simulation.engine.name, simulation.engine.precision) == ("loop", "fp32"), "float64 is no 16 bits"
    simulation.run()
    told = capsys.readouterr().err
    assert told.count("engine 'vmap' was asked for, and loop trains the clients: the module or loss draws") == 1
    assert "engine = 'stacked' gives each client draws of its own" in told
    assert told.count("precision 'bf16' is not honoured: loop computes in fp32") == 1
    assert len(told.strip().splitlines()) == 2
    for engine in (*ENGINES, "auto", None):
        run(made(lambda: nn.Linear(4, 3)), data(), engine).run()
    run(module, data(), "loop").run()
    assert not capsys.readouterr().err


# -- metrics ---------------------------------------------------------------------------------------


def test_a_loss_that_divides_by_weights_of_its_own_is_that_of_all_samples() -> None:
    random = torch.Generator().manual_seed(0)
    scores, labels = torch.randn(5000, 3, generator=random), torch.arange(5000).sort().values % 7 % 3
    weighted = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0, 20.0]))
    order = labels.argsort()  # parts that differ
    scores, labels = scores[order], labels[order]
    found = evaluate(lambda x: x, weighted, scores, labels)
    assert found["loss"] == pytest.approx(float(weighted(scores, labels)), rel=1e-6)


@pytest.mark.parametrize(
    ("loss", "ignored"),
    [
        (F.cross_entropy, -100),
        (nn.CrossEntropyLoss(ignore_index=2), 2),
        (functools.partial(F.cross_entropy, ignore_index=-1), -1),
    ],
)
def test_ignored_labels_are_neither_right_nor_wrong(loss, ignored: int) -> None:
    random = torch.Generator().manual_seed(0)
    scores, labels = torch.randn(3000, 3, generator=random), torch.randint(2, (3000,), generator=random)
    labels[::3] = ignored
    counted = labels != ignored
    found = evaluate(lambda x: x, loss, scores, labels, chunk=1000)
    assert found["accuracy"] == float((scores.argmax(1) == labels)[counted].double().mean())
    assert found["loss"] == pytest.approx(float(F.cross_entropy(scores[counted], labels[counted])), rel=1e-6)


@pytest.mark.parametrize("engine", ENGINES)
def test_labels_to_ignore_in_training(engine: str) -> None:
    inputs, labels = data()
    labels = labels.clone()
    labels[::4] = -100
    module = made(lambda: nn.Linear(4, 3))
    result = run(module, (inputs, labels), engine, test=(inputs, labels)).run()
    assert furthest(result.module, plain_rounds(module, (inputs, labels), 2, 3, 5)) < 1e-12
    assert result.history[-1].metrics["accuracy"] * 18 == pytest.approx(
        round(result.history[-1].metrics["accuracy"] * 18)
    )


def test_scores_that_are_no_numbers_have_no_accuracy() -> None:
    scores, labels = torch.randn(8, 3), torch.arange(8) % 3
    for wrong in (torch.nan, torch.inf):
        broken = scores.clone()
        broken[5, 1] = wrong
        assert np.isnan(evaluate(lambda x: x, F.cross_entropy, broken, labels)["accuracy"])
    ruled_out = scores.clone()
    ruled_out[labels != 1, 1] = -torch.inf
    assert np.isfinite(evaluate(lambda x: x, F.cross_entropy, ruled_out, labels)["accuracy"])


# -- what a trial alone would not show -------------------------------------------------------------


class Clamped(nn.Linear):
    """Bounds its weights behind autograd's back, where they do not come near the bound at first."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data.clamp_(-0.7, 0.7)
        return super().forward(x)


class Replaced(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = self.weight.data.clamp(-0.7, 0.7)
        return super().forward(x)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", [Clamped, Replaced])
def test_weights_bounded_in_the_forward_pass_stay_so(kind: type[nn.Linear], engine: str) -> None:
    module, (inputs, labels) = made(lambda: kind(4, 3)), data()
    pair = 30 * inputs, labels
    result = run(module, pair, engine).run()
    expected = plain_rounds(module, pair, 2, 3, 5)
    assert furthest(result.module, expected) < 1e-12
    assert furthest(result.module, plain_rounds(made(lambda: nn.Linear(4, 3)), pair, 2, 3, 5)) > 0.05


class Autocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.out(self.inner(x).relu()).float()


def test_a_precision_of_the_module_s_own_is_kept() -> None:
    torch.manual_seed(0)
    module, (inputs, labels) = Autocast(), data()
    pair = inputs.float(), labels
    assert run(module, pair, "stacked").engine.name != "stacked"
    assert furthest(run(module, pair).run().module, plain_rounds(module, pair, 2, 3, 5)) < 1e-6


class Closing(nn.Module):
    """Keeps a function that knows the module it was made in, which a copy's function knows, too."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(4, 5), nn.Linear(5, 3)
        self.first = lambda x: self.inner(x).relu()

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.first(x))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_function_that_calls_the_original_is_refused(engine: str) -> None:
    module = made(Closing)
    with pytest.raises(InvalidInput, match="calls the module it is a copy of"):
        run(module, data(), engine)
    assert all(parameter.grad is None for parameter in module.parameters())


def test_outputs_that_are_no_rows_of_samples_are_evaluated_too() -> None:
    inputs, labels = torch.randn(5000, 4), torch.randint(3, (5000,))

    def time_first(x: Tensor) -> Tensor:
        return x[None, :, :3].expand(2, -1, -1)

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs[-1], targets)

    right = float(F.cross_entropy(inputs[:, :3], labels))
    assert evaluate(time_first, loss, inputs, labels)["loss"] == pytest.approx(right, rel=1e-5)
    assert evaluate(lambda x: x.sum(), lambda o, t: o, inputs[:90], labels[:90])["loss"] == float(inputs[:90].sum())
    pairs = evaluate(lambda x: (x[:, :3], x), lambda o, t: F.cross_entropy(o[0], t), inputs, labels)
    accuracy = float((inputs[:, :3].argmax(dim=1) == labels).double().mean())
    assert pairs == {"loss": pytest.approx(right, rel=1e-5), "accuracy": accuracy}


class Teacher(nn.Module):
    """A frozen copy of a layer follows it, as in self-distillation."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(4, 3), nn.Linear(4, 3)
        self.teacher.load_state_dict(self.student.state_dict())
        self.teacher.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            for mine, theirs in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                mine.data.mul_(0.9).add_(theirs.data, alpha=0.1)
        return self.student(x) + 0.1 * self.teacher(x)


@pytest.mark.parametrize("engine", ENGINES)
def test_weights_that_move_but_are_not_trained_are_refused(engine: str) -> None:
    with pytest.raises(InvalidInput, match="parameters that are not trained, which clients share"):
        run(made(Teacher), data(), engine)


class Counting(nn.Module):
    """Writes to a buffer also when it is evaluated, and computes with it."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 3)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return self.out(x) * (1 + 0.1 * self.seen)


def test_an_evaluation_changes_nothing() -> None:
    results = [run(made(Counting), data(), evaluate_every=every, test=data(), rounds=4).run() for every in (1, 4)]
    assert torch.equal(results[0].models[0], results[1].models[0])
    assert torch.equal(results[0].buffers[0], results[1].buffers[0])


class Product(nn.Module):
    """A product with its own input, which is of another type where activations are held in 16
    bits."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.bmm(self.inner(x)[:, :, None], x[:, None, :]).sum(dim=1))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_precision_that_a_module_does_not_allow_is_no_traceback(precision: str) -> None:
    torch.manual_seed(0)
    inputs, labels = data()
    simulation = run(Product(), (inputs.float(), labels), "stacked", precision=precision)
    assert bool(simulation.run().models[0].isfinite().all())


def test_a_compiled_module_is_refused_as_such() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = torch.jit.script(nn.Linear(4, 3).double())
    with pytest.raises(InvalidInput, match=r"compiled by torch\.jit"):
        run(compiled, data())
