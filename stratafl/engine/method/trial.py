"""A few clients on which a method to get gradients is tried before it is believed.

Shape suffixes: C clients, B batch, P parameters, Z buffer values.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from stratafl.base.errors import pass_on_no_room
from stratafl.core.flat_module import Flat, copied
from stratafl.core.losses import Loss
from stratafl.data.inputs import Inputs, mapped, typed
from stratafl.engine import ops
from stratafl.engine.capture.recorded import Recorded
from stratafl.engine.draws.mode import drawing
from stratafl.engine.draws.stream import Stream
from stratafl.engine.gradients import Stacked, ordered
from stratafl.engine.habits import Rounding
from stratafl.engine.method.differentiate import Batch, Differentiate


class Trial(NamedTuple):
    """Some clients whose weights, buffers and batches differ, and the gradients and buffers a
    module gives each of them alone."""

    flat: Flat
    x_CP: Tensor
    b_CZ: Tensor
    batch: Batch
    expected_CP: Tensor
    expected_CZ: Tensor
    """What becomes of the buffers."""
    tolerance: float
    """How large the difference's norm may be, in terms of the expected one's."""

    def gradients(self, method: Differentiate, flat: Flat) -> tuple[Tensor, Tensor]:
        """What a method gives these clients, all in the type of `flat`, and their buffers after."""
        if isinstance(method, Stacked | Recorded):
            method.poisoned = True
        # copies: a module or a loss may write into what it is given
        batch = _typed(self.batch, flat.dtype)
        batch = batch._replace(inputs_CB=batch.inputs_CB.clone(), targets_CB=batch.targets_CB.clone())
        x_CP, b_CZ = (each.to(flat.dtype, copy=True) for each in (self.x_CP, self.b_CZ))
        return ordered(method, flat)(x_CP, b_CZ, batch).g_CP, b_CZ

    def agrees(self, method: Differentiate) -> bool:
        got_CP, got_CZ = self.gradients(method, self.flat)
        pairs = (got_CP, self.expected_CP), (got_CZ, self.expected_CZ)
        return all(self._near(got, expected, self.tolerance) for got, expected in pairs)

    def agrees_coarsely(self, method: Differentiate, flat: Flat) -> bool:
        """Whether the gradients are also near in the precision that the method computes in, all in
        the type of `flat`."""
        got_CP, _ = self.gradients(method, flat)
        return self._near(got_CP, self.expected_CP, max(self.tolerance, COARSE[method.compute]))

    @staticmethod
    def _near(got: Tensor, expected: Tensor, tolerance: float) -> bool:
        off = torch.where(got == expected, torch.zeros_like(got), got - expected)  # infinities that agree
        size_C = torch.where(expected.isfinite(), expected, torch.zeros_like(expected)).norm(dim=1)
        # which what is no number never is
        return bool((off.norm(dim=1) / size_C.clamp(min=1e-30) <= tolerance).all())


CLIENTS = 3
"""How many a trial has: two have batches of one length, since the library may keep the values of
one alone where they are."""
LARGE = 50_000_000
"""Parameters of a module, frozen ones with them, of which no copy in float64 is made for a
trial."""
TOLERANCE = {torch.float64: 1e-9, torch.float32: 3e-3}
"""In float64 sums in another order are all that may differ; in float32 also which side of a kink a
value lies on."""
COARSE: dict[ops.Compute, float] = {"tf32": 0.2, "fp16": 0.2, "bf16": 0.5}
"""In these precisions: seven times what small modules with kinks were off by in 16 bits on a CPU,
by torch's own autocast alike. It is for what is cut off, overflows or is not computed at all."""
COARSEST = 5e-2
"""Whatever a module, or a part of it, computes in."""


