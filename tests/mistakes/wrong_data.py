"""Wrong data, models and losses, and the expected errors."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from tests.mistakes.studies import INPUTS, LABELS, Wrong, raising, study


def quantised() -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch means to give them up
        return torch.quantize_per_tensor(INPUTS, 0.1, 0, torch.quint8)


def far() -> dict[str, Tensor]:
    """Values of float64 that the model's float32 cannot hold."""
    return {"weight": torch.full((2, 3), 1e300, dtype=torch.float64), "bias": torch.zeros(2)}


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


def leaving(*given: object) -> Tensor:
    raise SystemExit(0)


class Detached(nn.Linear):
    """A model whose output does not depend on its parameters in autograd."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).detach()


class Unlearning(nn.Linear):
    """A model without a gradient, but only in training."""

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
    """A data set whose inputs differ in length."""

    def __getitem__(self, index: int) -> tuple:
        inputs, label = super().__getitem__(index)
        return inputs[: 1 + index % 2], label


class Broken(TensorDataset):
    def __getitem__(self, index: int) -> tuple:
        raise OSError("the disk is gone")


class Uneven(TensorDataset):
    """A data set whose items are no pairs."""

    def __getitem__(self, index: int) -> tuple:
        return (*super().__getitem__(index), 0)


class Stream(IterableDataset):
    """An iterable data set with a length."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(SET)

    def __len__(self) -> int:
        return len(SET)


