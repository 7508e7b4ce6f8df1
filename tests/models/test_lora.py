"""Low-rank adapters: only they are trained, sent and stored for every client."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from stratafl.base.errors import InvalidInput
from stratafl.core.flat_module import check_frozen, frozen_digest
from stratafl.experiment.experiment import Experiment
from stratafl.experiment.loading import model_factory
from stratafl.models.lora import LowRank, adapters, merged
from stratafl.runs.session import RunSession
from stratafl.simulation.build import build
from stratafl.simulation.deployed import initial_model
from tests.flat import simulate

ENGINES = ["loop", "vmap", "stacked"]
WIDTH = 37
"""Width of the base's layers, which no other tensor has."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(6, WIDTH), nn.Linear(WIDTH, 3)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"q_proj": nn.Linear(WIDTH, WIDTH), "v_proj": nn.Linear(WIDTH, WIDTH)}) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = x + block["v_proj"](block["q_proj"](x).relu())
        return self.head(x)


def data() -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(1)
    inputs = torch.randn(80, 6, generator=random)
    return inputs, (inputs @ torch.randn(6, 3, generator=random)).argmax(dim=1)


def run(engine: str = "loop", make=lambda: adapters(Net(), ["q_proj", "v_proj"], rank=2), **more):
    settings = {"periods": [2, 3], "rounds": 3, "batch": 10, "engine": engine, "test": data()}
    return simulate(make, data(), torch.arange(80).chunk(4), "2x2", **settings | more)


# -- the module ------------------------------------------------------------------------------------


def test_new_adapters_keep_outputs_and_are_trained() -> None:
    torch.manual_seed(0)
    net = Net()
    before = net(data()[0])
    adapted = adapters(net, ["q_proj"], rank=2)
    assert adapted is net and torch.equal(adapted(data()[0]), before)
    trained = [name for name, parameter in adapted.named_parameters() if parameter.requires_grad]
    assert trained == [f"blocks.{block}.q_proj.lora_{part}.weight" for block in (0, 1) for part in "AB"]


@pytest.mark.parametrize(
    ("targets", "count"), [(["q_proj"], 2), (["blocks.1.*"], 2), (["blocks.0.v_proj", "head"], 2), (["*_proj"], 4)]
)
def test_targets_are_last_parts_names_or_patterns(targets: list[str], count: int) -> None:
    assert sum(isinstance(part, LowRank) for part in adapters(Net(), targets).modules()) == count


def test_named_parts_are_trained_themselves() -> None:
    adapted = adapters(Net(), ["q_proj"], train=["head", "embed.bias"])
    trained = {name for name, parameter in adapted.named_parameters() if parameter.requires_grad and "lora" not in name}
    assert trained == {"head.weight", "head.bias", "embed.bias"}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"targets": ["q_prj"]}, r"lora\.targets = 'q_prj'.*did you mean 'q_proj'"),
        ({"targets": []}, "at least one linear layer; this model has embed, head, q_proj, v_proj"),
        ({"targets": "q_proj"}, "must be a list"),
        ({"targets": [3]}, "must be a name"),
        ({"targets": ["q_proj"], "rank": 0}, r"lora\.rank"),
        ({"targets": ["q_proj"], "alpha": 0}, r"lora\.alpha"),
        ({"targets": ["q_proj"], "train": ["haed"]}, r"lora\.train.*did you mean 'head'"),
    ],
)
def test_invalid_adapters_raise_one_line(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message) as problem:
        adapters(Net(), **wrong)
    assert "\n" not in str(problem.value)


def test_shared_layer_gets_one_adapter() -> None:
    net = Net()
    net.blocks[1]["q_proj"] = net.blocks[0]["q_proj"]
    adapted = adapters(net, ["q_proj"])
    assert adapted.blocks[0]["q_proj"] is adapted.blocks[1]["q_proj"]
    plain = merged(adapted)
    assert type(plain.blocks[0]["q_proj"]) is nn.Linear and plain.blocks[0]["q_proj"] is plain.blocks[1]["q_proj"]


def test_both_names_of_a_layer_get_its_adapter() -> None:
    """One parent has the layer twice, where `named_children` gives it once."""
    net = nn.Module()
    net.first = net.second = nn.Linear(3, 3)
    adapted = adapters(net, ["first"])
    assert adapted.first is adapted.second and type(adapted.first) is LowRank
    plain = merged(adapted)
    assert plain.first is plain.second and type(plain.first) is nn.Linear


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_transformer_encoder_uses_adapters_in_evaluation() -> None:
    """PyTorch's fast path would read the weights of the layers and ignore the adapters."""
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1)
    adapted = adapters(encoder, ["linear1", "linear2"], rank=2).eval()
    x = torch.randn(2, 5, 8)
    with torch.no_grad():
        before = adapted(x)
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
        assert not torch.allclose(adapted(x), before)
        assert torch.allclose(merged(adapted)(x), adapted(x), atol=1e-5)