def trials(
    flat: Flat, loss: Loss, x_CP: Tensor, b_CZ: Tensor, inputs: Inputs, targets: Tensor, draws: bool
) -> list[Trial]:
    """What a method to get gradients must pass: in float64 where module and loss allow it, and in
    the module's own type where that has operations of its own. `draws`: whether it draws."""
    tolerance = TOLERANCE.get(flat.dtype, COARSEST)

    def trial(flat: Flat, tolerance: float, batch: Batch) -> Trial:
        x, b = x_CP.to(flat.dtype), b_CZ.to(flat.dtype)
        own, rounding, batch, kept = [], Rounding(), _typed(batch, flat.dtype), b.clone()
        for client, length in enumerate(batch.length_C):
            mine, labels = batch.inputs_CB[client, :length].clone(), batch.targets_CB[client, :length].clone()
            rows = x[client].clone(), kept[client]

            @contextmanager
            def watched() -> Iterator[None]:
                with drawing(Stream(0, client, 0), x.device, flat.module), rounding:
                    yield

            own.append(flat.gradient(*rows, mine, labels, loss, within=watched if draws else lambda: rounding))
        return Trial(flat, x, b, batch, torch.stack(own), kept, max(tolerance, min(100 * rounding.eps, COARSEST)))

    own_type = [trial(flat, tolerance, batch) for batch in _batches(inputs, targets)]
    if flat.dtype == torch.float64 or sum(p.numel() for p in flat.module.parameters()) > LARGE:
        return own_type
    try:
        double = Flat(copied(flat.module).double())
        exact = [trial(double, TOLERANCE[torch.float64], batch) for batch in _batches(inputs, targets)]
    except Exception as problem:
        pass_on_no_room(problem)
        return own_type  # a type is written into the module or the loss
    if ops.table(inputs.device, flat.dtype) is ops.PLAIN:
        return exact
    near = []
    for own, true in zip(own_type, exact, strict=True):
        # how far the library itself is off, where values lie near a kink
        expected_CP = true.expected_CP.to(flat.dtype)
        off_C = (own.expected_CP - expected_CP).norm(dim=1) / expected_CP.norm(dim=1).clamp(min=1e-30)
        near.append(own._replace(expected_CP=expected_CP, tolerance=max(tolerance, 10 * float(off_C.max()))))
    return exact + near


def _typed(batch: Batch, dtype: torch.dtype) -> Batch:
    """Real numbers in this type."""
    return batch._replace(inputs_CB=typed(batch.inputs_CB, dtype), targets_CB=typed(batch.targets_CB, dtype))


def perturbed(flat: Flat, x_P: Tensor, b_Z: Tensor) -> tuple[Tensor, Tensor]:
    """Several clients' rows, each a little off these: at a module's first values much is zero or
    alike by chance."""
    random = torch.Generator().manual_seed(0)

    def noise(like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=random).to(like)

    rows = []
    for _ in range(CLIENTS):
        parts = [view.reshape(-1) for name, view in flat.named(x_P, b_Z).items() if name in set(flat.names)]
        moved = [part + 0.1 * (part.square().mean().sqrt() or 1.0) * noise(part) for part in parts]
        # a buffer may be a mask, of which zeros and infinities stay as they are
        rows.append((torch.cat(moved), b_Z * (1 + 0.05 * noise(b_Z))))
    x_CP, b_CZ = (torch.stack(each) for each in zip(*rows, strict=True))
    return x_CP, b_CZ


def _batches(inputs: Inputs, targets: Tensor) -> list[Batch]:
    """The samples in another order for each client; then the second client lacks one, and its batch
    is padded."""
    count = len(inputs)

    def turned(each: Tensor) -> Tensor:
        return torch.stack([each.roll(client, 0) for client in range(CLIENTS)])

    inputs_CB, targets_CB = mapped(turned, inputs), turned(targets)
    place_B = torch.arange(count, device=inputs.device)
    batches = []
    for second in (count, count - 1) if count > 2 else (count,):
        length_C = np.array([count, second, *[count] * (CLIENTS - 2)])
        mask_CB = place_B < torch.as_tensor(length_C, device=inputs.device)[:, None]
        stream = Stream(0, torch.arange(CLIENTS, device=inputs.device), 0)
        batches.append(Batch(inputs_CB, targets_CB, mask_CB, length_C, stream))
    return batches
