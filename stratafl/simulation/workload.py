"""The workload of a run, measured while it is set up; no result of the run depends on it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stratafl.base.rng import preserve_rng
from stratafl.core.client_update import ClientUpdate
from stratafl.core.rule import Rule
from stratafl.core.schedule import SyncSchedule
from stratafl.data.inputs import Inputs
from stratafl.engine.validation import ModelUnderTest
from stratafl.network.messages import MessageSizes, RecordedWorkload, message_sizes, scaled_sizes, training_flops
from stratafl.network.replay import leaf_steps
from stratafl.rules.checks import has_user_functions


def measured(
    subject: ModelUnderTest,
    inputs: Inputs,
    shared: tuple[Tensor, Tensor],
    rules: Sequence[Rule],
    update: ClientUpdate,
    schedule: SyncSchedule,
    samples: Sequence[int],
    batch: int | None,
) -> RecordedWorkload:
    """Measure the workload of clients with these numbers of samples.

    inputs: some samples, to count the model's operations.
    shared: rows of the parameters and buffers that are sent.
    """
    steps_N, samples_N = leaf_steps(samples, batch, schedule, update.epochs is not None)
    subject.flat.eval()
    return RecordedWorkload(
        parameters=subject.flat.parameters,
        buffers=len(subject.b_B),
        flops_per_sample=training_flops(lambda: subject.outputs(inputs[:1])),
        messages=_messages(rules, update, subject.flat.dtype, *shared),
        steps_N=steps_N,
        samples_N=samples_N,
    )


def _messages(
    rules: Sequence[Rule], update: ClientUpdate, dtype: torch.dtype, x_P: Tensor, b_B: Tensor
) -> MessageSizes | None:
    sizes = rules, len(x_P), len(b_B), update, dtype
    try:
        with preserve_rng(x_P.device):
            return message_sizes(*sizes, x_P.device) if any(map(has_user_functions, rules)) else scaled_sizes(*sizes)
    except Exception:
        # a user's rule or optimizer may fail with a single child, which the run need not have
        return None
