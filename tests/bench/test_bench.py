"""The benchmark runs, counts and says what it measured."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

from benchmarks import engine_docs, modules
from benchmarks.engine import EVERY_WAY
from stratafl.base.errors import InvalidInput
from stratafl.bench import baselines
from stratafl.bench import engines as module
from stratafl.bench.engines import bench, contenders, row_of
from stratafl.bench.table import ratios
from stratafl.cli.main import app
from stratafl.engine import kernels
from stratafl.engine.precision import PRECISIONS, float32_matmul_precision
from stratafl.models.networks import Recurrent, lstm


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SAMPLES", 10)


@pytest.mark.parametrize("model", ["logistic", "mlp"])
def test_every_way_is_timed(model: str) -> None:
    table = bench(model, clients=4, batch=4, steps=4, rounds=1)
    assert [f"{row.engine}:{row.precision}" for row in table.rows] == contenders("cpu")
    for row in table.rows:
        assert row.ms > 0 and 0 < row.roofline < 1
        assert row.client_steps == pytest.approx(4e3 / row.ms)
        assert row.peak_bytes is None
    ours = table.rows[-1]
    assert ours.how == "stacked" and list(ours.stages_ms) == ["train", "meet"] and min(ours.stages_ms.values()) > 0
    written = json.loads(json.dumps(table.as_dict()))
    assert written["model"] == model and written["failed"] == {}
    assert list(written["ratios"]) == ["stacked:fp32"]


def test_it_is_known_what_every_kernel_is_for() -> None:
    """One that is not would pass for the library's."""
    sources = [ast.parse(path.read_text()) for path in Path(kernels.__file__).parent.glob("*.py")]
    functions = [node for source in sources for node in ast.walk(source) if isinstance(node, ast.FunctionDef)]
    compiled = [node for node in functions if any("triton.jit" in ast.unparse(by) for by in node.decorator_list)]
    calls = [node for function in compiled for node in ast.walk(function) if isinstance(node, ast.Call)]
    inner = {ast.unparse(node.func) for node in calls}
    assert {node.name for node in compiled} - inner == set(module.KINDS)


def test_operations_are_counted() -> None:
    table = bench("logistic", clients=1, batch=4, steps=1, rounds=1, engines=["loop"])
    # forward and the weights' gradient; the inputs need none
    assert table.operations == 2 * (2 * 4 * 784 * 10)
    assert table.parameters == 7850
    assert table.bytes["fp32"] > 7 * 4 * 7850


def test_images_and_text() -> None:
    torch.manual_seed(0)
    for name in ("cnn", "lstm"):
        table = bench(name, clients=1, batch=2, steps=1, rounds=1, engines=["plain loop", "vmap", "stacked"])
        assert [row.how for row in table.rows] == ["plain loop", "vmap", "stacked"]


COMPILED = {"clients": 2, "batch": 4, "steps": 3, "rounds": 1, "engines": ["compiled vmap"]}


@pytest.mark.slow
def test_a_compiled_mapping_is_timed() -> None:
    table = bench("logistic", **COMPILED)
    assert table.failed == {} and [row.how for row in table.rows] == ["compiled vmap"]


def test_what_is_compiled_is_the_gradients_of_all_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[torch.Size, ...]] = []

    def compiled(function: Callable[..., dict[str, Tensor]], dynamic: bool) -> Callable[..., dict[str, Tensor]]:
        def noted(*given: Any) -> dict[str, Tensor]:
            found = function(*given)
            seen.append(tuple(each.shape for each in found.values()))
            return found

        return noted

    monkeypatch.setattr(torch, "compile", compiled)
    assert bench("logistic", **COMPILED).failed == {}
    assert set(seen) == {((2, 10, 784), (2, 10))}


@pytest.mark.parametrize(
    "wrong",
    [{"model": "mpl"}, {"engines": ["fast"]}, {"engines": ["stacked:fp23"]}, {"engines": ["vmap", "graphed loop"]}],
)
def test_unknown_names(wrong: dict) -> None:
    with pytest.raises(InvalidInput):
        bench(**{"model": "logistic", "clients": 1, **wrong})


def test_ratios_are_between_ways_of_one_precision() -> None:
    speeds = {("plain loop", "tf32"): 10.0, ("vmap", "bf16"): 40.0, ("loop", "tf32"): 20.0, ("stacked", "tf32"): 50.0,
              ("stacked", "bf16"): 80.0, ("stacked", "fp16"): 90.0}  # fmt: skip
    assert ratios(speeds) == {
        "loop:tf32": {"plain loop": 2.0},
        "stacked:tf32": {"plain loop": 5.0},
        "stacked:bf16": {"vmap": 2.0},
    }


def test_a_table_compares_within_a_precision() -> None:
    ways = ["plain loop:fp32", "vmap:bf16", "stacked:fp32", "stacked:bf16"]
    table = bench("logistic", clients=2, batch=4, steps=1, rounds=1, engines=ways)
    compared = [line for line in table.remarks() if re.search(r"\dx ", line)]
    assert [re.sub(r"[\d.]+x", "_x", line) for line in compared] == [
        "stacked, all in fp32: _x plain loop",
        "stacked, all in bf16: _x vmap",
    ]


