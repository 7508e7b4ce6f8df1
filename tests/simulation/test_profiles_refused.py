"""Modules and data that cannot be trained as they are: what is wrong is said, once, in one line."""

from __future__ import annotations

import functools
import warnings

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from stratafl import InvalidInput
from tests.simulation.module_profiles import ENGINES, data, made, run


def test_what_cannot_be_copied_is_one_line() -> None:
    module = nn.Linear(4, 3)
    module.handle = (item for item in ())  # a generator
    with pytest.raises(InvalidInput, match="cannot be copied") as problem:
        run(module, data())
    assert "\n" not in str(problem.value)


class Codes(nn.Module):
    def __init__(self, vocabulary: int = 8, computed: bool = False) -> None:
        super().__init__()
        self.embed, self.out, self.computed = nn.Embedding(vocabulary, 3), nn.Linear(3, 3), computed

    def forward(self, codes: Tensor) -> Tensor:
        codes = codes * (9 - codes) if self.computed else codes
        return self.out(self.embed(codes.long()).mean(dim=1))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("wrong", [-1, 8, 1000])
def test_codes_beyond_the_vocabulary_are_refused_before_the_run(wrong: int, engine: str) -> None:
    codes = torch.randint(8, (24, 5), generator=torch.Generator().manual_seed(0))
    codes[20, 3] = wrong
    with pytest.raises(InvalidInput, match="beyond its embedding of 8 entries"):
        run(made(Codes), (codes, data()[1]), engine)


def test_a_model_may_bring_its_codes_into_the_vocabulary_itself() -> None:
    codes = torch.arange(24 * 5).reshape(24, 5)
    for way in (lambda codes: codes.clamp(max=7), lambda codes: codes % 8):
        model = made(Codes)
        model.register_forward_pre_hook(lambda _, inputs, way=way: (way(inputs[0]),))
        result, expected = (
            run(model, (codes_in, data()[1]), test=(codes_in, data()[1])).run() for codes_in in (codes, way(codes))
        )
        assert torch.equal(result.models[0], expected.models[0])


@pytest.mark.parametrize("engine", ENGINES)
def test_a_computed_code_beyond_the_vocabulary_reads_nothing(engine: str) -> None:
    """A code that does not follow from the smallest and largest inputs."""
    vocabulary = torch.tensor([0, 1, 8, 9])
    codes = vocabulary[torch.randint(4, (24, 5), generator=torch.Generator().manual_seed(0))]
    codes[20, 3] = 3
    simulation = run(made(lambda: Codes(10, computed=True)), (codes, data()[1]), engine)
    assert simulation.engine.name == engine
    with pytest.raises(IndexError, match="out of range"):
        simulation.run()


def normed() -> nn.Module:
    return made(lambda: nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)))


@pytest.mark.parametrize(("batch", "names"), [(3, "0"), (1, "0, 1, 2"), (7, "1")])
def test_a_batch_of_one_for_batch_norm_is_refused_before_the_run(batch: int, names: str) -> None:
    with pytest.raises(InvalidInput, match=f"leaves {names} a batch of one sample.*[0-9] would not") as problem:
        run(normed(), data(), batch=batch)
    assert "\n" not in str(problem.value)
    better = int(str(problem.value).split(" would not")[0].split("(")[-1])
    assert len(run(normed(), data(), batch=better, rounds=3).run().history) == 3
    run(made(lambda: nn.Linear(4, 3)), data(), batch=batch).run()


def test_a_failure_in_training_mode_alone_is_one_line() -> None:
    class Fails(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                raise RuntimeError("not like this\nor that")
            return super().forward(x)

    with pytest.raises(InvalidInput, match="cannot be trained: RuntimeError: not like this") as problem:
        run(Fails(4, 3), tuple(tensor.float() if tensor.is_floating_point() else tensor for tensor in data()))
    assert "\n" not in str(problem.value)


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
    output = capsys.readouterr().err
    assert output.count("engine 'vmap' was asked for, and loop trains the clients: the module or loss draws") == 1
    assert "engine = 'stacked' gives each client draws of its own" in output
    assert output.count("precision 'bf16' is not honoured: loop computes in fp32") == 1
    assert len(output.strip().splitlines()) == 2
    for engine in (*ENGINES, "auto", None):
        run(made(lambda: nn.Linear(4, 3)), data(), engine).run()
    run(module, data(), "loop").run()
    assert not capsys.readouterr().err


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


class Teacher(nn.Module):
    """A frozen copy of a layer follows it, as in self-distillation."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(4, 3), nn.Linear(4, 3)
        self.teacher.load_state_dict(self.student.state_dict())
        self.teacher.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            for average, parameter in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                average.data.mul_(0.9).add_(parameter.data, alpha=0.1)
        return self.student(x) + 0.1 * self.teacher(x)


@pytest.mark.parametrize("engine", ENGINES)
def test_weights_that_move_but_are_not_trained_are_refused(engine: str) -> None:
    with pytest.raises(InvalidInput, match="parameters that are not trained, which clients share"):
        run(made(Teacher), data(), engine)


class Product(nn.Module):
    """A product with its own input, which is of another type where activations are held in 16
    bits."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.bmm(self.inner(x)[:, :, None], x[:, None, :]).sum(dim=1))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_an_unsupported_precision_is_one_line(precision: str) -> None:
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
