"""Sizes of a method's messages, and floating-point operations of training on one sample."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from stratafl.base.dispatch import FlopCounter, library_layers_disabled
from stratafl.base.topology import Topology
from stratafl.core.client_training import TrainResult
from stratafl.core.client_update import ClientUpdate
from stratafl.core.rule import Rule
from stratafl.federation.events import LevelSynchronized, Observer
from stratafl.federation.federation import Federation
from stratafl.federation.sync import answers_reports, edge_levels


@dataclass(frozen=True)
class LevelMessages:
    """Messages between the nodes of one edge level."""

    upload_bytes: int
    """Bytes of a child's update."""
    download_bytes: int
    """Bytes of a parent's message: its model with buffers and the rule's data."""
    answered: bool
    """Whether children get the parent's new model at once, as the answer to their update."""
    answered_when_relayed: bool
    """Whether they get it even if a newer one is about to come from above."""
    has_correction: bool
    """Whether subtrees add a correction that nodes below need."""
    from_gradient: bool
    """Whether corrections are set from gradients after a synchronisation above."""


STORED_KEYS = {
    "report": "upload_bytes",
    "parcel": "download_bytes",
    "is_answered": "answered",
    "is_answered_below": "answered_when_relayed",
    "has_correction": "has_correction",
    "from_gradient": "from_gradient",
}
"""Field of `LevelMessages` by its key in stored runs."""


@dataclass(frozen=True)
class MessageSizes:
    """Message sizes of a run: one entry per edge level, root first."""

    levels: tuple[LevelMessages, ...]
    model: int
    """Bytes of a model, a gradient or a correction alone."""

    @staticmethod
    def of(values: Mapping[str, Any]) -> MessageSizes:
        """Create sizes from the result of `to_plain`, also by way of JSON."""
        levels = ({STORED_KEYS[key]: value for key, value in level.items()} for level in values["levels"])
        return MessageSizes(tuple(LevelMessages(**level) for level in levels), int(values["model"]))

    def to_plain(self) -> dict[str, Any]:
        """Return the sizes as JSON stores them."""
        levels = [{key: getattr(level, name) for key, name in STORED_KEYS.items()} for level in self.levels]
        return {"levels": levels, "model": self.model}

    def edge(self, level: int) -> LevelMessages:
        return self.levels[level - 1]


UNIT = 64
"""Number of parameters and of buffer values of the small models that sizes are extrapolated
from."""


class _SizeProbe(Observer):
    """Observer that keeps the message sizes of each level."""

    def __init__(self) -> None:
        self.sizes: dict[int, tuple[int, int]] = {}

    def on_level_synchronized(self, event: LevelSynchronized) -> None:
        self.sizes[event.level] = event.counts.upload_bytes, event.counts.broadcast_bytes


def scaled_sizes(
    rules: Sequence[Rule],
    parameters: int,
    buffers: int,
    update: ClientUpdate | None = None,
    dtype: torch.dtype = torch.float32,
) -> MessageSizes:
    """Extrapolate message sizes to a model from those of small models.

    This holds for rules of the package, whose messages are whole rows of parameters and buffers and
    single numbers. It takes as long for a large model as for a small one.
    """
    small, more_parameters, more_buffers = (
        message_sizes(rules, UNIT * p, UNIT * b, update, dtype) for p, b in ((1, 1), (2, 1), (1, 2))
    )

    def scaled(size: Callable[[MessageSizes], int]) -> int:
        first = size(small)
        per_parameter, per_buffer = (size(more_parameters) - first) // UNIT, (size(more_buffers) - first) // UNIT
        return first + per_parameter * (parameters - UNIT) + per_buffer * (buffers - UNIT)

    levels = tuple(
        replace(
            small.levels[m],
            upload_bytes=scaled(lambda sizes, m=m: sizes.levels[m].upload_bytes),  # type: ignore[misc]
            download_bytes=scaled(lambda sizes, m=m: sizes.levels[m].download_bytes),  # type: ignore[misc]
        )
        for m in range(len(rules))
    )
    return MessageSizes(levels, scaled(lambda sizes: sizes.model))


