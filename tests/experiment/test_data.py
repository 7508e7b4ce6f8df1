"""Data as a config asks for it, up to what the model sees."""

from __future__ import annotations

import pytest
import torch

from stratafl import InvalidInput, Topology
from stratafl.data.catalog.prepare import load
from stratafl.data.transforms import channels_first, flip_and_crop, normalise, rotate
from stratafl.experiment.experiment import Experiment
from stratafl.experiment.loading import load_data
from stratafl.experiment.sections import Data
from stratafl.simulation.build import build

TREE = Topology.of("2x2")


def test_only_training_images_are_turned_each_group_by_its_own_angle() -> None:
    plain = load_data(Data(), TREE, seed=1)
    turned = load_data(Data(rotation={"start": 0, "step": 90}), TREE, seed=1)
    digits = load("digits")
    stay, turn = turned.clients.of_range(0, 2), turned.clients.of_range(2, 4)
    assert torch.equal(turned.inputs[stay], plain.inputs[stay])
    expected = rotate(torch.tensor(digits.x_train[turn]), 90.0)
    assert torch.equal(turned.inputs[turn], normalise(channels_first(expected), digits.mean, digits.std))
    assert turned.test is not None and plain.test is not None
    assert torch.equal(turned.test.samples.head(1), plain.test.samples.head(1))


def test_augmented_batches_are_what_a_client_trains_on() -> None:
    def trained(augment: str) -> torch.Tensor:
        values = {"tree": {"shape": "2"}, "data": {"augment": augment}, "schedule": {"periods": [2]}}
        simulation = build(Experiment.from_table({**values, "model": {"name": "logistic"}, "rounds": 1}))
        if augment != "none":
            assert simulation.engine.training.augment is flip_and_crop
        return simulation.run().models[0]

    assert not torch.equal(trained("none"), trained("flip_and_crop"))
    assert torch.equal(trained("flip_and_crop"), trained("flip_and_crop"))


def test_synthetic_clients_learn() -> None:
    values = {
        "tree": {"shape": "2x3"},
        "data": {"source": "synthetic", "arguments": {"samples": 40, "alpha": [1.0, 0.0], "beta": 0.5, "features": 8}},
        "model": {"name": "logistic"},
        "schedule": {"periods": [2, 5]},
        "rounds": 10,
    }
    history = build(Experiment.from_table(values)).run().history
    assert history[-1].metrics["loss"] < history[0].metrics["loss"]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"augment": "flip"}, "data.augment = 'flip': unknown; did you mean 'flip_and_crop'"),
        ({"rotation": {"stop": 1}}, "data.rotation key = 'stop': unknown"),
        (
            {"source": "synthetic", "arguments": {"sample": 3}},
            "data.arguments key = 'sample': unknown; did you",
        ),
        ({"source": "synthetic", "arguments": {"alpha": [1.0]}}, "data.arguments.alpha"),
        ({"source": "synthetic", "augment": "flip_and_crop"}, "are for images"),
        ({"source": "synthetic", "partition": ["iid", "iid"]}, "made for each client"),
    ],
)
def test_what_does_not_fit_is_said(settings: dict, said: str) -> None:
    with pytest.raises(InvalidInput) as problem:
        load_data(Data(**settings), TREE, seed=0)
    assert said in str(problem.value)