# -- peft ------------------------------------------------------------------------------------------


def same_as_peft(own: nn.Module, reference: nn.Module, inputs: Tensor, targets: list[str]) -> None:
    """Outputs and gradients, with the same adapters."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, lora_alpha=16, target_modules=targets, lora_dropout=0.0)
    reference = peft.get_peft_model(reference, config)
    own = adapters(own, targets, rank=4, alpha=16)
    own_parameters = {name: output for name, output in own.named_parameters() if output.requires_grad}
    reference_parameters = {name: output for name, output in reference.named_parameters() if output.requires_grad}
    assert [f"base_model.model.{name}".replace(".weight", ".default.weight") for name in own_parameters] == list(
        reference_parameters
    )
    with torch.no_grad():
        for one, other in zip(own_parameters.values(), reference_parameters.values(), strict=True):
            other.copy_(one.normal_(std=0.1))
    outputs = [getattr(outcome, "logits", outcome) for outcome in (own(inputs), reference(inputs))]
    assert torch.allclose(*outputs, rtol=1e-5, atol=1e-6)
    for output in outputs:
        output.square().mean().backward()
    for one, other in zip(own_parameters.values(), reference_parameters.values(), strict=True):
        assert torch.allclose(one.grad, other.grad, rtol=1e-4, atol=1e-7)
    plain = merged(own)(inputs)
    assert torch.allclose(getattr(plain, "logits", plain), outputs[0], rtol=1e-4, atol=1e-5)


def made_twice(make) -> list[nn.Module]:
    copies = []
    for _ in range(2):
        torch.manual_seed(0)
        copies.append(make().eval())
    return copies


def test_agrees_with_peft() -> None:
    pytest.importorskip("peft")
    same_as_peft(*made_twice(Net), data()[0], ["q_proj", "v_proj"])


@pytest.mark.filterwarnings("ignore:fan_in_fan_out")  # peft notices how such layers lie by itself
def test_agrees_with_peft_on_a_language_model() -> None:
    transformers, _ = pytest.importorskip("transformers"), pytest.importorskip("peft")
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=50, n_positions=16)
    codes = torch.randint(50, (2, 9), generator=torch.Generator().manual_seed(0))
    same_as_peft(*made_twice(lambda: transformers.GPT2LMHeadModel(config)), codes, ["c_attn"])


# -- a run -----------------------------------------------------------------------------------------


def test_engines_agree_and_base_weights_stay() -> None:
    results = [run(engine) for engine in ENGINES]
    assert [simulation.engine.how for simulation in results] == ENGINES
    rows = [simulation.run().models[0] for simulation in results]
    assert all(torch.allclose(rows[0], other, atol=1e-5) for other in rows[1:])
    result = results[0].result()
    adapter = 4 * 2 * 2 * WIDTH
    assert rows[0].shape[1] == adapter == results[0].flat.parameters
    start = run().result().module
    for name, value in result.module.state_dict().items():
        assert torch.equal(value, start.state_dict()[name]) == ("lora" not in name), name
    sent = result.communication.level(2)
    assert sent.bytes_up == 4 * adapter * 4 * 2 * 3, "4 clients, 2 meetings, 3 rounds, in float32"


def squares() -> set[int]:
    """Memory addresses of matrices of the base's size, with or without a client axis."""
    gc.collect()
    tensors = [
        tensor for tensor in gc.get_objects() if issubclass(type(tensor), Tensor) and tensor.device.type != "meta"
    ]
    square = [tensor for tensor in tensors if tensor.shape[-2:] == (WIDTH, WIDTH)]
    wraps = torch._C._functorch.is_functorch_wrapped_tensor
    # recordings hold tensors without memory
    real = [tensor for tensor in square if not wraps(tensor) and not isinstance(tensor, FakeTensor)]
    return {tensor.untyped_storage().data_ptr() for tensor in real}


