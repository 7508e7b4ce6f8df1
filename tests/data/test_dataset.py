"""User data of every form trains like the same data as tensors."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from stratafl import InvalidInput
from stratafl.base.rng import rng_states
from stratafl.data.partition.partition import partition
from tests.flat import simulate

PARTS = [range(0, 7), range(7, 12), range(12, 21), range(21, 30)]


def samples() -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(3)
    x = torch.randn(30, 4, generator=drawn)
    return x, (x.sum(dim=1) > 0).long() + (x[:, 0] > 1).long()


X, Y = samples()


def rows(simulation: Any) -> Tensor:
    """Model of the root after a run."""
    return torch.cat([value.flatten() for value in simulation.run().module.state_dict().values()])


def trained(model: Any, data: Any, parts: Any = PARTS, **more: Any) -> Any:
    options: dict[str, Any] = {"periods": [2, 3], "rounds": 2, "leaf": 0.2, "batch": 4, **more}
    return simulate(model, data, parts, "2x2", **options)


def linear() -> nn.Module:
    return nn.Linear(4, 3)


class Masked(nn.Module):
    """A model with keyword inputs: codes and a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(9, 5), nn.Linear(5, 3)

    def forward(self, codes: Tensor, mask: Tensor) -> Tensor:
        return self.out((self.table(codes) * mask[:, :, None]).mean(dim=1))


def texts() -> tuple[dict[str, Tensor], Tensor]:
    drawn = torch.Generator().manual_seed(4)
    codes = torch.randint(9, (30, 6), generator=drawn)
    mask = (torch.rand(30, 6, generator=drawn) < 0.8).float()
    return {"codes": codes, "mask": mask}, codes[:, 0] % 3


class Tables(Dataset):
    """Items that are tables, as Hugging Face's data sets have them."""

    column_names = ("codes", "mask", "label", "speaker")

    def __len__(self) -> int:
        return 30

    def __getitem__(self, number: int) -> dict[str, Any]:
        inputs, labels = texts()
        item = {name: value[number].tolist() for name, value in inputs.items()}
        return {**item, "label": int(labels[number]), "speaker": f"s{number % 4}"}


class Numbers(Dataset):
    """Pairs of an input and a NumPy integer."""

    def __init__(self, x: Tensor, y: np.ndarray):
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, number: int) -> tuple[Tensor, np.generic]:
        return self.x[number], self.y[number]


class Noisy(Dataset):
    """Items are drawn from all three global generators whenever they are read."""

    def __init__(self) -> None:
        self.x, self.y = samples()

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        noise = torch.randn(4) + np.random.rand() + random.random()
        return self.x[number] + noise, self.y[number]


class OwnGenerator(Noisy):
    def __init__(self) -> None:
        super().__init__()
        self.random = random.Random(1)

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        return self.x[number] * self.random.random(), self.y[number]


# -- forms -----------------------------------------------------------------------------------------


def test_every_form_trains_as_its_tensors_do() -> None:
    x, y = samples()
    expected = rows(trained(linear, (x, y)))
    assert torch.equal(rows(trained(linear, (x.numpy(), y.numpy()))), expected)
    assert torch.equal(rows(trained(linear, TensorDataset(x, y))), expected)
    per_client = [(x[list(part)], y[list(part)]) for part in PARTS]
    assert torch.equal(rows(trained(linear, per_client, None)), expected)
    assert torch.equal(rows(trained(linear, [TensorDataset(*pair) for pair in per_client], None)), expected)
    with_test = trained(linear, (x, y), test=per_client).run()
    assert with_test.history[-1].metrics == trained(linear, (x, y), test=(x, y)).run().history[-1].metrics


def test_whole_numbers_of_any_type_are_labels() -> None:
    x, y = samples()
    expected = rows(trained(linear, (x, y)))
    for kind in (np.int8, np.int32, np.uint16, np.uint32, np.uint64):
        labels = y.numpy().astype(kind)
        assert torch.equal(rows(trained(linear, (x, labels), test=(x, labels))), expected)
        assert torch.equal(rows(trained(linear, Numbers(x, labels))), expected)


def test_tables_of_pandas_are_arrays() -> None:
    import pandas as pd

    x, y = samples()
    expected = rows(trained(linear, (x, y)))
    frame, column = pd.DataFrame(x.numpy()), pd.Series(y.numpy(), index=range(5, 5 + len(y)))
    assert torch.equal(rows(trained(linear, (frame, column))), expected)
    per_client = [(frame.iloc[list(part)], column.iloc[list(part)]) for part in PARTS]
    assert torch.equal(rows(trained(linear, per_client, None)), expected)


