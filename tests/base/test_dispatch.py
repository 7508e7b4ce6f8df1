"""Floating-point operations by hand and by PyTorch's own counter."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from stratafl.base.dispatch import FlopCounter, library_layers_disabled

LENGTH, WIDTH, HIDDEN, HEADS = 6, 8, 5, 2
SEQUENCE = torch.zeros(1, LENGTH, WIDTH)


def counted(module: nn.Module, inputs: Tensor) -> int:
    """Operations of one forward pass in evaluation."""
    with library_layers_disabled(), FlopCounter() as counter, torch.no_grad():
        module.eval()(inputs)
    return counter.total


def recurrent(gates: int, inputs: int) -> int:
    return 2 * LENGTH * gates * HIDDEN * (inputs + HIDDEN)


def transformer(feedforward: int) -> int:
    projections, attention = 4 * WIDTH * WIDTH, 2 * LENGTH * WIDTH
    return 2 * LENGTH * (projections + attention + 2 * WIDTH * feedforward)


BY_HAND = {
    "LSTM": (nn.LSTM(WIDTH, HIDDEN, batch_first=True), recurrent(4, WIDTH)),
    "GRU": (nn.GRU(WIDTH, HIDDEN, batch_first=True), recurrent(3, WIDTH)),
    "LSTM of two layers, both ways": (
        nn.LSTM(WIDTH, HIDDEN, 2, batch_first=True, bidirectional=True),
        2 * (recurrent(4, WIDTH) + recurrent(4, 2 * HIDDEN)),
    ),
    "encoder": (nn.TransformerEncoderLayer(WIDTH, HEADS, 16, batch_first=True), transformer(16)),
}


@pytest.mark.parametrize("name", BY_HAND)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_layers_that_libraries_fuse_are_counted(name: str, device: str) -> None:
    module, flops = BY_HAND[name]
    assert counted(copy.deepcopy(module).to(device), SEQUENCE.to(device)) == flops


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (nn.Sequential(nn.Flatten(), nn.Linear(12, 4), nn.ReLU(), nn.Linear(4, 2)), (3, 12)),
        (
            nn.Sequential(nn.Conv2d(2, 6, 3, padding=1, groups=2), nn.BatchNorm2d(6), nn.Conv2d(6, 2, 3, 2)),
            (2, 2, 9, 9),
        ),
        (nn.ConvTranspose2d(2, 3, 3), (1, 2, 5, 5)),
        (nn.ReLU(), (4,)),
    ],
    ids=["perceptron", "convolutions", "transposed convolution", "nothing"],
)
def test_counts_are_those_of_pytorch_s_counter(module: nn.Module, shape: tuple[int, ...]) -> None:
    inputs = torch.zeros(shape)
    with FlopCounterMode(display=False) as expected, torch.no_grad():
        module.eval()(inputs)
    assert counted(module, inputs) == expected.get_total_flops()


def test_switches_of_libraries_are_restored() -> None:
    def switches() -> tuple[bool, ...]:
        attention = torch.backends.mha.get_fastpath_enabled(), torch.backends.cuda.flash_sdp_enabled()
        return torch.backends.cudnn.enabled, torch.backends.mkldnn.enabled, *attention

    before = switches()
    with library_layers_disabled():
        assert not any(switches())
    assert switches() == before


def test_set_up_does_not_load_the_compiler() -> None:
    """It takes a second and 70 MB, in every run."""
    code = """
import sys, torch, stratafl
data = torch.zeros(8, 3), torch.zeros(8, dtype=torch.long)
stratafl.simulate(lambda: torch.nn.Linear(3, 2), data, 2, schedule=[1], rounds=1).run()
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