@pytest.fixture
def few_objects() -> Iterator[None]:
    """No objects of other tests and of libraries among those that the garbage collector knows."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("few_objects")
@pytest.mark.parametrize("engine", ENGINES)
def test_base_weights_are_in_memory_once(engine: str) -> None:
    simulation, seen = None, []

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        if simulation is not None and not seen:
            seen.append(len(squares() - before))
        return nn.functional.cross_entropy(outputs, targets)

    before = squares()
    simulation = run(engine, loss=loss)
    assert len(squares() - before) == 4
    simulation.advance()
    assert seen == [4] and len(squares() - before) == 4


def test_checkpoints_hold_adapters_only(tmp_path: Path) -> None:
    result = run(save=tmp_path / "run", keep_state=True).run()
    stored = load_file(tmp_path / "run" / "model.safetensors")
    fresh = adapters(Net(), ["q_proj", "v_proj"], rank=2)
    fresh.load_state_dict(stored)
    assert torch.equal(fresh(data()[0]), result.module(data()[0]))
    kept = [load_file(path) for path in (tmp_path / "run" / "checkpoints").rglob("*.safetensors")]
    widths = {tensor.shape[-1] for tensors in kept for tensor in tensors.values() if tensor.dim() == 2}
    assert kept and widths <= {4 * 2 * 2 * WIDTH, 0, 1}


def test_run_is_not_resumed_with_another_base(tmp_path: Path) -> None:
    def adapted(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return adapters(Net(), ["q_proj"], rank=2)

    run(make=adapted(0), save=tmp_path / "run").run()
    run(make=adapted(0), save=tmp_path / "run").run()
    with pytest.raises(InvalidInput, match="frozen"):
        run(make=adapted(1), save=tmp_path / "run")


def test_initial_model_may_be_adapters_only() -> None:
    trained = run().run().module.state_dict()
    alone = {name: value for name, value in trained.items() if "lora" in name}
    first, second = (run(initial=values, rounds=1).run() for values in (trained, alone))
    assert torch.equal(first.models[0], second.models[0])


# -- a config --------------------------------------------------------------------------------------


MODEL = f"""
from torch import nn

def net(input_shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, {WIDTH}), nn.ReLU(), nn.Linear({WIDTH}, classes))
"""


def config(folder: Path, **model: Any) -> Experiment:
    (folder / "net.py").write_text(MODEL)
    return Experiment.from_table(
        {
            "tree": {"shape": "2x2"},
            "model": {"name": f"{folder / 'net.py'}:net", **model},
            "schedule": {"periods": [2, 2]},
            "rounds": 2,
        }
    )


def base(folder: Path) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(5)
    values = {"1.weight": (WIDTH, 64), "1.bias": (WIDTH,), "3.weight": (10, WIDTH), "3.bias": (10,)}
    weights = {name: 0.1 * torch.randn(shape, generator=random) for name, shape in values.items()}
    save_file(weights, folder / "base.safetensors")
    return weights


def test_config_loads_base_and_seeds_adapters(tmp_path: Path) -> None:
    weights = base(tmp_path)
    lora = {"rank": 2, "alpha": 4, "targets": ["1"], "train": ["3"]}
    settings = config(tmp_path, base=str(tmp_path / "base.safetensors"), lora=lora)
    first, again = (build(settings) for _ in range(2))
    assert first.flat.names == ["1.lora_A.weight", "1.lora_B.weight", "3.weight", "3.bias"]
    assert torch.equal(first.federation.levels[0].model, again.federation.levels[0].model)
    result = first.run().module.state_dict()
    assert torch.equal(result["1.base_layer.weight"], weights["1.weight"])
    assert not torch.equal(result["3.weight"], weights["3.weight"])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"lora": 8}, r"model\.lora.*must be a table"),
        ({"lora": {"targts": ["1"]}}, r"model\.lora key.*did you mean 'targets'"),
        ({"lora": {}}, "at least one linear layer"),
        ({"base": 3}, r"model\.base.*must be the path"),
        ({"base": "nowhere.safetensors"}, r"model\.base.*no such file"),
    ],
)
def test_invalid_config_raises_one_line(tmp_path: Path, wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        build(config(tmp_path, **wrong))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda values: values.pop("1.bias"), "lacks '1.bias'"),
        (lambda values: values.update(other=torch.zeros(1)), r"model\.base key.*'other'"),
        (lambda values: values.update({"1.bias": torch.zeros(3)}), r"model\.base\.1\.bias.*must have the shape"),
    ],
)
def test_base_file_must_match_the_model(tmp_path: Path, change: Any, message: str) -> None:
    values = base(tmp_path)
    change(values)
    save_file(values, tmp_path / "base.safetensors")
    build_model = model_factory(
        config(tmp_path, base=str(tmp_path / "base.safetensors")).model, lambda: ((1, 8, 8), 10)
    )
    with pytest.raises(InvalidInput, match=message):
        build_model()


def test_run_records_the_file_of_its_base(tmp_path: Path) -> None:
    base(tmp_path)
    settings = config(tmp_path, base=str(tmp_path / "base.safetensors"), lora={"rank": 2, "targets": ["1"]})
    session = RunSession.start(settings, "run", tmp_path / "runs")
    session.run()
    noted = json.loads((session.path / "run.json").read_text())["inputs"]["files"]
    assert str(tmp_path / "base.safetensors") in noted


def test_site_with_another_base_is_rejected(tmp_path: Path) -> None:
    lora = {"rank": 2, "targets": ["1"]}
    one, same, other = (
        initial_model(config(tmp_path, lora=lora).replace(seed=seed), (1, 8, 8), 10).flat for seed in (0, 0, 1)
    )
    check_frozen(same, frozen_digest(one))
    with pytest.raises(InvalidInput, match="frozen weights are others"):
        check_frozen(other, frozen_digest(one))