def test_texts_as_targets_are_told_apart_from_inputs() -> None:
    x, y = samples()
    texts = [f"class {label}" for label in y]
    for targets in (texts, np.array(texts), np.array(texts, dtype=object)):
        with pytest.raises(InvalidInput, match=r"data.source targets = .*are texts: number the classes"):
            trained(linear, (x, targets))


def test_the_librarys_own_partition_is_one() -> None:
    x, y = samples()
    parts = partition(y.numpy(), [[], [0, 0], [0, 0, 1, 1]], ["iid", "iid"], 0)
    assert torch.equal(rows(trained(linear, (x, y), parts)), rows(trained(linear, (x, y), parts.leaves)))
    turned = partition(y.numpy(), [[], [0, 0], [0, 0, 1, 1]], ["iid", "iid"], 0, rotation={"step": 10, "level": 1})
    with pytest.raises(InvalidInput, match="rotate them yourself"):
        trained(linear, (x, y), turned)


def test_a_table_of_inputs_is_given_to_the_model_as_keywords() -> None:
    inputs, labels = texts()
    expected = rows(trained(Masked, (inputs, labels)))
    columns = {"inputs": ["codes", "mask"], "targets": "label"}
    assert torch.equal(rows(trained(Masked, Tables(), columns=columns)), expected)
    assert torch.equal(rows(trained(Masked, Tables(), columns={"owner": "speaker"})), expected), "all others"
    assert torch.equal(rows(trained(Masked, Tables(), columns=columns, lazy=True)), expected)

    class Codes(nn.Sequential):
        """A single input column is passed by position."""

        def __init__(self) -> None:
            super().__init__(nn.Embedding(9, 3), nn.Flatten(), nn.Linear(18, 3))

    alone = trained(Codes, Tables(), columns={"inputs": "codes"})
    assert torch.equal(rows(alone), rows(trained(Codes, (inputs["codes"], labels))))


@pytest.mark.parametrize("engine", ["vmap", "stacked"])
def test_engines_agree_on_inputs_with_names(engine: str) -> None:
    inputs, labels = texts()

    def flipped(inputs: Mapping[str, Tensor], seed: int, client: Any, step: Any) -> dict[str, Tensor]:
        assert not isinstance(client, Tensor), "takes one client at a time"
        return {**inputs, "mask": 1 - inputs["mask"] if (client + step) % 2 else inputs["mask"]}

    more: dict[str, Any] = {
        "test": (inputs, labels),
        "evaluate_levels": [0, 2],
        "drift": "ideal",
        "augment": flipped,
    }
    expected = trained(Masked, (inputs, labels), engine="loop", **more)
    actual = trained(Masked, (inputs, labels), engine=engine, **more)
    assert actual.engine.how == engine
    assert torch.allclose(rows(actual), rows(expected), atol=1e-6)
    assert actual.history[-1].metrics == pytest.approx(expected.history[-1].metrics, abs=1e-6)


@pytest.mark.parametrize(
    ("data", "more", "field", "message"),
    [
        (Tables(), {"columns": {"targets": "lable"}}, "data.source column", "did you mean 'label'"),
        (Tables(), {"columns": {"target": "label"}}, "data.columns key", "did you mean 'targets'"),
        (Tables(), {"columns": {"inputs": [1]}}, "data.columns.inputs", "a list of them"),
        (samples(), {"lazy": True}, "data.lazy", "item by item"),
        (samples(), {"lazy": 1}, "data.lazy", "true or false"),
        (({"a b": samples()[0]}, samples()[1]), {}, "data.source input", "name of an argument"),
        (({"input": samples()[0][:3]}, samples()[1]), {}, "data.source shapes", "as many targets"),
        (({"nobody": samples()[0]}, samples()[1]), {}, "model", "nobody"),
        (
            [(X, Y), (X, Y.float())] * 2,
            {"parts": None},
            "data.source targets",
            "float32, torch.int64'.*all whole or all",
        ),
        ([(X, Y), (X.long(), Y)] * 2, {"parts": None}, "data.source inputs", "all whole or all real"),
        (Numbers(X, [1] * 29 + [1.0]), {}, "data.source targets", "all whole or all real"),
        (Numbers(X, [1] * 29 + [1.0]), {"lazy": True}, "data.source targets", "all whole or all real"),
    ],
    ids=[
        "no column",
        "no key",
        "no name",
        "lazy tensors",
        "no truth",
        "no keyword",
        "too few",
        "no argument",
        "labels of two types",
        "inputs of two types",
        "items of two types",
        "lazy items of two types",
    ],
)
def test_one_line_says_what_is_wrong(data: Any, more: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=message) as caught:
        trained(linear, data, **more)
    assert caught.value.field == field


class Named(TensorDataset):
    """Class names, as an image folder declares them."""

    def __init__(self, *names: str) -> None:
        super().__init__(X[:10], Y[:10])
        self.class_to_idx = {name: number for number, name in enumerate(names)}


