"""Properties of every registered rule, shipped or added by a user."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from stratafl.rules.registry import entries
from tests.flat import simulate
from tests.slow import slow

SHAPES = {1: 3, 2: [2, 3], 3: [[2, 1], [1, 2]]}
PERIODS = {1: [2], 2: [2, 2], 3: [2, 1, 2]}
every_rule = pytest.mark.parametrize("name", [entry.name for entry in entries()])
every_depth = pytest.mark.parametrize("depth", [slow(1), slow(2), 3])


def federation(name: str, depth: int, *, everywhere: bool = False, broken: int | None = None, **more):
    leaves = {1: 3, 2: 5, 3: 6}[depth]
    random = torch.Generator().manual_seed(1)
    inputs = torch.randn(leaves * 7, 4, generator=random)
    targets = (inputs @ torch.randn(4, 3, generator=random)).argmax(dim=1)
    parts = [np.arange(leaf * 7, leaf * 7 + 4 + leaf % 3) for leaf in range(leaves)]
    if broken is not None:
        inputs[parts[broken]] = float("nan")
    return simulate(
        lambda: nn.Linear(4, 3),
        (inputs, targets),
        parts,
        SHAPES[depth],
        [name] * depth if everywhere else name,
        periods=PERIODS[depth],
        rounds=3,
        batch=3,
        weights="samples",
        **{"seed": 4, **more},
    )


def bits_of(result) -> list[bytes]:
    corrections = [c for c in result.corrections if c is not None]
    return [rows.numpy().tobytes() for rows in [*result.models, *corrections]]


def is_finite(result) -> bool:
    return all(bool(torch.isfinite(rows).all()) for rows in result.models)


@every_rule
@every_depth
def test_same_seed_same_bits(name: str, depth: int) -> None:
    first = federation(name, depth).run()
    assert bits_of(first) == bits_of(federation(name, depth).run())
    assert bits_of(first) != bits_of(federation(name, depth, seed=5).run())
    assert is_finite(first)


@every_rule
@every_depth
def test_works_on_every_edge_at_once(name: str, depth: int) -> None:
    result = federation(name, depth, everywhere=True).run()
    assert is_finite(result)
    assert not torch.equal(result.models[0][0], result.models[-1][0])


@every_rule
@every_depth
def test_partial_participation(name: str, depth: int) -> None:
    sim = federation(name, depth, participation=[1] * depth)
    seen = set()
    for _ in sim:
        active = sim.federation.levels[-1].active_N
        assert active.sum() == 1
        seen.add(int(active.argmax()))
    assert len(seen) > 1
    result = sim.result()
    assert is_finite(result)
    assert result.refused == {}


@every_rule
@every_depth
def test_a_client_with_nan_is_rejected_alone(name: str, depth: int) -> None:
    result = federation(name, depth, broken=0).run()
    client = result.tree.names[-1][0]
    syncs = 3 * int(np.prod(PERIODS[depth][:-1]))
    assert result.refused == {client: syncs}
    healthy = [torch.isfinite(rows).all(dim=1) for rows in result.models]
    assert all(bool(mask.all()) for mask in healthy[:-1])
    assert healthy[-1].tolist() == [False] + [True] * (result.tree.leaves - 1)
    for correction in result.corrections:
        assert correction is None or bool(torch.isfinite(correction).all())


@every_rule
def test_learns(name: str) -> None:
    sim = federation(name, 2, test=None)
    sim.rounds = 10
    supply = sim.engine.training.samples
    inputs, targets = supply.inputs_N, supply.targets_N
    sim.evaluator.test = (inputs, targets)
    losses = [r.metrics["loss"] for r in sim]
    assert losses[-1] < losses[0]
