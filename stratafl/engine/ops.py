"""Layers of many clients at once, each client with its own weights, in plain torch.

Images are channels-last: a library's convolution and a kernel of our own both like them so.
`compute` says in what a product's operands are held ("fp32", "tf32", "bf16", "fp16"); weights and
their gradients stay as they are given. Where the device has kernels of our own, `table` puts them
in the place of these.

Shape suffixes: C clients, B batch, H W height and width, I O channels or features in and out, h w
of a filter, K channels or classes, T length of a sequence, V vocabulary, E embedding, G gates, M
everything between C and the last.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from stratafl.core.client_update import PLAIN as PLAIN_SGD
from stratafl.core.optimizer import SGD, Optimiser
from stratafl.core.rows import DriftKernel
from stratafl.core.rule import Rows
from stratafl.engine.precision import HALF_DTYPES, Precision, cast_operand
from stratafl.engine.random_streams import RandomSource

Pair = tuple[int, int]

Size = int | Pair

MOST_POOLED = 16
"""Places in the windows of a kernel of our own, which has each written out: of many, compiling
would take minutes."""


class Sink(NamedTuple):
    """Where a layer's backward pass writes its parameters' gradients: views of a (C, P) matrix.
    Autograd then gets none for these parameters.

    With views of a correction matrix of the same strides, gradient + correction is written. To a
    list, if the layers of this device collect them, each client's sums of squares of what was
    written are appended as (C, parts): `update` clips by them without another pass. A kernel's
    filters, (C, CO, CI, KH, KW), must lie channels-last.
    """

    w: Tensor
    b: Tensor | None = None
    correction_w: Tensor | None = None
    correction_b: Tensor | None = None
    squares: list[Tensor] | None = None


class _Linear(torch.autograd.Function):
    """Written out so that the weights' gradients, the bulk of what a step writes, are written
    once."""

    @staticmethod
    def forward(ctx: Any, x_CBI: Tensor, w_COI: Tensor, b_CO: Tensor | None, relu: bool, plan: Any) -> Tensor:
        y_CBO = torch.bmm(x_CBI, w_COI.mT)
        if b_CO is not None:
            y_CBO += b_CO[:, None]
        if relu:
            y_CBO.relu_()
        ctx.save_for_backward(x_CBI, w_COI, y_CBO if relu else None)
        ctx.plan = plan
        return y_CBO

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x_CBI, w_COI, y_CBO = ctx.saved_tensors
        sink, scale = ctx.plan  # a scale is for 16-bit operands only
        dy_CBO = gradients[0]
        if y_CBO is not None:
            dy_CBO = torch.ops.aten.threshold_backward(dy_CBO, y_CBO, 0)
        dx_CBI = torch.bmm(dy_CBO, w_COI) if ctx.needs_input_grad[0] else None
        # not into the rows at once: rows of many layers lie apart, and the library is slower at
        # that than this copy
        settle(torch.bmm(dy_CBO.mT, x_CBI), sink.w, sink.correction_w, scale)
        if sink.b is not None:
            settle(dy_CBO.sum(dim=1, dtype=sink.b.dtype), sink.b, sink.correction_b, scale)
        return dx_CBI, None, None, None, None


def settle(gradient: Tensor, sink: Tensor, correction: Tensor | None, scale: float) -> None:
    """Write a gradient that came times `scale` to where it is wanted, with its correction."""
    if correction is not None:
        torch.add(correction, gradient, alpha=1 / scale, out=sink)
        return
    sink.copy_(gradient)
    if scale != 1:
        sink.div_(scale)


def linear(
    x_CBI: Tensor,
    w_COI: Tensor,
    b_CO: Tensor | None,
    relu: bool = False,
    compute: Precision = "fp32",
    sink: Sink | None = None,
    grad_scale: float = 1.0,
) -> Tensor:
    """Gradients of what comes out arrive times `grad_scale`; those of the parameters are divided by
    it on the way."""
    x_CBI, w = cast_operand(x_CBI, compute), cast_operand(w_COI, compute)
    b = None if b_CO is None else cast_operand(b_CO, compute)
    if sink is not None:
        return _Linear.apply(x_CBI, w, b, relu, (sink, grad_scale))
    y_CBO = torch.bmm(x_CBI, w.mT) if b is None else torch.baddbmm(b[:, None], x_CBI, w.mT)
    return y_CBO.relu() if relu else y_CBO


def linear_of_any(x_CMI: Tensor, w_COI: Tensor, b_CO: Tensor | None, compute: Precision = "fp32") -> Tensor:
    """The same for any number of axes between clients and features."""
    y = linear(x_CMI.flatten(1, -2), w_COI, b_CO, compute=compute)
    return y.view(*x_CMI.shape[:-1], -1)


def conv2d(
    x_CBHWI: Tensor,
    w_COIhw: Tensor,
    b_CO: Tensor | None,
    stride: Size = 1,
    padding: Size = 0,
    compute: Precision = "fp32",
    dilation: Size = 1,
    groups: int = 1,
) -> Tensor:
    x, w = cast_operand(x_CBHWI, compute), cast_operand(w_COIhw, compute)
    b = None if b_CO is None else cast_operand(b_CO, compute)
    clients, batch = x.shape[:2]
    if x.device.type == "cpu":
        # a filter set per client leaves a CPU nothing to share, and one call a client needs no
        # transposed copies
        biases = [None] * clients if b is None else list(b.unbind())
        each = zip(x.unbind(), w.unbind(), biases, strict=True)
        return torch.stack([_last(F.conv2d(_first(x), w, b, stride, padding, dilation, groups)) for x, w, b in each])
    # one convolution whose groups are the clients (times their own groups)
    merged = x.permute(1, 0, 4, 2, 3).flatten(1, 2)
    bias = None if b is None else b.flatten()
    y = F.conv2d(merged, w.flatten(0, 1), bias, stride, padding, dilation, clients * groups)
    return y.view(batch, clients, -1, *y.shape[2:]).permute(1, 0, 3, 4, 2)


def conv2d_relu_pool(
    x_CBHWI: Tensor, w_COIhw: Tensor, b_CO: Tensor | None, padding: Size = 0, compute: Precision = "fp32"
) -> Tensor:
    """Convolution of stride 1, ReLU and the largest of each 2x2 pixels."""
    y = conv2d(x_CBHWI, w_COIhw, b_CO, 1, padding, compute)
    # the two commute, and a quarter of the pixels is left to rectify
    return images(lambda x: F.max_pool2d(x, 2), y).relu()


def images(function: Callable[[Tensor], Tensor], x_CBHWK: Tensor) -> Tensor:
    """Something that treats each (K, H, W) image alone, whoever's it is."""
    y = _last(function(_first(x_CBHWK.flatten(0, 1))))
    return y.unflatten(0, x_CBHWK.shape[:2])


