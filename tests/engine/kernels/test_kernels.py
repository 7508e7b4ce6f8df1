"""Kernels against float64, in Triton's interpreter on a CPU, or on the GPU if there is one."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys

import pytest
import torch
from torch import nn

from benchmarks.kernels import check
from benchmarks.kernels.race_check import overtaken
from stratafl.engine import kernels
from tests.engine.pairs import CLOSE, compare
from tests.slow import slow

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed here", allow_module_level=True)

ON_GPU = torch.cuda.is_available() and not kernels.is_interpreted()


@pytest.mark.slow
@pytest.mark.parametrize(
    "families",
    [
        ["conv2d"],
        ["conv2d_relu_pool"],
        ["linear"],
        [
            "group_norm",
            "flatten",
            "max_pool2d",
            "convert_filters",
            "embedding",
            "cross_entropy",
            "lstm",
            "update",
            "drift",
        ],
    ],
    ids=lambda families: families[0],
)
def test_kernels_agree_with_float64(families: list[str]) -> None:
    """Run in another process, since Triton decides at import whether kernels are interpreted."""
    environment = dict(os.environ) if ON_GPU else {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "benchmarks.kernels.check", *families]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all within their limits" in done.stdout


def test_a_family_without_cases_is_an_error() -> None:
    with pytest.raises(SystemExit, match="no cases of sillu"):
        check.run("cpu", small=True, only=["sillu"])


def test_triton_needs_a_gpu_or_its_interpreter() -> None:
    assert kernels.triton_available() == (kernels.is_interpreted() or torch.cuda.is_available())


def test_cpu_and_float64_use_torch() -> None:
    assert kernels.backend_for(torch.device("cpu"), torch.float32) is kernels.TORCH_BACKEND
    assert kernels.backend_for(torch.device("cuda"), torch.float64) is kernels.TORCH_BACKEND


LOOP = """
%x = ttg.local_alloc : () -> !ttg.memdesc<3x64x32xbf16, #shared, #smem, mutable>
%dy = ttg.local_alloc : () -> !ttg.memdesc<{places}x32x64xbf16, #shared, #smem, mutable>
%x_0 = ttg.memdesc_index %x[%c0] : !ttg.memdesc<3x64x32xbf16> -> !ttg.memdesc<64x32xbf16>
%dy_0 = ttg.memdesc_index %dy[%c0] : !ttg.memdesc<{places}x32x64xbf16> -> !ttg.memdesc<32x64xbf16>
%0 = ttg.async_copy_global_to_local %at, %x_0 mask %m : tensor<64x32x!tt.ptr<bf16>> -> <64x32xbf16>
%1 = ttg.async_copy_global_to_local %at, %dy_0 mask %m : tensor<32x64x!tt.ptr<bf16>> -> <32x64xbf16>
%2 = ttg.async_copy_global_to_local %at, %x_0 mask %m : tensor<64x32x!tt.ptr<bf16>> -> <64x32xbf16>
%3 = ttg.async_copy_global_to_local %at, %dy_0 mask %m : tensor<32x64x!tt.ptr<bf16>> -> <32x64xbf16>
%acc = scf.for %i = %c0 to %M step %c32 iter_args(%sum = %zero) {{
  %dy_1 = ttg.memdesc_index %dy[%i] : !ttg.memdesc<{places}x32x64xbf16> -> !ttg.memdesc<32x64xbf16>
  %dy_2 = ttg.memdesc_trans %dy_1 {{order = array<i32: 1, 0>}} : !ttg.memdesc<32x64xbf16> -> !ttg.memdesc<64x32xbf16>
  %4 = ttng.warp_group_dot %x_0, %dy_2, %sum {{isAsync = true}} : !ttg.memdesc<64x32xbf16> -> tensor<64x64xf32, #mma>
  %5 = ttng.warp_group_dot_wait %4, %x_0, %dy_2 {{pendings = {running} : i32}} : tensor<64x64xf32, #mma>
  %6 = ttg.async_copy_global_to_local %at, %x_0 mask %m : tensor<64x32x!tt.ptr<bf16>> -> <64x32xbf16>
  %7 = ttg.async_copy_global_to_local %at, %dy_0 mask %m : tensor<32x64x!tt.ptr<bf16>> -> <32x64xbf16>
}}
"""


@pytest.mark.parametrize(
    ("places", "running", "buffers"), [(2, 1, ["%dy"]), (3, 1, []), (2, 0, [])], ids=["too few", "enough", "waited for"]
)
def test_overwritten_buffers_are_found(places: int, running: int, buffers: list[str]) -> None:
    assert overtaken(LOOP.format(places=places, running=running)) == buffers


@pytest.mark.slow
@pytest.mark.parametrize("families", [["conv2d"], ["conv2d_relu_pool", "linear", "lstm"]], ids=lambda f: f[0])
def test_no_kernel_overwrites_a_buffer_in_use(families: list[str]) -> None:
    """Compile for Hopper, in another process, which then cannot launch kernels."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "benchmarks.kernels.race_check", "bf16", *families]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no buffer is overtaken" in done.stdout
    late = re.search(r"(\d+) go on while products run", done.stdout)
    assert late and int(late[1]) > 0, done.stdout


