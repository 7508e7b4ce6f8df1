"""Layers and optimizer steps of many clients at once, each client with its own weights, in plain
PyTorch.

These functions are what a CPU uses, and the specification of the Triton kernels of the same names.
Images are channels-last, which is fast for torch's convolution and for the kernels. `precision` is
that of a product's operands ("fp32", "tf32", "bf16", "fp16"); weights and their gradients keep
their type.

Shape suffixes: C clients, B batch, H W height and width, I O input and output channels or features,
h w height and width of a filter, K channels or classes, T length of a sequence, V vocabulary, E
embedding, G gates, M all axes between C and the last, P parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from stratafl.core.client_update import PLAIN as PLAIN_SGD
from stratafl.core.optimizer import SGD, Optimizer
from stratafl.core.rule import Rows
from stratafl.engine.precision import HALF_DTYPES, Precision, cast_operand
from stratafl.engine.random_streams import RandomSource

Pair = tuple[int, int]
Size = int | Pair

MAX_POOL_WINDOW = 16
"""Most pixels of a pooling window for which the Triton kernel is used.

The kernel's loop over them is unrolled: compiling it for a large window would take minutes.
"""


class GradientBuffers(NamedTuple):
    """Destination of a layer's weight gradients: views of the gradient matrix (C, P).

    The layer's backward pass writes gradients there, and autograd gets none for these parameters.
    With views of a correction matrix of the same strides, gradient + correction is written. The
    kernels need channels-last filters, (C, CO, CI, KH, KW).
    """

    weight: Tensor
    bias: Tensor | None = None
    add_weight: Tensor | None = None
    add_bias: Tensor | None = None
    squared_norms: list[Tensor] | None = None
    """List to which parts (C, n) of each client's squared norm are appended, or None.

    Some backends compute them where they write gradients, so that clipping needs no other pass.
    """


class _BufferedLinear(torch.autograd.Function):
    """Linear layer that writes its weight gradients straight to gradient buffers.

    Weight gradients are most of what a step writes, and are written only once in this way.
    """

    @staticmethod
    def forward(
        ctx: Any, x_CBI: Tensor, w_COI: Tensor, b_CO: Tensor | None, relu: bool, buffers: GradientBuffers,
        loss_scale: float,
    ) -> Tensor:  # fmt: skip
        y_CBO = torch.bmm(x_CBI, w_COI.mT)
        if b_CO is not None:
            y_CBO += b_CO[:, None]
        if relu:
            y_CBO.relu_()
        ctx.save_for_backward(x_CBI, w_COI, y_CBO if relu else None)
        ctx.options = buffers, loss_scale
        return y_CBO

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x_CBI, w_COI, y_CBO = ctx.saved_tensors
        buffers, scale = ctx.options  # the scale is 1 unless operands have 16 bits
        dy_CBO = gradients[0]
        if y_CBO is not None:
            dy_CBO = torch.ops.aten.threshold_backward(dy_CBO, y_CBO, 0)
        dx_CBI = torch.bmm(dy_CBO, w_COI) if ctx.needs_input_grad[0] else None
        # a product into rows that are not contiguous is slower than a product and this copy
        write_gradient(torch.bmm(dy_CBO.mT, x_CBI), buffers.weight, buffers.add_weight, scale)
        if buffers.bias is not None:
            write_gradient(dy_CBO.sum(dim=1, dtype=buffers.bias.dtype), buffers.bias, buffers.add_bias, scale)
        return dx_CBI, None, None, None, None, None


def write_gradient(gradient: Tensor, out: Tensor, correction: Tensor | None, scale: float) -> None:
    """Write gradient / scale, plus the correction if there is one, to its destination."""
    if correction is not None:
        torch.add(correction, gradient, alpha=1 / scale, out=out)
        return
    out.copy_(gradient)
    if scale != 1:
        out.div_(scale)


def linear(
    x_CBI: Tensor,
    w_COI: Tensor,
    b_CO: Tensor | None,
    relu: bool = False,
    precision: Precision = "fp32",
    gradient_buffers: GradientBuffers | None = None,
    loss_scale: float = 1.0,
) -> Tensor:
    """x @ w^T + b of each client, then ReLU if `relu`: (C, B, O).

    The incoming gradient is `loss_scale` times too large; the parameters' gradients in the buffers
    are divided by it.
    """
    x_CBI, w = cast_operand(x_CBI, precision), cast_operand(w_COI, precision)
    b = None if b_CO is None else cast_operand(b_CO, precision)
    if gradient_buffers is not None:
        return _BufferedLinear.apply(x_CBI, w, b, relu, gradient_buffers, loss_scale)
    y_CBO = torch.bmm(x_CBI, w.mT) if b is None else torch.baddbmm(b[:, None], x_CBI, w.mT)
    return y_CBO.relu() if relu else y_CBO


def linear_nd(x_CMI: Tensor, w_COI: Tensor, b_CO: Tensor | None, precision: Precision = "fp32") -> Tensor:
    """`linear` with any number of axes between clients and features."""
    y = linear(x_CMI.flatten(1, -2), w_COI, b_CO, precision=precision)
    return y.view(*x_CMI.shape[:-1], -1)


def conv2d(
    x_CBHWI: Tensor,
    w_COIhw: Tensor,
    b_CO: Tensor | None,
    stride: Size = 1,
    padding: Size = 0,
    precision: Precision = "fp32",
    dilation: Size = 1,
    groups: int = 1,
) -> Tensor:
    """Convolution of each client's images with its own filters, (C, B, H', W', O)."""
    x, w = cast_operand(x_CBHWI, precision), cast_operand(w_COIhw, precision)
    b = None if b_CO is None else cast_operand(b_CO, precision)
    clients, batch = x.shape[:2]
    if x.device.type == "cpu":
        # one call per client needs no transposed copies, and a grouped call is not faster on a CPU
        biases = [None] * clients if b is None else list(b.unbind())
        per_client = zip(x.unbind(), w.unbind(), biases, strict=True)
        options = stride, padding, dilation, groups
        return torch.stack([channels_last(F.conv2d(channels_first(x), w, b, *options)) for x, w, b in per_client])
    # one convolution whose groups are the clients (times their own groups)
    x_all = x.permute(1, 0, 4, 2, 3).flatten(1, 2)
    b_all = None if b is None else b.flatten()
    y = F.conv2d(x_all, w.flatten(0, 1), b_all, stride, padding, dilation, clients * groups)
    return y.view(batch, clients, -1, *y.shape[2:]).permute(1, 0, 3, 4, 2)


