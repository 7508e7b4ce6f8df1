"""A study of a user's own: a config, and beside it the data and the model it names."""

from __future__ import annotations

from pathlib import Path

import pytest

from stratafl.base.topology import Topology
from stratafl.data.dataset import FederatedData
from stratafl.experiment.experiment import Experiment
from stratafl.experiment.loading import load_data

LOADER = """
import numpy as np
import torch
from torch.utils.data import Dataset, TensorDataset


def arrays(samples=40, width=3):
    x = torch.randn(samples, width)  # from the run's own seed
    return (x, (x[:, 0] > 0).long()), (x[:8], (x[:8, 0] > 0).long())


def each(clients):
    sets = [TensorDataset(torch.ones(3 + n, 2) * n, torch.arange(3 + n) % 2) for n in range(clients)]
    return {"train": sets, "test": (torch.ones(4, 2), torch.zeros(4).long()), "classes": ["no", "yes"]}


def owned(divided=False):
    x, y = np.arange(24.0).reshape(12, 2).astype("float32"), np.arange(12) % 3
    parts = {"partition": [range(0, 3), range(3, 6), range(6, 9), range(9, 12)]} if divided else {"owner": y}
    return {"train": (x, y), **parts}


def real():
    x = torch.linspace(0, 1, 20)[:, None]
    return (x, 2 * x), (x, 2 * x)


class Noisy(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, number):
        return torch.full((3,), number % 2) + 0.1 * torch.randn(3), number % 2


def noisy():
    return Noisy(), None


def named():
    codes = torch.arange(48).reshape(16, 3) % 5
    data = {"codes": codes, "scale": torch.ones(16, 1)}, codes[:, 0] % 2
    return data, data


def wrong():
    return 1, 2, 3


SAMPLES = 40


def miscounted():
    return {"train": arrays()[0], "classes": 2}


def misspelt():
    return {"trian": None}


def failing():
    raise OSError("the disk is gone")
"""
NET = """
import torch


class Net(torch.nn.Module):
    def __init__(self, input_shape, classes):
        super().__init__()
        assert input_shape == {"codes": (3,), "scale": (1,)}
        self.table, self.out = torch.nn.Embedding(5, 4), torch.nn.Linear(4, classes)

    def forward(self, codes, scale):
        return self.out(self.table(codes).mean(dim=1) * scale)
"""
TREE = Topology.of("2x2")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A study of the user's, in a folder that is not the current one."""
    made = tmp_path / "study"
    made.mkdir()
    (made / "my_data.py").write_text(LOADER)
    (made / "net.py").write_text(NET)
    return made


def config(folder: Path, data: str, more: str = "") -> Experiment:
    text = '[tree]\nshape = "2x2"\n[schedule]\nperiods = [1, 2]\n'
    (folder / "study.toml").write_text(f"{more}\n{text}\n[data]\n{data}\n")
    return Experiment.from_toml(folder / "study.toml")


def data_of(folder: Path, data: str, seed: int = 0) -> FederatedData:
    return load_data(config(folder, data).data, TREE, seed)


ROUNDS = 'rounds = 2\n\n[model]\nname = "logistic"\n'
LAZY = 'source = "my_data.py:noisy"\nlazy = true\n'