def max_pool2d(x_CBHWK: Tensor, kernel: Pair, stride: Pair, padding: Pair) -> Tensor:
    return images(lambda x: F.max_pool2d(x, kernel, stride, padding), x_CBHWK)


def flatten(x_CBHWK: Tensor) -> Tensor:
    """(C, B, K * H * W), in the order of a flattened channels-first image."""
    return x_CBHWK.movedim(-1, 2).flatten(2)


def group_norm(
    x_CBHWK: Tensor,
    groups: int,
    w_CK: Tensor | None,
    b_CK: Tensor | None,
    eps: float = 1e-5,
    relu: bool = False,
) -> Tensor:
    # the library cannot go back through images that lie so and need no gradient themselves
    if x_CBHWK.device.type == "cpu" and x_CBHWK.requires_grad and w_CK is not None and b_CK is not None:
        each = zip(x_CBHWK.unbind(), w_CK.unbind(), b_CK.unbind(), strict=True)
        y_CBHWK = torch.stack([_last(F.group_norm(_first(x), groups, w, b, eps)) for x, w, b in each])
    else:
        y_CBHWK = _affine(images(lambda x: F.group_norm(x, groups, eps=eps), x_CBHWK), w_CK, b_CK)
    return y_CBHWK.relu() if relu else y_CBHWK


def layer_norm(x: Tensor, shape: tuple[int, ...], w: Tensor | None, b: Tensor | None, eps: float = 1e-5) -> Tensor:
    return _affine(F.layer_norm(x, shape, eps=eps), w, b)