def conv2d_relu_pool(
    x_CBHWI: Tensor, w_COIhw: Tensor, b_CO: Tensor | None, padding: Size = 0, precision: Precision = "fp32"
) -> Tensor:
    """2x2 max-pooling of the ReLU of a convolution of stride 1, (C, B, H', W', O)."""
    y = conv2d(x_CBHWI, w_COIhw, b_CO, 1, padding, precision)
    # pooling and ReLU commute, and a quarter of the pixels is left for ReLU
    return per_image(lambda x: F.max_pool2d(x, 2), y).relu()


def per_image(function: Callable[[Tensor], Tensor], x_CBHWK: Tensor) -> Tensor:
    """Apply a function of channels-first images to the channels-last images of all clients."""
    y = channels_last(function(channels_first(x_CBHWK.flatten(0, 1))))
    return y.unflatten(0, x_CBHWK.shape[:2])


def max_pool2d(x_CBHWK: Tensor, kernel: Pair, stride: Pair, padding: Pair) -> Tensor:
    """Max-pooling, (C, B, H', W', K)."""
    return per_image(lambda x: F.max_pool2d(x, kernel, stride, padding), x_CBHWK)


def flatten(x_CBHWK: Tensor) -> Tensor:
    """Images as vectors (C, B, K * H * W), in the order of a flattened channels-first image."""
    return x_CBHWK.movedim(-1, 2).flatten(2)