def message_sizes(
    rules: Sequence[Rule],
    parameters: int,
    buffers: int,
    update: ClientUpdate | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
) -> MessageSizes:
    """Measure message sizes by one round of a federation with a model of this size."""
    probe = _SizeProbe()
    tree = Topology.of("x".join("1" for _ in rules))
    x_P, b_B = (torch.zeros(values, dtype=dtype, device=device) for values in (parameters, buffers))
    edges = edge_levels(rules, seed=0)
    federation = Federation(tree, edges, x_P, b_B, client_update=update, observers=[probe])
    federation.begin_round()
    if federation.needs_gradients:
        federation.restart_from_gradients(x_P[None])
    path_AP = x_P[None] if federation.has_path else x_P[None, :0]
    client_rows = federation.levels[-1].client_rows
    result = TrainResult(model_AP=x_P[None], buffers_AB=b_B[None], path_AP=path_AP, client_rows=client_rows)
    federation.apply_training(result, lr_sum=1.0)
    federation.synchronize(1)
    levels = []
    for level, rule in enumerate(rules, 1):
        upload_bytes, download_bytes = probe.sizes[level]
        levels.append(
            LevelMessages(
                upload_bytes=upload_bytes,
                download_bytes=download_bytes,
                answered=answers_reports(rule, is_overwritten=False),
                answered_when_relayed=answers_reports(rule, is_overwritten=True),
                has_correction=federation.levels[level].correction is not None,
                from_gradient=rule.from_gradient is not None,
            )
        )
    return MessageSizes(tuple(levels), x_P.element_size() * parameters)


BACKWARD = 3
"""Ratio of the operations of training to those of a forward pass: the backward pass takes twice as
many."""


@dataclass(frozen=True, eq=False)
class RecordedWorkload:
    """Operations of a run's clients and sizes of its messages, as stored in run.json."""

    parameters: int
    """Number of trained values of the model, with those that never leave a client."""
    buffers: int
    flops_per_sample: float | None
    """Operations of training on one sample; None if they cannot be counted."""
    messages: MessageSizes | None
    """Message sizes; None if the rules could not be tried."""
    steps_N: np.ndarray
    """Local steps of each client between two synchronisations."""
    samples_N: np.ndarray
    """Samples that each client takes in one step."""

    def to_plain(self) -> dict[str, Any]:
        """Return the workload as JSON stores it: lists have one number if that is the same for all
        clients."""
        return {
            "parameters": self.parameters,
            "buffers": self.buffers,
            "flops_per_sample": self.flops_per_sample,
            "messages": None if self.messages is None else self.messages.to_plain(),
            "steps_per_sync": _shortened(self.steps_N),
            "samples_per_step": _shortened(self.samples_N),
        }

    @staticmethod
    def of(values: Mapping[str, Any], depth: int, clients: int) -> RecordedWorkload:
        """Create the workload from the result of `to_plain`.

        Raises KeyError, TypeError or ValueError if it is not that of a tree with this depth and
        number of clients.
        """
        messages, flops = values["messages"], values["flops_per_sample"]
        sizes = None if messages is None else MessageSizes.of(messages)
        if sizes is not None and len(sizes.levels) != depth:
            raise ValueError("messages of another tree")
        if flops is not None and not 0 < float(flops) < math.inf:
            raise ValueError("no number of operations")
        return RecordedWorkload(
            parameters=int(values["parameters"]),
            buffers=int(values["buffers"]),
            flops_per_sample=None if flops is None else float(flops),
            messages=sizes,
            steps_N=_per_client(values["steps_per_sync"], clients),
            samples_N=_per_client(values["samples_per_step"], clients),
        )


def training_flops(forward: Callable[[], object]) -> float | None:
    """Count the operations of training on one sample; None where nothing can be counted.

    forward: lets the model compute the outputs of one sample.
    """
    try:
        with library_layers_disabled(), FlopCounter() as counter, torch.no_grad():
            forward()
    except Exception:
        # a model that fails under a dispatch mode can still be trained
        return None
    return float(BACKWARD * counter.total) or None


def _shortened(values_N: np.ndarray) -> list[int]:
    return values_N[: 1 if (values_N == values_N[0]).all() else None].tolist()


def _per_client(values: list[int], clients: int) -> np.ndarray:
    if len(values) not in (1, clients):
        raise ValueError("clients of another tree")
    if min(values) < 0:
        raise ValueError("less than nothing")
    return np.broadcast_to(np.array(values, dtype=np.int64), (clients,)).copy()
