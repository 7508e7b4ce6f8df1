"""The gradients of all clients from a recording of their module.

Shape suffixes: C clients, B batch, P parameters, Z buffer values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stratafl.core.flat_module import Flat
from stratafl.core.losses import Loss, OnScores
from stratafl.data.inputs import mapped, tensors_of
from stratafl.engine import ops
from stratafl.engine.capture.program import Program
from stratafl.engine.draws.stream import Source
from stratafl.engine.memory import NEAR
from stratafl.engine.method.differentiate import Batch, Losses, by_length, widened
from stratafl.engine.precision import Casting
from stratafl.engine.rows import ALONE, Gradients, Wanted, room
from stratafl.engine.trace.layout import Layout

KEPT = 64
"""Programs kept, one for each length of a batch."""


class Recorded:
    """One pass forward and one back for all clients whose batches are as long; for all clients
    where padding changes nothing."""

    def __init__(
        self,
        flat: Flat,
        loss: Loss,
        device: torch.device,
        compute: ops.Compute = "fp32",
        labels: bool = False,
        pads: bool = False,
        apart: bool = False,
    ):
        """`labels`: every target is a class number; `pads`: batches of other lengths may be padded
        to the longest; `apart`: functions whose gradient is their own are called for one client
        after another."""
        self._casting = Casting(compute, device, flat.dtype, keeps=False)
        self.flat, self.compute, self.pads = flat, self._casting.compute, pads
        self.layout = Layout(flat)
        self._losses = Losses(loss, flat.dtype, ops.PLAIN, labels)
        self._whole, self._apart = not isinstance(loss, OnScores), apart
        self.even = not pads or self._losses.even
        self.poisoned = False
        """Whether the place for the gradients is filled with what is no number first, so that a
        trial shows whether every value is written."""
        self._programs: dict[object, Program] = {}
        self.mapped: set[str] = set()
        """Operations that had no form and were mapped over the clients."""

    def __call__(self, x_CP: Tensor, b_CZ: Tensor, batch: Batch, wanted: Wanted = ALONE) -> Gradients:
        g_CP = room(len(x_CP), x_CP.shape[1], x_CP)
        if self.poisoned:
            g_CP.fill_(torch.nan)
        whole = batch.mask_CB.shape[1]
        groups = [(whole, slice(None))] if self.pads else by_length(batch.length_C)
        programs = []
        for length, mine in groups:
            some = batch.some(mine, length)
            program = self.program(some)
            programs.append(program)
            if isinstance(mine, slice):
                self._some(program, x_CP, b_CZ, some, wanted.correction_CP, g_CP)
                continue
            x, b, g = x_CP[mine], b_CZ[mine], torch.empty_like(g_CP[mine])
            correction = None if wanted.correction_CP is None else wanted.correction_CP[mine]
            self._some(program, x, b, some, correction, g)
            g_CP[mine] = g
            if program.recording.written:
                b_CZ[mine] = b
        return Gradients(g_CP, reads=tuple(programs))

    def program(self, batch: Batch) -> Program:
        """For batches of this length; those that were used last are kept."""
        inputs_CB = widened(batch.inputs_CB, self.flat.dtype)
        key = tuple((name, each.shape[1:], each.dtype) for name, each in tensors_of(inputs_CB).items())
        known = self._programs.pop(key, None)
        if known is None:
            while len(self._programs) >= KEPT:
                self._programs.pop(next(iter(self._programs)))
            one = mapped(lambda each: each[0], inputs_CB)
            known = Program(self.flat, one, self._whole, self._apart)
        self._programs[key] = known
        return known

    def _some(
        self,
        program: Program,
        x_CP: Tensor,
        b_CZ: Tensor,
        batch: Batch,
        correction_CP: Tensor | None,
        g_CP: Tensor,
    ) -> None:
        """On a CPU as many clients at a time as its nearer memory holds an activation of."""
        length = batch.mask_CB.shape[1]
        few = len(x_CP) if x_CP.device.type != "cpu" else max(1, NEAR // max(1, program.recording.largest))
        for first in range(0, len(x_CP), few):
            mine = slice(first, first + few)
            correction = None if correction_CP is None else correction_CP[mine]
            self._together(program, x_CP[mine], b_CZ[mine], batch.some(mine, length), correction, g_CP[mine])

    def _together(
        self,
        program: Program,
        x_CP: Tensor,
        b_CZ: Tensor,
        batch: Batch,
        correction_CP: Tensor | None,
        g_CP: Tensor,
    ) -> None:
        named = {name: view.detach() for name, view in self.layout.named(x_CP, b_CZ).items()}
        weights = {name: named[name].requires_grad_() for name in self.flat.names}
        written = {name: named[name].clone() for name in program.recording.written}
        own = {**dict(self.flat.module.named_parameters()), **dict(self.flat.module.named_buffers())}
        device = x_CP.device
        shared = {name: value.detach().to(device) for name, value in own.items() if name not in named}
        scale = self._casting.scale
        source = None if batch.stream is None else Source(batch.stream)
        with torch.enable_grad(), self._casting.forward():
            # clones: a module may write into what it is given
            outputs_CB = program(
                {**named, **written}, shared, widened(batch.inputs_CB, self.flat.dtype).clone(), source
            )
        with torch.enable_grad():
            losses_C = self._losses(outputs_CB, batch, 0 if source is None else source.count)
            losses_C.backward(torch.full_like(losses_C, scale))
        self.mapped |= program.mapped
        views, corrections = self.layout.named(g_CP, b_CZ), None
        if correction_CP is not None:
            corrections = self.layout.named(correction_CP, b_CZ)
        for name, weight in weights.items():
            part = torch.zeros_like(weight) if weight.grad is None else weight.grad
            ops.settle(part, views[name], None if corrections is None else corrections[name], scale)
        for name, value in written.items():
            named[name].copy_(value)
