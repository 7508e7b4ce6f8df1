"""Operations of training on one sample, for runs of early versions: counted with the run's
model."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from stratafl.base.errors import InvalidInput
from stratafl.base.validation import name_and_params
from stratafl.models.registry import build, count_parameters
from stratafl.network.messages import training_flops
from stratafl.runs import StoredRun

IMAGES_28, IMAGES_32, TEXT = (1, 28, 28), (3, 32, 32), (80,)
SHAPES: Mapping[str, tuple[int, ...]] = {
    "cifar10": IMAGES_32, "cifar100": IMAGES_32, "cinic10": IMAGES_32, "mnist": IMAGES_28, "fashion_mnist": IMAGES_28,
    "emnist_letters": IMAGES_28, "shakespeare": TEXT, "digits": (1, 8, 8), "synthetic": (60,),
}  # fmt: skip
"""Shape of one sample by data set: a stored run is priced without its data."""


def flops_of(run: StoredRun, trained: int) -> float | None:
    """Operations of training on one sample; None if the model cannot be created again, or would not
    have as many parameters as were trained."""
    data, classes = run.config.get("data"), run.tree["classes"]
    shape = SHAPES.get(str(data.get("name"))) if isinstance(data, Mapping) else None
    if shape is None or not isinstance(run.config.get("model"), Mapping):
        return None
    try:
        name, params = name_and_params("model", run.config["model"])
        with torch.device("meta"):
            model = build(name, shape, len(classes), **params).eval()
            sample = torch.zeros((1, *shape), dtype=torch.long if shape == TEXT else torch.float32)
            flops = training_flops(lambda: model(sample))
    except (InvalidInput, RuntimeError, NotImplementedError, TypeError):
        return None
    parameters = count_parameters(model)
    # where nothing but models is sent, records do not tell parameters from buffers
    with_buffers = parameters + sum(b.numel() for b in model.buffers() if b.is_floating_point())
    return flops if trained in (parameters, with_buffers) else None
