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
from torch import Tensor
from typer.testing import CliRunner

from benchmarks.speed import measure as module
from benchmarks.speed import modules, publish, torch_baselines
from benchmarks.speed.__main__ import app
from benchmarks.speed.h200 import EVERY_WAY
from benchmarks.speed.measure import compare_engines, default_contenders, measure
from benchmarks.speed.results import BenchmarkRow, BenchmarkTable, TablePrinter, ratios
from benchmarks.speed.roofline import Rates
from stratafl.base.errors import InvalidInput
from stratafl.engine import kernels
from stratafl.engine.precision import PRECISIONS, float32_matmul_precision
from tests.cli.test_widths import WIDTHS, check


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SAMPLES", 10)


@pytest.mark.parametrize("model", ["logistic", "mlp"])
def test_every_contender_is_timed(model: str) -> None:
    table = compare_engines(model, clients=4, batch=4, steps=4, rounds=1)
    assert [f"{row.engine}:{row.precision}" for row in table.rows] == default_contenders("cpu")
    for row in table.rows:
        assert row.ms > 0 and 0 < row.roofline < 1
        assert row.client_steps == pytest.approx(4e3 / row.ms)
        assert row.peak_bytes is None
    stacked = table.rows[-1]
    assert (
        stacked.how == "stacked"
        and list(stacked.stages_ms) == ["train", "meet"]
        and min(stacked.stages_ms.values()) > 0
    )
    written = json.loads(json.dumps(table.as_dict()))
    assert written["model"] == model and written["failed"] == {}
    assert list(written["ratios"]) == ["stacked:fp32"]


def test_every_kernel_has_a_category() -> None:
    """A kernel without a category would be counted as torch's own."""
    sources = [ast.parse(path.read_text()) for path in Path(kernels.__file__).parent.glob("*.py")]
    functions = [node for source in sources for node in ast.walk(source) if isinstance(node, ast.FunctionDef)]
    compiled = [node for node in functions if any("triton.jit" in ast.unparse(by) for by in node.decorator_list)]
    calls = [node for function in compiled for node in ast.walk(function) if isinstance(node, ast.Call)]
    inner = {ast.unparse(node.func) for node in calls}
    assert {node.name for node in compiled} - inner == set(module.KERNEL_CATEGORIES)


def test_operations_are_counted() -> None:
    table = compare_engines("logistic", clients=1, batch=4, steps=1, rounds=1, engines=["loop"])
    # forward and the weights' gradient; the inputs need none
    assert table.operations == 2 * (2 * 4 * 784 * 10)
    assert table.parameters == 7850
    assert table.bytes["fp32"] > 7 * 4 * 7850


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch maps no LSTM of oneDNN's
def test_images_and_text() -> None:
    torch.manual_seed(0)
    for name in ("cnn", "lstm"):
        table = compare_engines(name, clients=1, batch=2, steps=1, rounds=1, engines=["plain loop", "vmap", "stacked"])
        assert [row.how for row in table.rows] == ["plain loop", "vmap", "stacked"]


COMPILED = {"clients": 2, "batch": 4, "steps": 3, "rounds": 1, "engines": ["compiled vmap"]}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")  # torch's compiler imports it
def test_a_compiled_mapping_is_timed() -> None:
    table = compare_engines("logistic", **COMPILED)
    assert table.failed == {} and [row.how for row in table.rows] == ["compiled vmap"]


def test_compiled_vmap_compiles_the_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[torch.Size, ...]] = []

    def compiled(function: Callable[..., dict[str, Tensor]], dynamic: bool) -> Callable[..., dict[str, Tensor]]:
        def noted(*arguments: Any) -> dict[str, Tensor]:
            gradients = function(*arguments)
            seen.append(tuple(gradient.shape for gradient in gradients.values()))
            return gradients

        return noted

    monkeypatch.setattr(torch, "compile", compiled)
    assert compare_engines("logistic", **COMPILED).failed == {}
    assert set(seen) == {((2, 10, 784), (2, 10))}


@pytest.mark.parametrize(
    "wrong",
    [{"model": "mpl"}, {"engines": ["fast"]}, {"engines": ["stacked:fp23"]}, {"engines": ["vmap", "graphed loop"]}],
)
def test_unknown_names(wrong: dict) -> None:
    with pytest.raises(InvalidInput):
        compare_engines(**{"model": "logistic", "clients": 1, **wrong})


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
    table = compare_engines("logistic", clients=2, batch=4, steps=1, rounds=1, engines=ways)
    compared = [line for line in table.remarks() if re.search(r"\dx ", line)]
    assert [re.sub(r"[\d.]+x", "_x", line) for line in compared] == [
        "stacked, all in fp32: _x plain loop",
        "stacked, all in bf16: _x vmap",
    ]


def test_on_a_gpu_every_precision_has_a_loop_in_a_cuda_graph() -> None:
    ways = default_contenders("cuda")
    assert {f"{name}:{precision}" for name in ("graphed loop", "stacked") for precision in PRECISIONS} <= set(ways)
    mapped = {f"{name}:{kind}" for name in ("vmap", "graphed vmap", "compiled vmap") for kind in ("tf32", "bf16")}
    assert {"plain loop:tf32", *mapped} <= set(ways) and mapped <= set(EVERY_WAY)