LOAD_IMAGES = """
import torch
from stratafl.data.transforms import flip_and_crop
from stratafl.engine import kernels
from stratafl.engine.kernels.image_batches import load_images

device = "cpu" if kernels.is_interpreted() else "cuda"
for channels, height, width in ((3, 8, 8), (1, 5, 7)):
    data = torch.randn(20, channels, height, width, device=device)
    index_CB = torch.randint(20, (3, 16), device=device)
    client_C = torch.tensor([4, 0, 9], device=device)
    for step in (0, 7):
        expected = flip_and_crop(data[index_CB], -5, client_C, step)
        assert not torch.equal(expected, data[index_CB])
        assert torch.equal(load_images(data, index_CB, -5, client_C, step), expected)
"""


def test_load_images_equals_flip_and_crop() -> None:
    environment = dict(os.environ) if ON_GPU else {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", LOAD_IMAGES], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


DROPOUT = """
import sys
import torch
from stratafl.engine import kernels
from stratafl.engine.kernels import dropout, reference
from stratafl.engine.random_streams import ClientStream, RandomSource

device, every = "cpu" if kernels.is_interpreted() else "cuda", int(sys.argv[1])
client_C = torch.tensor([7, 2, 1000], device=device)
steps = (4, torch.tensor(9, device=device), torch.tensor([5, 0, 2], device=device))
cases = [(dtype, step, p) for dtype in (torch.float32, torch.bfloat16) for step in steps for p in (0.5, 0.1, 0.999)]
shapes = (False, (3, 5, 7)), (False, (3, 4, 3, 11)), (True, (3, 4, 5, 3, 6)), (True, (3, 3, 2, 2, 1))
for number, (last, shape) in enumerate(shapes):
    for dtype, step, p in cases[number % every :: every]:
        x, done = torch.randn(shape, device=device).to(dtype), []
        for drop in (reference.dropout, dropout.dropout):
            given, source = x.clone().requires_grad_(), RandomSource(ClientStream(11, client_C, step), 2)
            y = drop(given, p, source, last)
            y.backward(torch.full_like(y, 3))
            done.append((y.detach(), given.grad))
            assert source.count == 3
        for expected, got in zip(*done):
            assert torch.equal(expected == 0, got == 0)
            torch.testing.assert_close(got, expected)
"""


@pytest.mark.parametrize("every", [4, slow(1)])
def test_dropout_equals_its_reference(every: int) -> None:
    environment = dict(os.environ) if ON_GPU else {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", DROPOUT, str(every)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


LOOKUPS = """
import torch
from stratafl.engine import kernels
from stratafl.engine.kernels.embedding import embedding

products = 0
if kernels.is_interpreted():
    from triton.runtime.interpreter import InterpreterBuilder

    multiply = InterpreterBuilder.create_dot

    def product(*operands):
        global products
        products += 1
        return multiply(*operands)

    InterpreterBuilder.create_dot = product
device = "cpu" if kernels.is_interpreted() else "cuda"
random = torch.Generator().manual_seed(3)
ENTRIES, CODES = 4_500, 24
codes = torch.randint(ENTRIES, (3, 4, CODES // 4), generator=random)
codes[0, 1:] = codes[0, 0, 0]  # most of them one and the same
codes[1, 0], codes[1, 1] = 0, ENTRIES - 1
codes, dy = codes.to(device), torch.randn(3, 4, CODES // 4, 5, generator=random).to(device)


def gradient(some):
    weights = torch.zeros(3, ENTRIES, 5, device=device)[some].requires_grad_()
    embedding(codes[some], weights).backward(dy[some])
    return weights.grad


first = gradient(slice(3))
assert products <= 3 * CODES, products
exact = torch.zeros(3, ENTRIES, 5, device=device, dtype=torch.float64)
for own, of, by in zip(exact, codes, dy):
    own.index_add_(0, of.flatten(), by.flatten(0, 1).double())
torch.testing.assert_close(first, exact.float())
assert torch.equal(gradient(slice(3)), first)
assert torch.equal(gradient(slice(1, 2)), first[1:2])
"""


def test_large_embedding_reads_each_code_once() -> None:
    """The work is not that of all pairs of code and entry, and the bits do not depend on others."""
    environment = dict(os.environ) if ON_GPU else {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", LOOKUPS], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_large_embedding_equals_the_loop() -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(30_000, 3), nn.Flatten(), nn.Linear(15, 3)).double()

    codes = torch.randint(30_000, (60, 5), generator=torch.Generator().manual_seed(2))
    assert compare(model=model, inputs=codes) < CLOSE


ENGINE = """
import torch
from torch import nn

from stratafl.engine import kernels
from tests.engine import pairs
from tests.flat import client_options

ours = kernels.triton_backend()
kernels.backend_for = lambda device, dtype: ours if dtype == torch.float32 else kernels.TORCH_BACKEND


def model():
    stem = [nn.Conv2d(3, 4, 3, stride=2, padding=1, bias=False), nn.GroupNorm(2, 4), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    return nn.Sequential(*stem, nn.Conv2d(4, 6, 3, padding=1), nn.Flatten(), nn.Linear(24, 3))


inputs = torch.randn(60, 3, 8, 8, generator=torch.Generator().manual_seed(2))
usual = client_options(0.1, clip_norm=0.5, weight_decay=1e-2, momentum=0.5)
adam = client_options(0.01, clip_norm=0.5, optimizer={"name": "adamw", "eps": 1e-3}, optimizer_state="keep", epochs=2)
pulls = ["fedprox", {"name": "feddyn", "alpha": 0.5, "pull": "after_clip"}]
for rules, chain in (("mtgc", usual), (pulls, usual), ("mtgc", adam)):
    more = {} if "epochs" not in chain else {"periods": [1]}
    given = {"model": model, "inputs": inputs, "rules": rules, "leaf": chain, "initial": model().state_dict(), **more}
    expected = pairs.federation(**given).run()
    sim = pairs.stacked(pairs.federation(**given), chunk_size=2)
    assert sim.engine.how == "stacked", sim.engine.how
    got = sim.run()
    assert not torch.equal(expected.models[0][0], expected.models[-1][0])
    for a, b in zip(expected.models, got.models, strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-6), (a - b).abs().max()
"""


@pytest.mark.slow
@pytest.mark.skipif(ON_GPU, reason="a GPU has tests of its own")
def test_engine_with_kernels_equals_the_loop() -> None:
    """In the interpreter: channels-last filters, gradient buffers, corrections, clipping."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", ENGINE], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
