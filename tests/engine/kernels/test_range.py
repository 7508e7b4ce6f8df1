"""Kernels on large, small and infinite values and NaN, in Triton's interpreter on a CPU, or on the
GPU if there is one."""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from stratafl.engine import kernels

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed here", allow_module_level=True)

ON_GPU = torch.cuda.is_available() and not kernels.is_interpreted()


def run(*parts: str) -> None:
    """Run in another process, since Triton decides at import whether kernels are interpreted."""
    environment = dict(os.environ) if ON_GPU else {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-W", "ignore", "-c", "".join(parts)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


ROUNDED_PRODUCTS = """
import numpy as np
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

multiply, rounded_products = InterpreterBuilder.create_dot, 0


def rounded(operand):
    bits = np.ascontiguousarray(operand.data).view(np.int32)
    return TensorHandle(((bits + 0xFFF + (bits >> 13 & 1)) & ~0x1FFF).view(np.float32), operand.dtype.scalar)


def product(self, a, b, d, precision, *more):
    global rounded_products
    if a.data.dtype == np.float32 and precision.name == "TF32":
        rounded_products += 1
        a, b = rounded(a), rounded(b)
    return multiply(self, a, b, d, precision, *more)


InterpreterBuilder.create_dot = product
"""
"""The interpreter multiplies tf32 operands as they are; tensor cores read 10 bits of the
mantissa."""

LAYERS = """
import torch
import torch.nn.functional as F
from stratafl.engine import kernels
from stratafl.engine.kernels.conv2d import conv2d
from stratafl.engine.kernels.conv2d_relu_pool import conv2d_relu_pool
from stratafl.engine.kernels.cross_entropy import cross_entropy
from stratafl.engine.kernels.group_norm import group_norm
from stratafl.engine.kernels.linear import linear

device = "cpu" if kernels.is_interpreted() else "cuda"
random = torch.Generator().manual_seed(5)


def normal(*shape):
    return torch.randn(shape, generator=random).to(device)


def images(function):
    return lambda x, *others: function(x.permute(0, 3, 1, 2), *others).permute(0, 2, 3, 1)


LAYERS = {
    "linear": (linear, F.linear, (5, 20), (6, 20), (6,), (5, 6), True),
    "conv2d": (conv2d, images(F.conv2d), (2, 5, 5, 4), (3, 4, 3, 3), (3,), (2, 3, 3, 3), True),
    "pool": (
        conv2d_relu_pool, images(lambda x, w, b: F.max_pool2d(F.relu(F.conv2d(x, w, b)), 2)),
        (2, 6, 6, 5), (3, 5, 3, 3), (3,), (2, 2, 2, 3), True,
    ),
    "few channels": (
        conv2d_relu_pool, images(lambda x, w, b: F.max_pool2d(F.relu(F.conv2d(x, w, b)), 2)),
        (2, 6, 6, 3), (3, 3, 3, 3), (3,), (2, 2, 2, 3), False,
    ),
}


def results(op, inputs, dy, first):
    inputs = [each.clone().requires_grad_(first or place > 0) for place, each in enumerate(inputs)]
    y = op(*inputs)
    y.backward(dy)
    return [y.detach(), *(each.grad for each in inputs if each.requires_grad)]


def alone(plain):
    return lambda *inputs: torch.stack([plain(*own) for own in zip(*inputs)])
"""

LARGE = """
# of a client: its inputs, weights and gradients times this
FACTORS = [(1, 1, 1), (1, 1, 100), (1e5, 1, 1), (1e5, 1, 100), (1, 1, 1e-12), (1e-9, 1e-6, 1e-9), (1e-30, 1e30, 1e4)]
for name, (op, plain, x, w, b, y, first) in LAYERS.items():
    scale = torch.tensor(FACTORS, device=device)
    inputs = [normal(len(FACTORS), *shape) for shape in (x, w, b)]
    sizes = [scale[:, 0], scale[:, 1], scale[:, 0] * scale[:, 1]]
    inputs = [each * size.view(-1, *[1] * (each.dim() - 1)) for each, size in zip(inputs, sizes)]
    dy = normal(len(FACTORS), *y) * scale[:, 2].view(-1, *[1] * len(y))

    def kernel(*tensors):
        return op(*tensors, precision="tf32")

    got = results(kernel, inputs, dy, first)
    exact = results(alone(plain), [each.double() for each in inputs], dy.double(), first)
    for part, (a, e) in enumerate(zip(got, exact)):
        off = (a.double() - e).flatten(1).norm(dim=1) / e.flatten(1).norm(dim=1)
        assert bool((off < 1e-3).all()), (name, part, off)
    # another client's numbers change no bit
    for client in (0, 3):
        own = slice(client, client + 1)
        for a, e in zip(results(kernel, [each[own] for each in inputs], dy[own], first), got):
            assert torch.equal(a, e[own]), (name, client)
assert not kernels.is_interpreted() or rounded_products
"""


@pytest.mark.slow
def test_tf32_products_are_accurate_at_any_scale() -> None:
    run(LAYERS, "" if ON_GPU else ROUNDED_PRODUCTS, LARGE)


BROKEN = """
for name, (op, plain, x, w, b, y, first) in LAYERS.items():
    inputs, dy = [normal(2, *shape) for shape in (x, w, b)], normal(2, *y)
    at = alone(plain)(*inputs)[1].flatten().argmax()  # no ReLU cuts this one's gradient off
    dy[1].view(-1)[at] = float("inf")
    got = results(lambda *tensors: op(*tensors, precision="tf32"), inputs, dy, first)
    exact = results(alone(plain), [each.double() for each in inputs], dy.double(), first)
    for part, (a, e) in enumerate(zip(got, exact)):
        assert bool(a[0].isfinite().all())
        assert not bool((a.isfinite() & ~e.isfinite()).any()), (name, part)
    for a in got[-2:]:
        # the weights and biases of other channels do not meet it
        finite = a[1].reshape(len(a[1]), -1).isfinite().all(dim=1)
        assert finite.tolist() == [channel != int(at) % len(finite) for channel in range(len(finite))]
"""


@pytest.mark.slow
def test_gradient_that_is_not_finite_stays_so() -> None:
    """Gradients are infinite or NaN where those of PyTorch are, and only for that client."""
    run(LAYERS, BROKEN)


NAN_OUTPUTS = """
def normed(x, w, b):
    return group_norm(x[:, :, None, None], 2, w, b, relu=True)[:, :, 0, 0]


x, dy = normal(1, 3, 4), normal(1, 3, 4)
x[0, 1, 2] = float("nan")
for op, plain, shape in (
    (lambda x, w, b: linear(x, w, b, relu=True), F.linear, (4, 4)),
    (normed, lambda x, w, b: F.group_norm(x, 2, w, b), (4,)),
):
    inputs = [x, normal(1, *shape), normal(1, 4)]
    exact = results(alone(lambda *tensors: plain(*tensors).relu()), inputs, dy, True)
    for a, e in zip(results(op, inputs, dy, True), exact):
        assert torch.allclose(a, e, atol=1e-5, equal_nan=True), (a, e)
"""


def test_relu_passes_the_gradient_at_nan() -> None:
    """This is PyTorch's behaviour; otherwise the NaN of a layer would not show in the gradient."""
    run(LAYERS, NAN_OUTPUTS)


LABELS = """
z = normal(3, 4, 5)
labels = torch.randint(5, (3, 4), generator=random).to(device)
for label in (5, 6, 7, 8, 1000, -1, -100):
    for mask in (None, torch.tensor([[1, 1, 1, 1], [1, 1, 0, 1], [1, 1, 1, 1]], device=device).bool()):
        broken = labels.clone()
        broken[1, 2] = label
        a, e = (z.clone().requires_grad_() for _ in range(2))
        got, expected = cross_entropy(a, broken, mask), cross_entropy(e, labels, mask)
        got.sum().backward()
        expected.sum().backward()
        counted = mask is None
        assert got.isnan().tolist() == [False, counted, False]
        assert a.grad.isnan().all(dim=2).tolist() == [[False] * 4, [False, False, counted, False], [False] * 4]
        same = ~a.grad.isnan()
        assert torch.equal(got[::2], expected[::2]) and torch.equal(a.grad[same], e.grad[same])
"""


def test_invalid_label_gives_nan_for_its_client() -> None:
    run(LAYERS, LABELS)


COMPARING = {f"tl.{name}" for name in ("maximum", "minimum", "clamp", "max", "min", "argmax", "argmin", "sort")}


def comparisons() -> set[str]:
    """Calls by which kernels compare two values, except those that keep NaN."""
    calls = set()
    for path in Path(kernels.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in COMPARING:
                keywords = {word.arg: ast.unparse(word.value) for word in node.keywords}
                if keywords.get("propagate_nan") != "tl.PropagateNan.ALL":
                    calls.add(ast.unparse(node))
    return calls


COUNTS = {
    "tl.maximum(-top, 0)",
    "tl.maximum(-left, 0)",
    "tl.maximum(0, q - (OH - 1))",
    "tl.maximum(a_to - a_from, 0)",
    "tl.maximum(tl.sum(count, 0), 1.0)",
    "tl.minimum(q + 1, (KH - first_row + STRIDE - 1) // STRIDE)",
    "tl.minimum(M, (split + 1) * SPAN)",
    "tl.minimum(c + 1, clients - 1)",
    "tl.minimum(14 + 127 - (peak >> 23), 126)",
    # bits of finite numbers
    "tl.max(peak, 0)",
    "tl.max(tl.load(peak_ptr + c * PEAKS + tl.arange(0, PEAKS)), 0)",
}
SUBTRACTED = {"tl.max(z, 1)"}
"""Maxima subtracted from all scores of a sample, whose sum of exponentials then keeps NaN."""


def test_no_comparison_in_a_kernel_hides_nan() -> None:
    """On a GPU, Triton's `maximum` and `minimum` of NaN and a number are the number by default.

    NumPy, and so the interpreter, returns NaN and cannot show the error. Counts may be compared.
    """
    assert comparisons() == COUNTS | SUBTRACTED