def test_failed_contender_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(job: object) -> None:
        raise torch.OutOfMemoryError("no room\nfor so many")

    monkeypatch.setattr(torch_baselines, "vmap_baseline", fail)
    small = ["--model", "logistic", "--clients", "1", "--batch", "2", "--steps", "1", "--device", "cpu"]
    chosen = [word for name in ("vmap", "plain loop") for word in ("--engine", name)]
    ran = CliRunner().invoke(app, [*small, *chosen, "--json"])
    assert ran.exit_code == 1
    written = json.loads(ran.stdout)
    assert written["failed"] == {"vmap:fp32": "OutOfMemoryError: no room"}
    assert [row["engine"] for row in written["rows"]] == ["plain loop"]
    assert "vmap:fp32: failed: OutOfMemoryError: no room" in CliRunner().invoke(app, [*small, *chosen]).stdout


def test_recurrent_layers_have_the_precision_asked_for() -> None:
    rnn = getattr(torch.backends.cudnn, "rnn", None)
    if rnn is None:
        pytest.skip("one switch for convolutions and recurrent layers")
    before = rnn.fp32_precision
    for precision, expected in (("fp32", "ieee"), ("tf32", "tf32")):
        with float32_matmul_precision(precision, torch.device("cuda")):
            assert rnn.fp32_precision == torch.backends.cudnn.conv.fp32_precision == expected
    assert rnn.fp32_precision == before


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("model", ["mlp", "cnn", "lstm", "resnet18_gn"])
def test_every_way_is_timed_on_a_gpu(model: str) -> None:
    ways = [f"{name}:{kind}" for kind in ("tf32", "bf16") for name in ("plain loop", "graphed loop", "stacked")]
    table = compare_engines(model, clients=2, batch=4, steps=2, rounds=1, engines=ways, device="cuda")
    assert table.failed == {}
    assert [f"{row.engine}:{row.precision}" for row in table.rows] == ways


def test_documents_match_the_results() -> None:
    for path, text in publish.documents().items():
        assert path.read_text() == text, f"python -m benchmarks.speed.publish would change {path.name}"


def test_summary_omits_vmap_without_cuda_graph() -> None:
    cnn = publish.BenchmarkResult.read("cnn")
    assert ("vmap", "tf32") in cnn.client_steps and "torch.func.vmap" not in publish.claim(cnn)
    with_graph = cnn._replace(client_steps=cnn.client_steps | {("graphed vmap", "tf32"): 10_000.0})
    assert "3.0 times as fast as `torch.func.vmap` in a CUDA graph" in " ".join(publish.claim(with_graph).split())


def test_documents_compare_within_a_precision() -> None:
    cnn = publish.BenchmarkResult.read("cnn")
    speed = cnn.client_steps
    sentence = " ".join(publish.claim(cnn).split())
    assert f"{speed['stacked', 'tf32'] / speed['jax', 'tf32']:.1f} times as fast as compiled JAX" in sentence
    assert f"{speed['stacked', 'bf16'] / speed['jax', 'tf32']:.1f} times" not in sentence
    rows = [[cell.strip() for cell in line.split("|")[2:-1]] for line in publish.table().splitlines()[2:]]
    for precision, *baseline_cells, own_cell in rows:
        own = float(own_cell.strip("*").replace(",", ""))
        for cell in filter(None, baseline_cells):
            other, ratio = re.fullmatch(r"([\d,]+) \(([\d.]+)x\)", cell).groups()
            assert own / float(other.replace(",", "")) == pytest.approx(float(ratio), rel=0.06), precision


def test_module_with_dropout_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modules, "SAMPLES", 4)
    job = modules.job_for(*modules.MODULES["cnn with dropout"], torch.device("cpu"), clients=2, batch=2, steps=1)
    for way in ("vmap:fp32", "plain loop:fp32"):
        row = measure(way, job, rounds=1)
        assert row.how == way.partition(":")[0] and row.client_steps == pytest.approx(2e3 / row.ms)


@pytest.mark.parametrize("width", WIDTHS)
def test_rows_fit_a_terminal_of_any_width(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    row = BenchmarkRow("graphed loop", "bf16", "", 12_345.678, 1_234_567.0, 139 * 2**30, 0.123, {}, {})
    rates = Rates({"bf16": 1.0}, 1.0)
    table = BenchmarkTable("resnet18_gn", 1, 100, 50, 20, "NVIDIA H200", "2", 1.0, {}, rates, [], {})
    watch = TablePrinter()
    watch(table)
    assert "resnet18_gn, 100 clients" in capsys.readouterr().out.replace("\n", " "), "before anything is measured"
    for number in range(2):
        table.rows.append(row)
        watch(table)
        shown = capsys.readouterr().out
        check(shown, width, "graphed loop", "12345.678", "1,234,567", "12.3%")
        assert shown.count("graphed loop") == 1, f"row {number} comes when it is measured, and once"
