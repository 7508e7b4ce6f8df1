"""Every client-batched kernel against float64, in Triton's interpreter on a CPU, or on the GPU if there is one."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

from stratafl.engine import kernels

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed here", allow_module_level=True)

ON_GPU = torch.cuda.is_available() and not kernels.interpreted()


@pytest.mark.parametrize(
    "families",
    [
        ["conv2d"],
        ["conv2d_relu_pool"],
        ["linear"],
        ["group_norm", "flatten", "embedding", "cross_entropy", "recurrent", "update", "drift"],
    ],
    ids=lambda families: families[0],
)
def test_kernels_agree_with_float64(families: list[str]) -> None:
    """In a process of its own: whether kernels are interpreted is decided when Triton is first imported."""
    environment = dict(os.environ) if ON_GPU else {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "stratafl.engine.kernels.check", *families]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all within their limits" in done.stdout


def test_available_follows_the_machine() -> None:
    assert kernels.available() == (kernels.interpreted() or torch.cuda.is_available())


def test_an_unknown_operation_is_named() -> None:
    with pytest.raises(AttributeError, match="pooling"):
        _ = kernels.pooling


FETCH = """
import torch
from stratafl.data.transforms import flip_and_crop
from stratafl.engine import kernels

device = "cpu" if kernels.interpreted() else "cuda"
for channels, height, width in ((3, 8, 8), (1, 5, 7)):
    data = torch.randn(20, channels, height, width, device=device)
    index_CB = torch.randint(20, (3, 16), device=device)
    client_C = torch.tensor([4, 0, 9], device=device)
    for step in (0, 7):
        expected = flip_and_crop(data[index_CB], -5, client_C, step)
        assert not torch.equal(expected, data[index_CB])
        assert torch.equal(kernels.fetch(data, index_CB, -5, client_C, step), expected)
"""


def test_fetch_is_flip_and_crop_bit_by_bit() -> None:
    environment = dict(os.environ) if ON_GPU else {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", FETCH], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
