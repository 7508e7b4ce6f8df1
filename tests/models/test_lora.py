"""Adapters beside a base that stays as it is: they alone are trained, sent and stored for every
client."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from stratafl import simulate
from stratafl.base.errors import InvalidInput
from stratafl.config.network import network
from stratafl.config.schema import Config
from stratafl.config.setup import experiment, initial_model
from stratafl.core.flat_module import check_frozen, frozen_digest
from stratafl.models.lora import LowRank, adapters, merged
from stratafl.runs.launch import Launch

ENGINES = ["loop", "vmap", "stacked"]
WIDTH = 37
"""Of the base's layers: a number that nothing else has."""


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


def test_a_new_adapter_changes_nothing_and_only_it_is_trained() -> None:
    torch.manual_seed(0)
    net = Net()
    before = net(data()[0])
    made = adapters(net, ["q_proj"], rank=2)
    assert made is net and torch.equal(made(data()[0]), before)
    trained = [name for name, each in made.named_parameters() if each.requires_grad]
    assert trained == [f"blocks.{block}.q_proj.lora_{part}.weight" for block in (0, 1) for part in "AB"]


@pytest.mark.parametrize(
    ("targets", "count"), [(["q_proj"], 2), (["blocks.1.*"], 2), (["blocks.0.v_proj", "head"], 2), (["*_proj"], 4)]
)
def test_targets_are_last_parts_names_or_patterns(targets: list[str], count: int) -> None:
    assert sum(isinstance(part, LowRank) for part in adapters(Net(), targets).modules()) == count


def test_a_part_may_be_trained_whole() -> None:
    made = adapters(Net(), ["q_proj"], train=["head", "embed.bias"])
    trained = {name for name, each in made.named_parameters() if each.requires_grad and "lora" not in name}
    assert trained == {"head.weight", "head.bias", "embed.bias"}


@pytest.mark.parametrize(
    ("wrong", "told"),
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
def test_what_does_not_fit_is_one_line(wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidInput, match=told) as problem:
        adapters(Net(), **wrong)
    assert "\n" not in str(problem.value)


def test_a_layer_used_in_two_places_stays_one() -> None:
    net = Net()
    net.blocks[1]["q_proj"] = net.blocks[0]["q_proj"]
    made = adapters(net, ["q_proj"])
    assert made.blocks[0]["q_proj"] is made.blocks[1]["q_proj"]
    plain = merged(made)
    assert type(plain.blocks[0]["q_proj"]) is nn.Linear and plain.blocks[0]["q_proj"] is plain.blocks[1]["q_proj"]


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_the_library_s_encoder_uses_them_in_evaluation_too() -> None:
    """It would read its layers' weights itself, past the adapters."""
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1)
    made = adapters(encoder, ["linear1", "linear2"], rank=2).eval()
    x = torch.randn(2, 5, 8)
    with torch.no_grad():
        before = made(x)
        for name, each in made.named_parameters():
            if "lora_B" in name:
                each.normal_()
        assert not torch.allclose(made(x), before)
        assert torch.allclose(merged(made)(x), made(x), atol=1e-5)


# -- peft ------------------------------------------------------------------------------------------


def same_as_peft(ours: nn.Module, theirs: nn.Module, inputs: Tensor, targets: list[str]) -> None:
    """Outputs and gradients, with the same adapters."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, lora_alpha=16, target_modules=targets, lora_dropout=0.0)
    theirs = peft.get_peft_model(theirs, config)
    ours = adapters(ours, targets, rank=4, alpha=16)
    mine = {name: each for name, each in ours.named_parameters() if each.requires_grad}
    yours = {name: each for name, each in theirs.named_parameters() if each.requires_grad}
    assert [f"base_model.model.{name}".replace(".weight", ".default.weight") for name in mine] == list(yours)
    with torch.no_grad():
        for one, other in zip(mine.values(), yours.values(), strict=True):
            other.copy_(one.normal_(std=0.1))
    outputs = [getattr(made, "logits", made) for made in (ours(inputs), theirs(inputs))]
    assert torch.allclose(*outputs, rtol=1e-5, atol=1e-6)
    for each in outputs:
        each.square().mean().backward()
    for one, other in zip(mine.values(), yours.values(), strict=True):
        assert torch.allclose(one.grad, other.grad, rtol=1e-4, atol=1e-7)
    plain = merged(ours)(inputs)
    assert torch.allclose(getattr(plain, "logits", plain), outputs[0], rtol=1e-4, atol=1e-5)


def made_twice(make) -> list[nn.Module]:
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        made.append(make().eval())
    return made


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


def test_engines_agree_and_the_base_stays() -> None:
    results = [run(engine) for engine in ENGINES]
    assert [simulation.engine.description for simulation in results] == ENGINES
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
    """Where in memory there are matrices of the base's size, those of all clients at once among
    them."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if issubclass(type(each), Tensor) and each.device.type != "meta"]
    square = [each for each in tensors if each.shape[-2:] == (WIDTH, WIDTH)]
    wraps = torch._C._functorch.is_functorch_wrapped_tensor
    # recordings hold tensors without memory
    real = [each for each in square if not wraps(each) and not isinstance(each, FakeTensor)]
    return {each.untyped_storage().data_ptr() for each in real}


