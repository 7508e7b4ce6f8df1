"""A recorded module runs where its inputs are, and nothing of a step waits for the host, which
would keep it from becoming a CUDA graph: seen without a GPU, by tensors on a device that has no
values."""

from __future__ import annotations

import pytest
import torch

from stratafl.core.flat_module import FlatModule
from stratafl.core.losses import output_tensors
from stratafl.data.inputs import map_tensors
from stratafl.engine.compiler.program import BatchedProgram
from stratafl.engine.precision import float32_matmul_precision
from stratafl.engine.random_streams import ClientStream, RandomSource
from tests.engine.plain import problem
from tests.engine.test_zoo import OTHERWISE
from tests.engine.zoo import ZOO

FEW, CLIENTS, ELSEWHERE = 4, 2, torch.device("meta")
QUICK = ["encoder layer with dropout", "GPT-2", "slices by their places", "decoder with masks", "embedding"]


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in ZOO if name not in OTHERWISE],
)
def test_no_step_waits_for_the_host(name: str) -> None:
    given = problem(ZOO[name], ELSEWHERE)
    flat, one = FlatModule(given.module), given.inputs[:FEW]
    rows = (
        torch.empty(CLIENTS, len(row), dtype=flat.dtype, device=ELSEWHERE) for row in flat.flatten_module(flat.module)
    )
    named = flat.unflatten(*rows)
    own = {**dict(flat.module.named_parameters()), **dict(flat.module.named_buffers())}
    shared = {name: value.detach() for name, value in own.items() if name not in named}
    inputs_CB = map_tensors(lambda each: each.expand(CLIENTS, *each.shape).clone(), one)
    client_C, step = (torch.empty(shape, dtype=torch.long, device=ELSEWHERE) for shape in ((CLIENTS,), ()))
    with float32_matmul_precision("fp32", torch.device("cuda")), torch.no_grad():
        program = BatchedProgram(flat, one, all_outputs=True)
        outputs = output_tensors(program(named, shared, inputs_CB, RandomSource(ClientStream(0, client_C, step))))
    assert outputs and {each.device for each in outputs} == {ELSEWHERE}
