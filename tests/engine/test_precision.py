"""16 bits by autocast, where clients train one after another or through `torch.func`."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stratafl.base.errors import InvalidInput
from stratafl.core.flat_module import FlatModule
from stratafl.data.batches import batch_indices
from stratafl.engine import kernels
from stratafl.engine.gradients import CompiledGradients, GradientTask
from stratafl.engine.kernels import reference
from stratafl.engine.module_profile import ModuleProfile
from stratafl.engine.precision import HALF_DTYPES, Precision, cudnn_disabled, float32_matmul_precision
from stratafl.engine.selection import select_gradient_method
from tests.flat import simulate

PARTS = [list(range(0, 7)), list(range(7, 15)), list(range(15, 24))]
SCALE = {"bf16": 1.0, "fp16": 4096.0}


def data() -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(1)
    return torch.randn(24, 1, 6, 6, generator=random), torch.arange(24) % 3


class Tied(nn.Module):
    """Uses a weight twice, which autocast then casts once."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(36, 36), nn.Linear(36, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.inner(self.inner(x.flatten(1)).relu()))


MODULES = {
    "cnn": lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)),
    "batch norm": lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 3)),
    "layer norm": lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.LayerNorm(8), nn.Linear(8, 3)),
    "tied": Tied,
}


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODULES[name]()


def run(module: nn.Module, engine: str, precision: str, **more):
    settings = {"periods": [3], "rounds": 2, "batch": 4, "engine": engine, "precision": precision}
    return simulate(module, data(), PARTS, 3, "hfedavg", **settings | more)


def plain_rounds(module: nn.Module, precision: str) -> nn.Module:
    """Federated averaging of three clients in plain PyTorch, with autocast as it recommends."""
    (inputs, targets), scale = data(), SCALE.get(precision, 1.0)
    module = copy.deepcopy(module).train()
    for round in range(2):
        trained = []
        for client, part in enumerate(PARTS):
            local = copy.deepcopy(module)
            for chosen in batch_indices(0, client, len(part), round * 3, 3, 4):
                numbers = torch.tensor(part)[chosen]
                local.zero_grad()
                with torch.autocast("cpu", HALF_DTYPES[precision]) if precision in HALF_DTYPES else nullcontext():
                    loss = F.cross_entropy(local(inputs[numbers]), targets[numbers])
                (loss * scale).backward()
                with torch.no_grad():
                    for parameter in local.parameters():
                        parameter -= 0.1 * parameter.grad / scale
            trained.append(local.state_dict())
        mean = {name: torch.stack([values[name].float() for values in trained]).mean(dim=0) for name in trained[0]}
        module.load_state_dict(mean)
    return module


def apart(one: nn.Module, other: nn.Module) -> float:
    rows = [torch.cat([p.detach().flatten() for p in module.parameters()]) for module in (one, other)]
    return float((rows[0] - rows[1]).norm() / rows[1].norm())


@pytest.mark.parametrize("precision", list(HALF_DTYPES))
@pytest.mark.parametrize("name", MODULES)
def test_the_loop_is_plain_autocast(name: str, precision: str) -> None:
    simulation = run(made(name), "loop", precision)
    result = simulation.run()
    assert (simulation.engine.precision, simulation.notes) == (precision, ())
    assert {value.dtype for value in result.module.state_dict().values()} <= {torch.float32, torch.int64}
    assert apart(result.module, plain_rounds(made(name), precision)) < 1e-6
    assert 1e-6 < apart(result.module, plain_rounds(made(name), "fp32")) < 0.02


@pytest.mark.parametrize("precision", list(HALF_DTYPES))
@pytest.mark.parametrize("name", ["cnn", "tied"])
def test_vmap_rounds_like_autocast(name: str, precision: str) -> None:
    simulation = run(made(name), "vmap", precision)
    result = simulation.run()
    assert (simulation.engine.how, simulation.engine.precision, simulation.notes) == ("vmap", precision, ())
    assert apart(result.module, plain_rounds(made(name), precision)) < 5e-3
    assert apart(result.module, plain_rounds(made(name), "fp32")) > 1e-6