def test_class_numbers_stand_for_the_same_everywhere() -> None:
    """A client's folder that lacks a class, and therefore numbers the others differently."""
    complete, partial = Named("cat", "dog", "owl"), Named("cat", "owl")
    trained(linear, [complete, Named("cat", "dog"), complete, complete], None, test=complete)
    mended = Named("cat", "owl")
    mended.target_transform = lambda number: 2 * number
    trained(linear, [complete, complete, mended, complete], None)
    with pytest.raises(InvalidInput, match=r"data.source\[2\] class 1 = 'owl': is 'dog' in the data sets before"):
        trained(linear, [complete, complete, partial, complete], None)
    with pytest.raises(InvalidInput, match=r"data\.test class 1 = 'owl': is 'dog'"):
        trained(linear, complete, [[0], [1], [2], [3]], test=partial)
    with pytest.raises(InvalidInput, match=r"data\.test_partition class 1 = 'owl': is 'dog'"):
        trained(linear, [complete] * 4, None, test=complete, test_partition=[partial] * 4)


def test_class_numbers_of_hugging_face_stand_for_the_same() -> None:
    datasets: Any = pytest.importorskip("datasets")

    def made(*names: str) -> Any:
        features = {"x": datasets.Value("float32"), "label": datasets.ClassLabel(names=list(names))}
        return datasets.Dataset.from_dict({"x": [0.0, 1.0], "label": [0, 1]}, features=datasets.Features(features))

    with pytest.raises(InvalidInput, match=r"data\.test class 0 = 'yes': is 'no'"):
        trained(linear, made("no", "yes"), [[0], [1], [], []], test=made("yes", "no"), columns={"inputs": "x"})


# -- lazy ------------------------------------------------------------------------------------------


def test_a_data_set_that_draws_is_read_once_and_that_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    before = rng_states()
    simulation = trained(linear, Noisy())
    assert rng_states() == before
    (note,) = simulation.notes
    assert "Noisy draws random numbers" in note and "lazy" in note
    assert note in capsys.readouterr().err
    torch.manual_seed(5)  # what it was frozen to follows from the run's own seed
    assert torch.equal(rows(trained(linear, Noisy())), rows(simulation))
    assert not trained(linear, Noisy(), lazy=True).notes
    assert not trained(linear, TensorDataset(*samples())).notes


def test_lazy_reading_draws_anew_and_restores_the_generators() -> None:
    read: list[int] = []

    class Counted(Noisy):
        def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
            read.append(number)
            return super().__getitem__(number)

    simulation = trained(linear, Counted(), lazy=True)
    del read[:]
    before = rng_states()
    lazy = rows(simulation)
    assert rng_states() == before
    assert len(read) == 6 * 7 + 6 * 5 + 4 * 9 + 4 * 9, "12 steps, by batches of 4 and what is left of an epoch"
    assert not torch.equal(lazy, rows(trained(linear, Noisy())))


@pytest.mark.parametrize("engine", ["loop", "vmap", "stacked"])
def test_lazy_data_is_the_same_for_every_engine_and_chunk(engine: Any) -> None:
    expected = rows(trained(linear, Noisy(), lazy=True))
    torch.manual_seed(9)
    simulation = trained(linear, Noisy(), lazy=True, engine=engine)
    assert torch.allclose(rows(simulation), expected, atol=1e-6)
    if engine != "loop":
        chunked = trained(linear, Noisy(), lazy=True, engine=engine)
        chunked.engine.chunk_size = 1
        assert torch.allclose(rows(chunked), expected, atol=1e-6)


def test_lazy_data_goes_on_after_a_resume_to_the_same_bits() -> None:
    expected = rows(trained(linear, Noisy(), lazy=True))
    half = trained(linear, Noisy(), lazy=True)
    next(iter(half))
    state = half.state()
    later = trained(linear, Noisy(), lazy=True)
    later.restore(state)
    assert torch.equal(rows(later), expected)


def test_a_generator_of_its_own_is_told_of() -> None:
    (note,) = trained(linear, OwnGenerator(), lazy=True).notes
    assert "cannot be repeated" in note


def test_a_saved_run_resumes_with_lazy_data_and_detects_other(tmp_path: Path) -> None:
    columns = {"inputs": ["codes", "mask"], "targets": "label"}

    def kept(name: str, **more: Any) -> Any:
        simulation = trained(Masked, Tables(), columns=columns, lazy=True, **more)
        simulation.save(tmp_path / name, checkpoint_every=1)
        return simulation

    next(iter(kept("run")))
    assert torch.equal(rows(kept("run")), rows(kept("whole")))
    next(iter(kept("other")))
    with pytest.raises(InvalidInput, match="is no longer what this run began with"):
        trained(Masked, texts(), save=tmp_path / "other")
