"""A model's metrics without a run around it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from stratafl.core.losses import Loss
from stratafl.metrics.evaluation import CHUNK, Predict, evaluate, finalize_metrics
from stratafl.metrics.metrics import Metric


def evaluated(
    predict: Predict,
    loss: Loss,
    inputs: Tensor,
    targets: Tensor,
    chunk: int = CHUNK,
    further: Sequence[Metric] = (),
) -> dict[str, float]:
    """The metrics of a model on test data, as a run takes them."""
    return finalize_metrics([evaluate(predict, loss, inputs, targets, chunk, further)], further)
