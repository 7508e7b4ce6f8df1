"""Selecting a gradient method as an engine does, with the module's profile."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stratafl.core.client_training import ClientTraining
from stratafl.core.flat_module import FlatModule
from stratafl.core.losses import Loss
from stratafl.data.dataset import ClientIndex, InMemorySamples
from stratafl.data.inputs import Inputs
from stratafl.engine.gradients import BatchedGradients, GradientTask
from stratafl.engine.module_profile import profile_module
from stratafl.engine.selection import select_gradient_method
from tests.flat import client_options, update_of


def select(
    flat: FlatModule, loss: Loss, inputs: Inputs, targets: Tensor, **options: Any
) -> tuple[BatchedGradients | None, str]:
    samples = InMemorySamples(inputs, targets)
    training = ClientTraining(
        flat=flat, loss=loss, samples=samples, clients=ClientIndex.from_lists([torch.arange(len(targets))]),
        client_update=update_of(client_options(0.1)), batch_size=None, sampling="shuffle", seed=0,
    )  # fmt: skip
    task = GradientTask(flat, loss, inputs, targets, **options)
    return select_gradient_method(task, ("stacked", "vmap"), profile_module(training))