def group_norm(
    x_CBHWK: Tensor,
    groups: int,
    w_CK: Tensor | None,
    b_CK: Tensor | None,
    eps: float = 1e-5,
    relu: bool = False,
) -> Tensor:
    """Group normalisation with each client's own scale and shift, then ReLU if `relu`."""
    # torch's group norm of channels-last images has a backward pass only if they need a gradient
    if x_CBHWK.device.type == "cpu" and x_CBHWK.requires_grad and w_CK is not None and b_CK is not None:
        per_client = zip(x_CBHWK.unbind(), w_CK.unbind(), b_CK.unbind(), strict=True)
        y_CBHWK = torch.stack(
            [channels_last(F.group_norm(channels_first(x), groups, w, b, eps)) for x, w, b in per_client]
        )
    else:
        y_CBHWK = _affine(per_image(lambda x: F.group_norm(x, groups, eps=eps), x_CBHWK), w_CK, b_CK)
    return y_CBHWK.relu() if relu else y_CBHWK


def layer_norm(x: Tensor, shape: tuple[int, ...], w: Tensor | None, b: Tensor | None, eps: float = 1e-5) -> Tensor:
    """Layer normalisation with each client's own scale and shift."""
    return _affine(F.layer_norm(x, shape, eps=eps), w, b)


def embedding(codes_CBT: Tensor, w_CVE: Tensor, precision: Precision = "fp32") -> Tensor:
    """Look up each client's codes in its own table.

    In memory, the next client's table follows. So a code out of range raises IndexError; on a GPU,
    where the host must not wait for the device, its embedding is NaN.
    """
    clients, vocabulary, _ = w_CVE.shape
    codes_CBT = codes_CBT.long()
    out_of_range_CBT = (codes_CBT < 0) | (codes_CBT >= vocabulary)
    on_cpu = codes_CBT.device.type == "cpu"
    if on_cpu and bool(out_of_range_CBT.any()):
        raise IndexError(
            f"index out of range: code {int(codes_CBT[out_of_range_CBT][0])} in a vocabulary of {vocabulary}"
        )
    offset_C11 = torch.arange(0, clients * vocabulary, vocabulary, device=codes_CBT.device)[:, None, None]
    valid_CBT = codes_CBT if on_cpu else codes_CBT.masked_fill(out_of_range_CBT, 0)
    y_CBTE = F.embedding(valid_CBT + offset_C11, w_CVE.reshape(clients * vocabulary, -1))
    return cast_operand(y_CBTE if on_cpu else y_CBTE.masked_fill(out_of_range_CBT[..., None], torch.nan), precision)


def lstm(x_CBTE: Tensor, layers: list[tuple[Tensor, Tensor, Tensor, Tensor]], precision: Precision = "fp32") -> Tensor:
    """Outputs of an LSTM at each step, (C, B, T, O).

    A layer is (input weights, state weights, input bias, state bias), as in `nn.LSTM`.
    """
    x_CBTI = x_CBTE
    for w_CGI, w_CGO, b_CG, c_CG in layers:
        gates_CBTG = linear_nd(x_CBTI, w_CGI, b_CG + c_CG, precision)
        w_COG = cast_operand(w_CGO, precision).mT
        hidden_CBO = torch.zeros_like(gates_CBTG[:, :, 0, : w_COG.shape[1]])
        cell_CBO = torch.zeros_like(hidden_CBO)
        outputs = []
        for gates_CBG in gates_CBTG.unbind(2):
            i, f, g, o = torch.baddbmm(gates_CBG, hidden_CBO, w_COG).chunk(4, dim=-1)
            cell_CBO = f.sigmoid() * cell_CBO + i.sigmoid() * g.tanh()
            hidden_CBO = o.sigmoid() * cell_CBO.tanh()
            outputs.append(hidden_CBO)
        x_CBTI = torch.stack(outputs, dim=2)
    return x_CBTI


def cross_entropy(logits_CBK: Tensor, labels_CB: Tensor, mask_CB: Tensor) -> Tensor:
    """Mean cross-entropy of each client's samples that its mask keeps, (C); NaN if it keeps none.

    Labels may have more axes; the logits then have the same axes after K.
    """
    logits = logits_CBK.flatten(0, 1)
    dtype = torch.float32 if logits.dtype in HALF_DTYPES.values() else logits.dtype
    loss = F.cross_entropy(logits.to(dtype), labels_CB.flatten(0, 1).long(), reduction="none")
    loss_CB = loss.view(*mask_CB.shape, -1).mean(dim=2)
    return (loss_CB * mask_CB).sum(dim=1) / mask_CB.sum(dim=1)


