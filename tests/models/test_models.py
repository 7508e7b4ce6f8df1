"""Models: parameter counts, every data set's shapes, learning, and modules of the user's own."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

from stratafl.base.errors import InvalidInput
from stratafl.models import registry
from stratafl.models.registry import build, catalogue, count_parameters

RATES = {"lstm": 0.5, "resnet18_gn": 0.003}
COUNTS = {"mlp": 199_210, "cnn": 797_962, "resnet18_gn": 11_227_812, "lstm": 133_520}
SHAPES = {
    "digits": ((1, 8, 8), 10, ("logistic", "mlp")),
    "fashion_mnist": ((1, 28, 28), 10, ("logistic", "mlp", "cnn")),
    "emnist_letters": ((1, 28, 28), 26, ("logistic", "mlp", "cnn")),
    "cifar10": ((3, 32, 32), 10, ("logistic", "mlp", "cnn")),
    "cifar100": ((3, 32, 32), 100, ("resnet18_gn",)),
    "cinic10": ((3, 32, 32), 10, ("cnn",)),
    "shakespeare": ((80,), 80, ("lstm",)),
    "synthetic": ((60,), 10, ("logistic", "mlp")),
}


@pytest.fixture(autouse=True)
def one_thread():
    """Thousands of tiny operations lose more to waiting threads than they gain."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def batch(shape: tuple[int, ...], classes: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(0, classes, (size,), generator=generator)
    if shape == (80,):
        return torch.randint(0, classes, (size, *shape), generator=generator), y
    return torch.randn(size, *shape, generator=generator), y


def test_catalogue_lists_every_model_with_its_parameters():
    entries = {entry.name: entry for entry in catalogue()}
    assert set(entries) == {"logistic", *COUNTS}
    for name, count in COUNTS.items():
        assert entries[name].parameters == count
    for entry in entries.values():
        assert entry.description and "\n" not in entry.description
        if entry.name != "resnet18_gn":
            assert count_parameters(build(entry.name, entry.input_shape, entry.classes)) == entry.parameters


@pytest.mark.parametrize("data", SHAPES)
def test_models_train_on_the_shapes_of_each_data_set(data):
    shape, classes, names = SHAPES[data]
    for name in names:
        torch.manual_seed(0)
        model = build(name, shape, classes)
        x, y = batch(shape, classes, 2 if name == "resnet18_gn" else 6)
        optimizer = torch.optim.SGD(model.parameters(), lr=RATES.get(name, 0.02))
        losses = []
        for _ in range(3):
            logits = model(x)
            assert logits.shape == (len(x), classes)
            loss = nn.functional.cross_entropy(logits, y)
            optimizer.zero_grad()
            loss.backward()
            assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < losses[0], (name, losses)


@pytest.mark.filterwarnings("error:There is a performance drop")
@pytest.mark.parametrize(
    ("name", "shape", "params"),
    [
        ("mlp", (1, 6, 6), {"hidden": [5]}),
        ("cnn", (1, 16, 16), {}),
        pytest.param(
            "lstm",
            (80,),
            {"hidden": 4, "embedding": 3},
            # torch maps no LSTM of oneDNN's, and says that it takes one client after another
            marks=pytest.mark.filterwarnings("ignore:There is a performance drop"),
        ),
    ],
)
def test_models_can_be_mapped_over_clients(name, shape, params):
    models = [build(name, shape, 7, **params) for _ in range(2)]
    x, y = batch(shape, 7, 3)

    def loss(weights, x, y):
        return nn.functional.cross_entropy(functional_call(models[0], weights, (x,)), y)

    weights = [dict(model.named_parameters()) for model in models]
    stacked = {key: torch.stack([w[key].detach() for w in weights]) for key in weights[0]}
    gradients = vmap(grad(loss), in_dims=(0, None, None))(stacked, x, y)
    for row, model in enumerate(models):
        nn.functional.cross_entropy(model(x), y).backward()
        for key, parameter in model.named_parameters():
            torch.testing.assert_close(gradients[key][row], parameter.grad, rtol=1e-4, atol=1e-5)