SET = TensorDataset(INPUTS, LABELS)
LOADER = DataLoader(SET, batch_size=2)
DATA: list[Wrong] = [
    ("lengths", lambda: study(data=(INPUTS, LABELS[:7])), "data.source shapes", "(7,)", "as many targets"),
    ("nothing", lambda: study(data=(INPUTS[:0], LABELS[:0])), "data.source shapes", "(0,", "at least one"),
    ("scalar", lambda: study(data=(INPUTS, 3)), "data.source shapes", "()", "as many targets"),
    ("no pair", lambda: study(data=INPUTS), "data.source", "'Tensor'", "(inputs, targets)"),
    ("none", lambda: study(data=None), "data.source", "'NoneType'", "(inputs, targets)"),
    ("three", lambda: study(data=(INPUTS, LABELS, LABELS)), "data.source", "'tuple'", "(inputs, targets)"),
    ("triples", lambda: study(data=Uneven(INPUTS, LABELS)), "data.source", "'Uneven'", "such pairs"),
    ("a loader", lambda: study(data=LOADER), "data.source", "'DataLoader'", "loader.dataset"),
    ("loaders", lambda: study(data=[LOADER] * 4, partition=None), "data.source[0]", "'DataLoader'", "loader.dataset"),
    ("two loaders", lambda: study(data=(LOADER, LOADER)), "data.source[0]", "'DataLoader'", "loader.dataset"),
    ("streams", lambda: study(data=[SET, Stream()] * 2, partition=None), "data.source[1]", "'Stream'", "map-style"),
    ("dicts", lambda: study(data=[{"x": INPUTS}] * 4), "data.source[0]", "'dict'", "(inputs, targets)"),
    ("paths", lambda: study(data=["a.npz"] * 4, partition=None), "data.source[0]", "'str'", "load it first"),
    ("a list and parts", lambda: study(data=[SET] * 4), "data.source", "'list'", "leave data.partition out"),
    (
        "pairs and parts",
        lambda: study(data=[(INPUTS, LABELS)] * 2),
        "data.source",
        "'list'",
        "leave data.partition out",
    ),
    ("test loader", lambda: study(test=LOADER), "data.test", "'DataLoader'", "loader.dataset"),
    ("text", lambda: study(data=(INPUTS, ["cat"] * 8)), "data.source targets", "list", "number the classes"),
    ("ragged", lambda: study(data=([[1.0], [1.0, 2.0]], [0, 1])), "data.source", "'list'", "as long in every row"),
    ("unlike samples", lambda: study(data=Lengths(INPUTS, LABELS)), "data.source", "'Lengths'", "one shape (pad "),
    ("broken", lambda: study(data=Broken(INPUTS, LABELS)), "data.source", "'Broken'", "the disk is gone"),
    ("masked", lambda: study(data=(np.ma.masked_less(INPUTS.numpy(), 0.5), LABELS)), "data.source", "Masked", "masked"),
    ("meta", lambda: study(data=(INPUTS.to("meta"), LABELS)), "data.source", "'Tensor'", "meta device"),
    ("meta labels", lambda: study(data=(INPUTS, LABELS.to("meta"))), "data.source targets", "'Tensor'", "meta device"),
    ("sparse", lambda: study(data=(INPUTS.to_sparse(), LABELS)), "data.source", "'Tensor'", "to_dense()"),
    ("quantised", lambda: study(data=(quantised(), LABELS)), "data.source", "'Tensor'", "dequantize()"),
    ("nested", lambda: study(data=(ragged(torch.strided), LABELS)), "data.source", "'Tensor'", "nested"),
    ("jagged", lambda: study(data=(ragged(torch.jagged), LABELS)), "data.source", "Tensor'", "nested"),
    ("test", lambda: study(test=(INPUTS, LABELS[:2])), "data.test shapes", "(2,)", "as many targets"),
]
MODELS: list[Wrong] = [
    ("inputs", lambda: study(model=nn.Linear(4, 2)), "model", "'Linear'", "of shape (3,)"),
    ("bytes", lambda: study(data=(INPUTS.byte(), LABELS)), "model", "'Linear'", "give inputs.float() / 255"),
    ("classes", lambda: study(model=nn.Linear(3, 1)), "model output", "1 classes", "2 classes are"),
    (
        "negative label",
        lambda: study(data=(INPUTS, LABELS - 1)),
        "data.source labels",
        "-1 to 0",
        "classes are counted from 0",
    ),
    ("float labels", lambda: study(data=(INPUTS, LABELS / 2)), "data.source labels", "'float32'", "y.long()"),
    (
        "one-hot labels",
        lambda: study(data=(INPUTS, torch.eye(2)[LABELS].long())),
        "model output",
        "(2,)",
        "of shape (2,)",
    ),
    (
        "float test labels",
        lambda: study(test=(INPUTS, LABELS.float())),
        "data.test targets",
        "'float32'",
        "make both alike",
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
    ("loss class", lambda: study(loss=nn.MSELoss), "loss", "'MSELoss'", "is a class: give an object of it, MSELoss()"),
    (
        "loss parameter",
        lambda: study(loss={"name": "cross_entropy", "label_smoothing": 7}),
        "loss",
        "'cross_entropy'",
        "between 0.0 and 1.0",
    ),
    ("no model", lambda: study(model="resnet"), "model.name", "'resnet'", ""),
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
    ("augment", lambda: study(augment=3), "data.augment", "3", "must be a function"),
    ("augment fails", lambda: study(augment=raising), "data.augment", "'raising'", "KeyError"),
    ("augment kind", lambda: study(augment=lambda x, *at: x.numpy()), "data.augment", "<lambda>", "not ndarray"),
    ("augment loses", lambda: study(augment=lambda x, *at: x[:1]), "data.augment", "<lambda>", "as many inputs"),
    ("augment shape", lambda: study(augment=lambda x, *at: x[:, :2]), "data.augment", "<lambda>", "(2, 2)"),
    ("augment type", lambda: study(augment=lambda x, *at: x.double()), "data.augment", "<lambda>", "float64"),
    ("no state", lambda: study(initial=[1]), "model.initial", "[1]", "state dict"),
    (
        "initial text",
        lambda: study(initial={"weight": "a", "bias": 1}),
        "model.initial.weight",
        "'str'",
        "array of numbers",
    ),
    ("initial complex", lambda: study(initial={"weight": INPUTS * 1j}), "model.initial.weight", "complex64", "real"),
    ("initial key", lambda: study(initial={1: INPUTS}), "model.initial key", "1", "text"),
    ("initial far", lambda: study(initial=far()), "model.initial.weight", "(2, 3)", "finite in float32"),
    ("initial", lambda: study(initial={}), "model.initial", "[]", "lacks 'weight'"),
]