def fused_optimizer_step(
    x_CP: Tensor,
    g_CP: Tensor,
    lr: float | Tensor,
    *,
    clip_norm: float | None = None,
    weight_decay: float = 0.0,
    optimizer: Optimizer = PLAIN_SGD,
    state: Rows | None = None,
    path_CP: Tensor | None = None,
    squared_norms: Sequence[Tensor] = (),
    clipped_steps: Tensor | None = None,
) -> None:
    """Clip each client's gradient, add weight decay, and take an optimizer step, in place.

    `g_CP` is overwritten. `squared_norms` are parts (C, n) of the squared norms of its rows, if
    they have been computed. The number of clipped rows is added to `clipped_steps`.
    """
    if clip_norm is not None:
        if squared_norms:
            norm_C1 = torch.cat(list(squared_norms), dim=1).sum(dim=1, keepdim=True).sqrt()
        else:
            norm_C1 = torch.linalg.vector_norm(g_CP, dim=1, keepdim=True)
        factor_C1 = clip_norm / norm_C1.clamp(min=clip_norm)
        if clipped_steps is not None:
            clipped_steps += (factor_C1 < 1).sum()
        if not weight_decay and optimizer == PLAIN_SGD and path_CP is None and not isinstance(lr, Tensor):
            x_CP.addcmul_(g_CP, factor_C1, value=-lr)
            return
        g_CP *= factor_C1
    if weight_decay:
        g_CP.add_(x_CP, alpha=weight_decay)
    optimizer_step(x_CP, g_CP, lr, optimizer=optimizer, state=state or {}, path_CP=path_CP)


def optimizer_step(
    x_CP: Tensor, direction_CP: Tensor, lr: float | Tensor, *, optimizer: Optimizer, state: Rows, path_CP: Tensor | None
) -> None:
    """Take an optimizer step, in place, and subtract lr * direction from the path, if any."""
    if path_CP is not None:
        _descend(path_CP, direction_CP, lr)
    if type(optimizer) is SGD:
        if optimizer.momentum:
            velocity_CP = state["velocity"].mul_(optimizer.momentum).add_(direction_CP)
            nesterov = optimizer.nesterov
            direction_CP = direction_CP.add(velocity_CP, alpha=optimizer.momentum) if nesterov else velocity_CP
        _descend(x_CP, direction_CP, lr)
        return
    new_state, change_CP = optimizer.step(state, direction_CP, x_CP, lr)
    for name, rows in new_state.items():
        state[name].copy_(rows)
    x_CP.sub_(change_CP)


def _descend(x_CP: Tensor, direction_CP: Tensor, lr: float | Tensor) -> None:
    """Subtract lr times the direction, in place."""
    if isinstance(lr, Tensor):
        x_CP.addcmul_(direction_CP, -lr)
    else:
        x_CP.sub_(direction_CP, alpha=lr)


def _affine(x: Tensor, w: Tensor | None, b: Tensor | None) -> Tensor:
    """Scale and shift the last axes by each client's own parameters."""

    def aligned(rows: Tensor) -> Tensor:
        return rows.view(len(rows), *[1] * (x.dim() - rows.dim()), *rows.shape[1:]).to(x.dtype)

    if w is None:
        return x
    return x * aligned(w) if b is None else torch.addcmul(aligned(b), x, aligned(w))


def dropout(x: Tensor, p: float, source: RandomSource, last: bool = False) -> Tensor:
    """Dropout by each client's own random stream. `last`: x are channels-last images."""
    if p == 1:
        return x * torch.zeros_like(x)
    kept = source.chance(1 - p, (x.movedim(-1, 2) if last else x).shape, x.device)
    return x * (kept.movedim(2, -1) if last else kept).to(x.dtype).div_(1 - p)


def channels_first(x_BHWK: Tensor) -> Tensor:
    return x_BHWK.permute(0, 3, 1, 2)


def channels_last(x_BKHW: Tensor) -> Tensor:
    return x_BKHW.permute(0, 2, 3, 1)


REFERENCE_OPS: dict[str, Callable[..., Tensor]] = {
    function.__name__: function
    for function in (
        linear, conv2d, conv2d_relu_pool, max_pool2d, flatten, group_norm, layer_norm, embedding, lstm, cross_entropy,
        dropout,
    )
}  # fmt: skip