def embedding(codes_CBT: Tensor, w_CVE: Tensor, compute: Precision = "fp32") -> Tensor:
    """Beyond a client's table lies the next one's: a code that is not in it is an error, or what is
    no number where the host must not wait for the device to find out."""
    clients, vocabulary, _ = w_CVE.shape
    codes_CBT = codes_CBT.long()
    beyond_CBT = (codes_CBT < 0) | (codes_CBT >= vocabulary)
    on_cpu = codes_CBT.device.type == "cpu"
    if on_cpu and bool(beyond_CBT.any()):
        raise IndexError(f"index out of range: code {int(codes_CBT[beyond_CBT][0])} in a vocabulary of {vocabulary}")
    offset_C11 = torch.arange(0, clients * vocabulary, vocabulary, device=codes_CBT.device)[:, None, None]
    known_CBT = codes_CBT if on_cpu else codes_CBT.masked_fill(beyond_CBT, 0)
    y_CBTE = F.embedding(known_CBT + offset_C11, w_CVE.reshape(clients * vocabulary, -1))
    return cast_operand(y_CBTE if on_cpu else y_CBTE.masked_fill(beyond_CBT[..., None], torch.nan), compute)


def recurrent(
    x_CBTE: Tensor, layers: list[tuple[Tensor, Tensor, Tensor, Tensor]], compute: Precision = "fp32"
) -> Tensor:
    """An LSTM's outputs at each place; its layers are (input weights, state weights, input bias,
    state bias)."""
    x_CBTI = x_CBTE
    for w_CGI, w_CGO, b_CG, c_CG in layers:
        gates_CBTG = linear_of_any(x_CBTI, w_CGI, b_CG + c_CG, compute)
        w_COG = cast_operand(w_CGO, compute).mT
        hidden_CBO = torch.zeros_like(gates_CBTG[:, :, 0, : w_COG.shape[1]])
        cell_CBO = torch.zeros_like(hidden_CBO)
        outputs = []
        for gates_CBG in gates_CBTG.unbind(2):
            enter, forget, new, leave = torch.baddbmm(gates_CBG, hidden_CBO, w_COG).chunk(4, dim=-1)
            cell_CBO = forget.sigmoid() * cell_CBO + enter.sigmoid() * new.tanh()
            hidden_CBO = leave.sigmoid() * cell_CBO.tanh()
            outputs.append(hidden_CBO)
        x_CBTI = torch.stack(outputs, dim=2)
    return x_CBTI


def cross_entropy(logits_CBK: Tensor, labels_CB: Tensor, mask_CB: Tensor) -> Tensor:
    """Each client's mean over its own samples; labels may have further axes, then so have the
    logits after K."""
    logits = logits_CBK.flatten(0, 1)
    wide = torch.float32 if logits.dtype in HALF_DTYPES.values() else logits.dtype
    loss = F.cross_entropy(logits.to(wide), labels_CB.flatten(0, 1).long(), reduction="none")
    loss_CB = loss.view(*mask_CB.shape, -1).mean(dim=2)
    return (loss_CB * mask_CB).sum(dim=1) / mask_CB.sum(dim=1)


def update(
    x_CP: Tensor,
    g_CP: Tensor,
    lr: float | Tensor,
    clip: float | None = None,
    decay: float = 0.0,
    optimiser: Optimiser = PLAIN_SGD,
    state: Rows | None = None,
    path_CP: Tensor | None = None,
    squares: Sequence[Tensor] = (),
    clipped: Tensor | None = None,
) -> None:
    """The usual chain of a leaf after its corrections, clip -> decay -> optimiser, in place, which
    uses up `g_CP`. `squares` are parts (C, n) of the sums of squares of its rows, if they are
    known; to `clipped` is added how many of them the clip shortened."""
    if clip is not None:
        known = torch.cat(list(squares), dim=1).sum(dim=1, keepdim=True).sqrt() if squares else None
        length_C1 = torch.linalg.vector_norm(g_CP, dim=1, keepdim=True) if known is None else known
        shrink_C1 = clip / length_C1.clamp(min=clip)
        if clipped is not None:
            clipped += (shrink_C1 < 1).sum()
        if not decay and optimiser == PLAIN_SGD and path_CP is None and not isinstance(lr, Tensor):
            x_CP.addcmul_(g_CP, shrink_C1, value=-lr)
            return
        g_CP *= shrink_C1
    if decay:
        g_CP.add_(x_CP, alpha=decay)
    advance(x_CP, g_CP, lr, optimiser, state or {}, path_CP)