def test_on_a_gpu_every_precision_has_a_loop_in_a_cuda_graph() -> None:
    ways = contenders("cuda")
    assert {f"{name}:{precision}" for name in ("graphed loop", "stacked") for precision in PRECISIONS} <= set(ways)
    mapped = {f"{name}:{kind}" for name in ("vmap", "graphed vmap", "compiled vmap") for kind in ("tf32", "bf16")}
    assert {"plain loop:tf32", *mapped} <= set(ways) and mapped <= set(EVERY_WAY)


def test_what_fails_is_named_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(job: object) -> None:
        raise torch.OutOfMemoryError("no room\nfor so many")

    monkeypatch.setattr(baselines, "mapped", fail)
    small = ["--model", "logistic", "--clients", "1", "--batch", "2", "--steps", "1", "--device", "cpu"]
    chosen = [word for name in ("vmap", "plain loop") for word in ("--engine", name)]
    ran = CliRunner().invoke(app, ["bench", *small, *chosen, "--json"])
    assert ran.exit_code == 1
    written = json.loads(ran.stdout)
    assert written["failed"] == {"vmap:fp32": "OutOfMemoryError: no room"}
    assert [row["engine"] for row in written["rows"]] == ["plain loop"]
    assert "vmap:fp32: failed: OutOfMemoryError: no room" in CliRunner().invoke(app, ["bench", *small, *chosen]).stdout


def test_loops_train_the_librarys_lstm() -> None:
    """A user would not write out its steps; weights and mathematics are the same."""
    torch.manual_seed(0)
    ours = lstm((7,), 5, vocabulary=9, embedding=3, hidden=4).double()
    theirs = baselines.as_written(ours)
    assert isinstance(ours.recurrent, Recurrent)
    assert isinstance(theirs.recurrent, nn.LSTM) and not isinstance(theirs.recurrent, Recurrent)
    assert [name for name, _ in theirs.named_parameters()] == [name for name, _ in ours.named_parameters()]
    codes = torch.randint(9, (6, 7))
    pull = torch.randn(6, 5, dtype=torch.float64)
    results = []
    for each in (ours, theirs):
        output = each(codes)
        results.append([output, *torch.autograd.grad((output * pull).sum(), list(each.parameters()))])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-12)


def test_recurrent_layers_have_the_precision_asked_for() -> None:
    rnn = getattr(torch.backends.cudnn, "rnn", None)
    if rnn is None:
        pytest.skip("one switch for convolutions and recurrent layers")
    before = rnn.fp32_precision
    for precision, wanted in (("fp32", "ieee"), ("tf32", "tf32")):
        with float32_matmul_precision(precision, torch.device("cuda")):
            assert rnn.fp32_precision == torch.backends.cudnn.conv.fp32_precision == wanted
    assert rnn.fp32_precision == before


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("model", ["mlp", "cnn", "lstm", "resnet18_gn"])
def test_every_way_is_timed_on_a_gpu(model: str) -> None:
    ways = [f"{name}:{kind}" for kind in ("tf32", "bf16") for name in ("plain loop", "graphed loop", "stacked")]
    table = bench(model, clients=2, batch=4, steps=2, rounds=1, engines=ways, device="cuda")
    assert table.failed == {}
    assert [f"{row.engine}:{row.precision}" for row in table.rows] == ways


def test_documents_say_what_was_measured() -> None:
    for path, text in engine_docs.documents().items():
        assert path.read_text() == text, f"python -m benchmarks.engine_docs would change {path.name}"


def test_readme_compares_with_no_mapping_that_waits_for_the_host() -> None:
    cnn = engine_docs.Measured.read("cnn")
    assert ("vmap", "tf32") in cnn.client_steps and "torch.func.vmap" not in engine_docs.claim(cnn)
    known = cnn._replace(client_steps=cnn.client_steps | {("graphed vmap", "tf32"): 10_000.0})
    assert "3.0 times `torch.func.vmap` in a CUDA graph" in " ".join(engine_docs.claim(known).split())


def test_documents_compare_within_a_precision() -> None:
    cnn = engine_docs.Measured.read("cnn")
    speed = cnn.client_steps
    told = " ".join(engine_docs.claim(cnn).split())
    assert f"{speed['stacked', 'tf32'] / speed['jax', 'tf32']:.1f} times compiled JAX" in told
    assert f"{speed['stacked', 'bf16'] / speed['jax', 'tf32']:.1f} times" not in told
    rows = [[cell.strip() for cell in line.split("|")[2:-1]] for line in engine_docs.table().splitlines()[2:]]
    for precision, *baseline_cells, ours in rows:
        own = float(ours.strip("*").replace(",", ""))
        for cell in filter(None, baseline_cells):
            other, ratio = re.fullmatch(r"([\d,]+) \(([\d.]+)x\)", cell).groups()
            assert own / float(other.replace(",", "")) == pytest.approx(float(ratio), rel=0.06), precision


def test_a_user_s_own_module_is_timed_with_what_it_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modules, "SAMPLES", 4)
    job = modules.job_for(*modules.MODULES["cnn with dropout"], torch.device("cpu"), clients=2, batch=2, steps=1)
    for way in ("vmap:fp32", "plain loop:fp32"):
        row = row_of(way, job, rounds=1)
        assert row.how == way.partition(":")[0] and row.client_steps == pytest.approx(2e3 / row.ms)