@pytest.mark.parametrize("engine", ENGINES)
def test_the_base_is_held_once(engine: str) -> None:
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


def test_a_run_folder_has_the_whole_model_and_checkpoints_adapters_alone(tmp_path: Path) -> None:
    result = run(save=tmp_path / "run").run()
    whole = load_file(tmp_path / "run" / "model.safetensors")
    fresh = adapters(Net(), ["q_proj", "v_proj"], rank=2)
    fresh.load_state_dict(whole)
    assert torch.equal(fresh(data()[0]), result.module(data()[0]))
    kept = [load_file(path) for path in (tmp_path / "run" / "checkpoints").rglob("*.safetensors")]
    widths = {each.shape[-1] for tensors in kept for each in tensors.values() if each.dim() == 2}
    assert kept and widths <= {4 * 2 * 2 * WIDTH, 0, 1}


def test_a_run_does_not_go_on_with_another_base(tmp_path: Path) -> None:
    def made(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return adapters(Net(), ["q_proj"], rank=2)

    run(make=made(0), save=tmp_path / "run").run()
    run(make=made(0), save=tmp_path / "run").run()
    with pytest.raises(InvalidInput, match="frozen"):
        run(make=made(1), save=tmp_path / "run")


def test_a_start_may_be_of_adapters_alone_or_of_everything() -> None:
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


def config(folder: Path, **model: Any) -> Config:
    (folder / "net.py").write_text(MODEL)
    return Config.of(
        {
            "tree": {"shape": "2x2"},
            "model": {"name": f"{folder / 'net.py'}:net", **model},
            "schedule": {"periods": [2, 2]},
            "run": {"rounds": 2},
        }
    )


def base(folder: Path) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(5)
    values = {"1.weight": (WIDTH, 64), "1.bias": (WIDTH,), "3.weight": (10, WIDTH), "3.bias": (10,)}
    made = {name: 0.1 * torch.randn(shape, generator=random) for name, shape in values.items()}
    save_file(made, folder / "base.safetensors")
    return made


def test_a_config_has_a_base_from_a_file_and_adapters_of_its_seed(tmp_path: Path) -> None:
    weights = base(tmp_path)
    lora = {"rank": 2, "alpha": 4, "targets": ["1"], "train": ["3"]}
    settings = config(tmp_path, base=str(tmp_path / "base.safetensors"), lora=lora)
    first, again = (experiment(settings) for _ in range(2))
    assert first.flat.names == ["1.lora_A.weight", "1.lora_B.weight", "3.weight", "3.bias"]
    assert torch.equal(first.federation.levels[0].model, again.federation.levels[0].model)
    result = first.run().module.state_dict()
    assert torch.equal(result["1.base_layer.weight"], weights["1.weight"])
    assert not torch.equal(result["3.weight"], weights["3.weight"])


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"lora": 8}, r"model\.lora.*must be a table"),
        ({"lora": {"targts": ["1"]}}, r"model\.lora key.*did you mean 'targets'"),
        ({"lora": {}}, "at least one linear layer"),
        ({"base": 3}, r"model\.base.*must be the path"),
        ({"base": "nowhere.safetensors"}, r"model\.base.*no such file"),
    ],
)
def test_a_config_s_mistakes_are_one_line(tmp_path: Path, wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidInput, match=told):
        experiment(config(tmp_path, **wrong))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda values: values.pop("1.bias"), "lacks '1.bias'"),
        (lambda values: values.update(other=torch.zeros(1)), r"model\.base key.*'other'"),
        (lambda values: values.update({"1.bias": torch.zeros(3)}), r"model\.base\.1\.bias.*must have the shape"),
    ],
)
def test_a_base_must_fit(tmp_path: Path, change: Any, told: str) -> None:
    values = base(tmp_path)
    change(values)
    save_file(values, tmp_path / "base.safetensors")
    made = network(dict(config(tmp_path, base=str(tmp_path / "base.safetensors")).model), (1, 8, 8), 10)
    with pytest.raises(InvalidInput, match=told):
        made()


def test_a_changed_base_is_noticed_where_a_run_goes_on(tmp_path: Path) -> None:
    base(tmp_path)
    settings = config(tmp_path, base=str(tmp_path / "base.safetensors"), lora={"rank": 2, "targets": ["1"]})
    launch = Launch.new(settings, "run", tmp_path / "runs")
    launch.run()
    noted = json.loads((launch.folder.path / "run.json").read_text())["inputs"]["files"]
    assert str(tmp_path / "base.safetensors") in noted


def test_a_site_with_another_base_is_refused(tmp_path: Path) -> None:
    lora = {"rank": 2, "targets": ["1"]}
    one, same, other = (
        initial_model(Config.of({**config(tmp_path, lora=lora).as_dict(), "run": {"seed": seed}}), (1, 8, 8), 10).flat
        for seed in (0, 0, 1)
    )
    check_frozen(same, frozen_digest(one))
    with pytest.raises(InvalidInput, match="frozen weights are others"):
        check_frozen(other, frozen_digest(one))