def advance(
    x_CP: Tensor, direction_CP: Tensor, lr: float | Tensor, optimiser: Optimiser, state: Rows, path_CP: Tensor | None
) -> None:
    """Have an optimiser move rows, in place, as its states and the paths."""
    if path_CP is not None:
        _move(path_CP, direction_CP, lr)
    if type(optimiser) is SGD:
        if optimiser.momentum:
            velocity_CP = state["velocity"].mul_(optimiser.momentum).add_(direction_CP)
            ahead = optimiser.nesterov
            direction_CP = direction_CP.add(velocity_CP, alpha=optimiser.momentum) if ahead else velocity_CP
        _move(x_CP, direction_CP, lr)
        return
    new, change_CP = optimiser.step(state, direction_CP, x_CP, lr)
    for name, rows in new.items():
        state[name].copy_(rows)
    x_CP.sub_(change_CP)


def _move(x_CP: Tensor, direction_CP: Tensor, lr: float | Tensor) -> None:
    """Step against the direction, in place."""
    if isinstance(lr, Tensor):
        x_CP.addcmul_(direction_CP, -lr)
    else:
        x_CP.sub_(direction_CP, alpha=lr)


def _affine(x: Tensor, w: Tensor | None, b: Tensor | None) -> Tensor:
    """Scale and shift the last axes by each client's own."""

    def fitting(rows: Tensor) -> Tensor:
        return rows.view(len(rows), *[1] * (x.dim() - rows.dim()), *rows.shape[1:]).to(x.dtype)

    if w is None:
        return x
    return x * fitting(w) if b is None else torch.addcmul(fitting(b), x, fitting(w))


def dropout(x: Tensor, p: float, source: RandomSource, last: bool = False) -> Tensor:
    """Some left out by each client's own stream, and the others larger by as much; `last`: images
    lie channels-last."""
    if p == 1:
        return x * torch.zeros_like(x)
    kept = source.chance(1 - p, (x.movedim(-1, 2) if last else x).shape, x.device)
    return x * (kept.movedim(2, -1) if last else kept).to(x.dtype).div_(1 - p)


def _first(x_BHWK: Tensor) -> Tensor:
    return x_BHWK.permute(0, 3, 1, 2)


def _last(x_BKHW: Tensor) -> Tensor:
    return x_BKHW.permute(0, 2, 3, 1)


TORCH: dict[str, Callable[..., Tensor]] = {
    function.__name__: function
    for function in (
        linear,
        conv2d,
        conv2d_relu_pool,
        max_pool2d,
        flatten,
        group_norm,
        layer_norm,
        embedding,
        recurrent,
        cross_entropy,
        dropout,
    )
}


class Table(NamedTuple):
    """The layers as a device computes them."""

    functions: Mapping[str, Callable[..., Tensor]]
    sinking: frozenset[str]
    """Those that write their parameters' gradients to where they are wanted (`sink`), divided by
    `grad_scale`."""
    squares: bool
    """Whether these collect sums of squares of what they write."""
    update: Callable[..., None]
    reorder: Callable[[Tensor, Tensor], None] | None = None
    """Where convolutions want their filters channels-last: copies them from one order to the
    other."""
    fetch: Callable[..., Tensor] | None = None
    """Where flips and crops have a kernel that also gathers the samples and lays them out."""
    drift: DriftKernel | None = None
    """Where what rules compute at a meeting has one."""


PLAIN = Table(TORCH, frozenset({"linear"}), False, update)


def table(device: torch.device, dtype: torch.dtype) -> Table:
    """What this device computes with, fastest: the one place where kernels of our own are chosen,
    which take float32 rows on CUDA only."""
    return _with_kernels() if device.type == "cuda" and dtype == torch.float32 else PLAIN


@functools.cache
def _with_kernels() -> Table:
    kernels = importlib.import_module("stratafl.engine.kernels")
    if not kernels.available():
        warnings.warn("no Triton for this GPU: torch's own operations are used", stacklevel=2)
        return PLAIN
    ours = {name: getattr(kernels, name) for name in TORCH if name in kernels.__all__}
    sinking = frozenset(name for name, function in ours.items() if "sink" in inspect.signature(function).parameters)
    own = kernels.update, kernels.reorder, kernels.fetch, kernels.drift
    return Table({**TORCH, **ours}, sinking, True, *own)
