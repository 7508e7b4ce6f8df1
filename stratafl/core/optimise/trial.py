"""A user's own stages and optimiser, tried on two rows before anything is trained: what remembers
more than its state, or looks at a client's neighbours, is refused.

Shape suffixes: N clients, P parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from stratafl.base.errors import InvalidInput, guarded
from stratafl.base.rng import ALIKE, seeded
from stratafl.core.flat import same_values
from stratafl.core.leaf import Leaf, Stage, clip, corrections, decay
from stratafl.core.optimise.optimiser import KNOWN, Optimiser


def try_leaf(leaf: Leaf, parameters: int, dtype: torch.dtype, device: torch.device) -> None:
    """Refuse a chain whose result is not a function of what it is given: tried on rows like those
    it will see."""
    x_2P = torch.linspace(-1.0, 1.0, 2 * parameters, dtype=dtype, device=device).view(parameters, 2).T.contiguous()
    try_stages(leaf.stages, x_2P)
    try_optimiser(leaf.optimiser, x_2P)


def try_stages(stages: Sequence[Stage], x_2P: Tensor) -> None:
    """Refuse a stage whose result depends on what it was called with before: engines call it in
    different orders, and clients would share what it remembers. It is tried on two clients in
    turn."""
    d_2P = x_2P.flip(1)
    for stage in stages:
        if stage is corrections or type(stage) in (clip, decay):
            continue
        name = getattr(stage, "__name__", type(stage).__name__)
        results = []
        for client in (0, 1, 0, 0):
            rows = slice(client, client + 1)
            with seeded(ALIKE, devices=True), guarded("leaf.stages", name, "fails on a row of numbers"):
                results.append(stage(d_2P[rows].clone(), x_2P[rows].clone(), lambda x, g: g))
                if not isinstance(results[-1], Tensor) or results[-1].shape != x_2P[rows].shape:
                    raise ValueError("it must give a direction of the model's shape")
        first, _, *again = results
        if not all(same_values(first, each) for each in again):
            allowed = (
                "remembers what it was called with before: a chain's memory is its optimiser's (docs/optimisers.md)"
            )
            raise InvalidInput("leaf.stages", name, allowed)


def try_optimiser(optimiser: Optimiser, x_NP: Tensor) -> None:
    """Refuse an optimiser whose functions are not pure, or treat a row by what stands beside it. It
    is tried for two steps on these rows, together and one by one."""
    if type(optimiser) in KNOWN.values():
        return
    name = type(optimiser).__name__
    with guarded("leaf.optimiser", name, "must be a value that does not change, such as a NamedTuple"):
        hash(optimiser)
    with guarded("leaf.optimiser", name, "fails on a row of numbers"):
        together = _two_steps(optimiser, x_NP)
        again = _two_steps(optimiser, x_NP)
        alone = [_two_steps(optimiser, x_NP[i : i + 1]) for i in range(len(x_NP))]
    if not all(same_values(a, b) for a, b in zip(together, again, strict=True)):
        raise InvalidInput(
            "leaf.optimiser", name, "gives another result when called again: all it remembers must be in its state"
        )
    if not all(
        torch.allclose(a, torch.cat(b), rtol=1e-3, equal_nan=True)
        for a, b in zip(together, zip(*alone, strict=True), strict=True)
    ):
        raise InvalidInput("leaf.optimiser", name, "must do to a client's row what it does to it among others")


def _two_steps(optimiser: Optimiser, x_NP: Tensor) -> list[Tensor]:
    """The states and changes of two steps."""
    state, found = optimiser.init(x_NP), []
    for factor in (1.0, -0.5):
        given = {**state, "x": x_NP, "direction": factor * x_NP.flip(1)}
        before = {key: rows.clone() for key, rows in given.items()}
        stepped = optimiser.step(state, given["direction"], x_NP, 0.1)
        if not (isinstance(stepped, tuple) and len(stepped) == 2 and isinstance(stepped[0], Mapping)):
            raise ValueError("step must return two things, the next state and what is subtracted from the models")
        state, change_NP = stepped
        for key, rows in given.items():
            if not same_values(rows, before[key]):
                raise ValueError(f"step changes {key} in place")
        for key, rows in {**state, "change": change_NP}.items():
            if not isinstance(rows, Tensor) or rows.dim() != 2 or len(rows) != len(x_NP):
                raise ValueError(f"{key} must be a matrix with {len(x_NP)} rows, one per client")
        if change_NP.shape != x_NP.shape or state.keys() != before.keys() - {"x", "direction"}:
            raise ValueError("step must give a state like the one of init, and a change of the model's shape")
        found += [*(rows for _, rows in sorted(state.items())), change_NP]
    return found
