"""Captured programs run on the device of their inputs without waiting for the host, so that a step
can become a CUDA graph. Tested without a GPU by meta tensors, which have no values to wait for."""

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

FEW, CLIENTS, META = 4, 2, torch.device("meta")
QUICK = ["encoder layer with dropout", "slices by their places", "decoder with masks", "embedding"]


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in ZOO if name not in OTHERWISE],
)
def test_no_step_waits_for_the_host(name: str) -> None:
    task = problem(ZOO[name], META)
    flat, inputs_B = FlatModule(task.module), task.inputs[:FEW]
    rows = (torch.empty(CLIENTS, len(row), dtype=flat.dtype, device=META) for row in flat.flatten_module(flat.module))
    named = flat.unflatten(*rows)
    state = {**dict(flat.module.named_parameters()), **dict(flat.module.named_buffers())}
    shared = {name: value.detach() for name, value in state.items() if name not in named}
    inputs_CB = map_tensors(lambda value: value.expand(CLIENTS, *value.shape).clone(), inputs_B)
    client_C, step = (torch.empty(shape, dtype=torch.long, device=META) for shape in ((CLIENTS,), ()))
    with float32_matmul_precision("fp32", torch.device("cuda")), torch.no_grad():
        program = BatchedProgram(flat, inputs_B, all_outputs=True)
        outputs = output_tensors(program(named, shared, inputs_CB, RandomSource(ClientStream(0, client_C, step))))
    assert outputs and {output.device for output in outputs} == {META}