@pytest.mark.parametrize("engine", ["loop", "vmap", "stacked"])
def test_same_bits_twice(engine: str) -> None:
    first, second = (run(made("cnn"), engine, "bf16").run().models[-1] for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize("engine", ["vmap", "stacked"])
def test_a_fallback_keeps_the_precision(engine: str, capsys) -> None:
    module = made("batch norm")
    next(module.parameters()).register_hook(lambda gradient: gradient)  # which only the loop follows
    simulation = run(module, engine, "bf16")
    assert (simulation.engine.name, simulation.engine.precision) == ("loop", "bf16")
    assert "honoured" not in capsys.readouterr().err
    assert torch.equal(simulation.run().models[-1], run(made("batch norm"), "loop", "bf16").run().models[-1])


def test_a_cast_weight_is_not_reused_for_another_client() -> None:
    """The library keeps what it cast as long as an autocast of the user's own goes on."""
    simulation = run(made("tied"), "loop", "bf16")
    simulation.federation.begin_round()
    work = simulation.federation.train_request(0, 3, 0)
    expected = simulation.engine.train(work).model_AP
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(simulation.engine.train(work).model_AP, expected)


@pytest.mark.parametrize("engine", ["loop", "vmap"])
@pytest.mark.parametrize("precision", ["tf32", "bf16", "fp16"])
def test_float64_is_kept_with_a_note(engine: str, precision: str, capsys) -> None:
    simulation = run(made("tied").double(), engine, precision)
    assert simulation.engine.precision == "fp32"
    assert f"precision {precision!r} is not honoured: {engine} computes in fp32" in capsys.readouterr().err


class OnlySingle(nn.Linear):
    """Adds to a float32 tensor what must be of the same type."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros(len(x), 3).index_add(0, torch.arange(len(x)), super().forward(x.flatten(1)))


class Huge(nn.Linear):
    """Gives scores beyond the range of fp16."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(1)) * 1e5 * super().forward(x.flatten(1))


@pytest.mark.parametrize(
    ("kind", "precision", "reason"),
    [(OnlySingle, "bf16", "cannot be computed in it here"), (Huge, "fp16", "beyond what it can hold")],
)
def test_16_bits_are_refused_with_the_reason(kind: type, precision: str, reason: str) -> None:
    torch.manual_seed(0)
    with pytest.raises(InvalidInput, match=f"precision.*{reason}") as refused:
        run(kind(36, 3), "loop", precision)
    assert len(str(refused.value).splitlines()) == 1 or refused.type is not InvalidInput
    run(kind(36, 3), "loop", "fp32")


@pytest.mark.parametrize("largest", [16.0, 1e6])
@pytest.mark.parametrize("precision", ["bf16"])
def test_a_method_is_tried_in_its_precision(
    precision: Precision, largest: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A linear layer cuts large gradients off in this precision, and is exact in fp32."""

    def linear(x_CBI: Tensor, w_COI: Tensor, b_CO: Tensor | None, relu: bool, compute: Precision) -> Tensor:
        y = reference.linear(x_CBI, w_COI, b_CO, relu, compute)
        if compute == precision:
            y.register_hook(lambda gradient: gradient.clamp(-largest, largest))
        return y

    cutting = kernels.TORCH_BACKEND._replace(
        ops={**reference.REFERENCE_OPS, "linear": linear}, writes_gradients=frozenset()
    )
    monkeypatch.setattr(kernels, "TORCH_BACKEND", cutting)
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
    task = GradientTask(FlatModule(module), F.mse_loss, torch.randn(4, 5), 300 * torch.randn(4, 1), precision)
    method, how = select_gradient_method(task, ("stacked", "vmap"), ModuleProfile())
    assert how == "stacked"
    assert isinstance(method, CompiledGradients) and method.use_kernels == (largest > 300)


def test_evaluation_is_in_the_models_own_type() -> None:
    seen = []

    class Noting(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            scores = super().forward(x.flatten(1))
            if not self.training:
                seen.append(scores.dtype)
            return scores

    torch.manual_seed(0)
    run(Noting(36, 3), "loop", "bf16", test=data()).run()
    assert set(seen) == {torch.float32}


def test_cudnn_can_be_disabled_in_every_precision() -> None:
    """While an engine computes, the library's own way to set several switches fails."""
    before = torch.backends.cudnn.enabled
    with float32_matmul_precision("fp32", torch.device("cuda")):
        with cudnn_disabled():
            assert not torch.backends.cudnn.enabled
        assert torch.backends.cudnn.enabled is before