def test_parameters_of_a_model_come_from_the_config():
    assert count_parameters(build("mlp", (4,), 3, hidden=[5])) == 4 * 5 + 5 + 5 * 3 + 3
    assert build("lstm", (10,), 7, vocabulary=30).embedding.num_embeddings == 30


def test_a_users_module_by_file_and_by_import_path(tmp_path, monkeypatch):
    source = (
        "from torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(self, classes, width=2):\n"
        "        super().__init__()\n"
        "        self.layer = nn.Linear(width, classes)\n"
        "def number(): return 3\n"
        "def fails(): return {}['key']\n"
        "def exits(): raise SystemExit(0)\n"
        "import functools\n"
        "cached = functools.cache(lambda: Net(3))\n"
        "part = functools.partial(Net, width=3)\n"
        "made = Net(3)\n"
        "from time import sleep\n"
    )
    (tmp_path / "my_own_model.py").write_text(source)
    by_file = build(f"{tmp_path}/my_own_model.py:Net", (2,), 5, width=4)
    assert by_file.layer.weight.shape == (5, 4)
    monkeypatch.syspath_prepend(tmp_path)
    assert build("my_own_model:Net", (2,), 5).layer.weight.shape == (5, 2)
    for name, message in (
        ("my_own_model:Nett", "did you mean 'Net'"),
        ("my_own_mode:Net", "cannot be imported"),
        (f"{tmp_path}/absent.py:Net", "cannot be imported"),
        ("my_own_model:number", "must make a torch.nn.Module"),
        ("my_own_model:fails", "cannot be made: KeyError: 'key'"),
        ("my_own_model:exits", "cannot be made: SystemExit: 0"),
        ("my_own_model:sleep", "a Python function that makes one"),
        ("my_own_model:made", "a Python function that makes one"),
        ("my_own_model:functools", "must be something to call, and is module"),
        ("time:sleep", "part of Python itself"),
        ("builtins:exit", "part of Python itself"),
        (":Net", "cannot be imported"),
        (f"{tmp_path}:Net", "cannot be imported"),
        ("\0.py:Net", "cannot be imported"),
    ):
        with pytest.raises(InvalidInput, match=message):
            build(name, (2,), 5)
    assert build("my_own_model:cached", (2,), 5).layer.weight.shape == (3, 2)
    assert build("my_own_model:part", (2,), 5).layer.weight.shape == (5, 3)
    with pytest.raises(InvalidInput, match=r"model key = 'widht'.*'width'"):
        build("my_own_model:Net", (2,), 5, widht=4)


@pytest.mark.parametrize(
    ("name", "shape", "params", "message"),
    [
        ("resnet18", (3, 32, 32), {}, "model.name = 'resnet18': .*did you mean 'resnet18_gn'"),
        ("cnn", (1, 8, 8), {}, r"input_shape = \(1, 8, 8\): cnn takes images of at least 16x16"),
        ("lstm", (3, 32, 32), {}, "input_shape = .*lstm takes sequences"),
        ("mlp", (4,), {"hiden": 3}, "model key = 'hiden': .*'hidden'"),
        ("mlp", (4,), {"hidden": [0]}, "hidden = .*above 0"),
        ("mlp", (4,), {"hidden": [10**30]}, "model.name = 'mlp': cannot be made"),
        ("mlp", (4,), {"classes": 3}, "model key = 'classes'"),
        ("resnet18_gn", (3, 32, 32), {"groups": 3}, "groups = 3: must be a divisor of 64"),
    ],
)
def test_bad_input_names_the_field(name, shape, params, message):
    with pytest.raises(InvalidInput, match=message):
        build(name, shape, 10, **params)


def test_the_name_of_a_shipped_model_cannot_be_taken():
    def mlp(input_shape, classes):
        return nn.Flatten()

    with pytest.raises(InvalidInput, match=r"register = 'mlp': .*another"):
        registry.register(example=((1,), 2))(mlp)
    assert build("mlp", (4,), 3)(torch.zeros(1, 4)).shape == (1, 3)
