"""Sizes of a method's messages, and floating-point operations of training on a sample."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from stratafl.base.topology import Tree
from stratafl.core.client_training import TrainResult
from stratafl.core.client_update import Leaf
from stratafl.core.rule import Rule
from stratafl.federation.events import LevelSynchronized, Observer
from stratafl.federation.federation import Federation
from stratafl.federation.sync import answers_reports, edge_levels


@dataclass(frozen=True)
class LevelMessages:
    """What the nodes of one edge level send each other."""

    report: int
    """Bytes of a child's message."""
    parcel: int
    """Bytes of what a parent gives: its model with buffers and the rule's note."""
    is_answered: bool
    """Whether children get the parent's new model for their report."""
    is_answered_below: bool
    """Whether they do even where a newer one is about to come from above."""
    has_correction: bool
    """Whether subtrees add a correction, which nodes below must hear of."""
    from_gradient: bool
    """Whether corrections are set from gradients after a meeting above."""


@dataclass(frozen=True)
class MessageSizes:
    """Those of a run: one entry per edge level, root first."""

    levels: tuple[LevelMessages, ...]
    model: int
    """Bytes of a model, a gradient or a correction alone."""

    @staticmethod
    def of(values: Mapping[str, Any]) -> MessageSizes:
        """From what `dataclasses.asdict` made of it, also by way of JSON."""
        return MessageSizes(tuple(LevelMessages(**each) for each in values["levels"]), int(values["model"]))

    def edge(self, level: int) -> LevelMessages:
        return self.levels[level - 1]


UNIT = 64
"""Parameters, and buffer values, of a model that message sizes are learnt from."""


class _SizeProbe(Observer):
    """Notes what is sent at each level's meeting."""

    def __init__(self) -> None:
        self.met_at: dict[int, tuple[int, int]] = {}

    def on_sync(self, event: LevelSynchronized) -> None:
        self.met_at[event.level] = event.counts.upload_bytes, event.counts.broadcast_bytes


def scaled_sizes(
    rules: Sequence[Rule], parameters: int, buffers: int, leaf: Leaf | None = None, dtype: torch.dtype = torch.float32
) -> MessageSizes:
    """Message sizes of a model with so many parameters and buffer values, from those of small
    models: for rules of the package, whose messages are whole rows of these and single numbers.

    A model of any size takes as long as a small one.
    """
    small, more_parameters, more_buffers = (
        message_sizes(rules, UNIT * p, UNIT * b, leaf, dtype) for p, b in ((1, 1), (2, 1), (1, 2))
    )

    def scaled(size: Callable[[MessageSizes], int]) -> int:
        first = size(small)
        per_parameter, per_buffer = (size(more_parameters) - first) // UNIT, (size(more_buffers) - first) // UNIT
        return first + per_parameter * (parameters - UNIT) + per_buffer * (buffers - UNIT)

    levels = tuple(
        replace(
            small.levels[m],
            report=scaled(lambda sizes, m=m: sizes.levels[m].report),  # type: ignore[misc]
            parcel=scaled(lambda sizes, m=m: sizes.levels[m].parcel),  # type: ignore[misc]
        )
        for m in range(len(rules))
    )
    return MessageSizes(levels, scaled(lambda sizes: sizes.model))


def message_sizes(
    rules: Sequence[Rule],
    parameters: int,
    buffers: int,
    leaf: Leaf | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
) -> MessageSizes:
    """Message sizes of a model with so many parameters and buffer values, on rows of that size."""
    scale = _SizeProbe()
    tree = Tree.of("x".join("1" for _ in rules))
    x_P, b_B = (torch.zeros(values, dtype=dtype, device=device) for values in (parameters, buffers))
    edges = edge_levels(rules, seed=0)
    federation = Federation(tree, edges, x_P, b_B, client_update=leaf, observers=[scale])
    federation.begin_round()
    if federation.needs_gradients:
        federation.restart_from_gradients(x_P[None])
    path_AP = x_P[None] if federation.has_path else x_P[None, :0]
    client_rows = federation.levels[-1].client_rows
    result = TrainResult(model_AP=x_P[None], buffers_AB=b_B[None], path_AP=path_AP, client_rows=client_rows)
    federation.apply_training(result, lr_sum=1.0)
    federation.synchronize(1)
    found = []
    for level, rule in enumerate(rules, 1):
        report, parcel = scale.met_at[level]
        found.append(
            LevelMessages(
                report=report,
                parcel=parcel,
                is_answered=answers_reports(rule, is_overwritten=False),
                is_answered_below=answers_reports(rule, is_overwritten=True),
                has_correction=federation.levels[level].correction is not None,
                from_gradient=rule.from_gradient is not None,
            )
        )
    return MessageSizes(tuple(found), x_P.element_size() * parameters)


BACKWARD = 3
"""Training takes so many times the operations of looking: forward, and twice that backward."""


@dataclass(frozen=True, eq=False)
class RecordedWorkload:
    """What a run's clients compute, and how large its messages are."""

    parameters: int
    """Values of the model that are trained, with those that never leave a client."""
    buffers: int
    flops_per_sample: float | None
    """Operations of training on one sample; None where they cannot be counted."""
    messages: MessageSizes | None
    """None where the rules could not be tried."""
    steps_N: np.ndarray
    """Local steps of each client between two synchronisations."""
    samples_N: np.ndarray
    """Samples that each client takes in one step."""

    def as_plain(self) -> dict[str, Any]:
        """As JSON has it: a list with one number where that is the same for all clients."""
        return {
            "parameters": self.parameters,
            "buffers": self.buffers,
            "flops_per_sample": self.flops_per_sample,
            "messages": None if self.messages is None else asdict(self.messages),
            "steps_per_sync": _shortened(self.steps_N),
            "samples_per_step": _shortened(self.samples_N),
        }

    @staticmethod
    def of(values: Mapping[str, Any], depth: int, clients: int) -> RecordedWorkload:
        """From what `as_plain` made of it; raises KeyError, TypeError or ValueError where it is not
        that of a tree with so many edge levels and clients."""
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
            steps_N=_each(values["steps_per_sync"], clients),
            samples_N=_each(values["samples_per_step"], clients),
        )


def training_flops(look: Callable[[], object]) -> float | None:
    """Operations of training on one sample, with a function that lets the model look at one; None
    where nothing can be counted."""
    try:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            look()
    except Exception:
        # whatever a model cannot bear about being watched is no reason not to train it
        return None
    return float(BACKWARD * counter.get_total_flops()) or None


def _shortened(values_N: np.ndarray) -> list[int]:
    return values_N[: 1 if (values_N == values_N[0]).all() else None].tolist()


def _each(values: list[int], clients: int) -> np.ndarray:
    if len(values) not in (1, clients):
        raise ValueError("clients of another tree")
    if min(values) < 0:
        raise ValueError("less than nothing")
    return np.broadcast_to(np.array(values, dtype=np.int64), (clients,)).copy()
