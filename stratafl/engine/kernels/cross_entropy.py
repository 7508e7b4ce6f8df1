"""Cross-entropy of C clients; its gradient is computed in the same pass.

    loss[c] = sum over b of weight[c, b] * (log(sum over k of exp(z[c, b, k])) - z[c, b, label])

z are logits (C, B, K). A sample that the mask keeps has the weight 1 / number of kept samples, the
others 0. C clients, B samples, K classes.
"""

# mypy: disable-error-code="import-untyped,import-not-found", disallow-untyped-defs=False

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from stratafl.engine.kernels.common import next_power_of_two


@triton.jit
def _cross_entropy(
    z_ptr, label_ptr, mask_ptr, loss_ptr, dz_ptr, loss_scale, B, K, MASKED: tl.constexpr,
    BB: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Compute loss and gradient of one client.

    A label that is not a class gives NaN, unless the mask drops its sample.
    """
    c = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BK)
    count = tl.zeros((BB,), tl.float32) + 0.0
    for first in range(0, B, BB):
        b = first + tl.arange(0, BB)
        if MASKED:
            count += tl.load(mask_ptr + c * B + b, mask=b < B, other=0).to(tl.float32)
        else:
            count += (b < B).to(tl.float32)
    total = tl.maximum(tl.sum(count, 0), 1.0)
    loss = tl.zeros((BB,), tl.float32)
    for first in range(0, B, BB):
        b = first + tl.arange(0, BB)
        mask = (b < B)[:, None] & (k < K)[None, :]
        offset = c * B * K + b[:, None] * K + k[None, :]
        z = tl.load(z_ptr + offset, mask=mask, other=-float("inf")).to(tl.float32)
        z = tl.where((b < B)[:, None], z, 0.0)
        z -= tl.max(z, 1)[:, None]
        e = tl.exp(z)
        norm = tl.sum(e, 1)
        weight = (b < B).to(tl.float32) / total
        if MASKED:
            weight *= tl.load(mask_ptr + c * B + b, mask=b < B, other=0).to(tl.float32)
        label = tl.load(label_ptr + c * B + b, mask=b < B, other=0)
        is_label = k[None, :] == label[:, None]
        sample_loss = tl.log(norm) - tl.sum(tl.where(is_label, z, 0.0), 1)
        is_class = (label >= 0) & (label < K)
        sample_loss = tl.where(is_class, sample_loss, float("nan"))
        loss += tl.where(weight > 0.0, sample_loss * weight, 0.0)
        dz = (e / norm[:, None] - is_label.to(tl.float32)) * weight[:, None] * loss_scale
        dz = tl.where(is_class[:, None], dz, float("nan"))
        dz = tl.where((weight > 0.0)[:, None], dz, 0.0)
        tl.store(dz_ptr + offset, dz.to(dz_ptr.dtype.element_ty), mask=mask)
    tl.store(loss_ptr + c, tl.sum(loss, 0))


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, labels: Tensor, mask: Tensor | None, loss_scale: float) -> Tensor:
        z = z.contiguous()
        clients, batch, classes = z.shape
        loss = torch.empty(clients, dtype=torch.float32, device=z.device)
        dz = torch.empty_like(z)
        bk = next_power_of_two(classes, 1)
        bb = min(next_power_of_two(batch), max(1, 8192 // bk))
        # without a mask the kernel reads none, and any pointer will do
        weights = labels if mask is None else mask.contiguous()
        if weights.dtype == torch.bool:
            weights = weights.view(torch.uint8)
        _cross_entropy[(clients,)](
            z_ptr=z, label_ptr=labels.contiguous(), mask_ptr=weights, loss_ptr=loss, dz_ptr=dz,
            loss_scale=loss_scale, B=batch, K=classes, MASKED=mask is not None, BB=bb, BK=bk,
        )  # fmt: skip
        ctx.save_for_backward(dz)
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (dz,) = ctx.saved_tensors
        return (dz * gradients[0][:, None, None]).to(dz.dtype), None, None, None


def cross_entropy(
    logits_CBK: Tensor, labels_CB: Tensor, mask_CB: Tensor | None = None, loss_scale: float = 1.0
) -> Tensor:
    """Mean cross-entropy of each client's samples that its mask keeps, (C); 0 if it keeps none.

    The gradients are multiplied by `loss_scale`, the loss is not.
    """
    return _CrossEntropy.apply(logits_CBK, labels_CB, mask_CB, loss_scale)
