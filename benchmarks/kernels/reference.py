"""Errors of one kernel against PyTorch in float64, on fresh random inputs.

Each function returns the relative errors of a kernel's results. Memory holds NaN before it is
written, so that a place that is left out is noticed. `check` has the shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from stratafl.core.optimizer import SGD, STEP_COUNT, Adam, AdamW, Optimizer
from stratafl.engine.kernels.conv2d import conv2d
from stratafl.engine.kernels.conv2d_relu_pool import conv2d_relu_pool
from stratafl.engine.kernels.cross_entropy import cross_entropy
from stratafl.engine.kernels.embedding import embedding
from stratafl.engine.kernels.group_norm import group_norm
from stratafl.engine.kernels.layouts import convert_filters, flatten
from stratafl.engine.kernels.linear import linear
from stratafl.engine.kernels.lstm import lstm
from stratafl.engine.kernels.max_pool2d import max_pool2d
from stratafl.engine.kernels.reference import GradientBuffers
from stratafl.engine.kernels.updates import drift, fused_optimizer_step
from stratafl.engine.precision import Precision

ROUND = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
"""Type to which inputs are rounded; torch has none for tf32."""


class Extreme(NamedTuple):
    """Factors and values that make the inputs of a comparison extreme."""

    inputs: float = 1.0
    gradients: float = 1.0
    """Factors of the first input, and of the output's gradient."""
    broken: float | None = None
    """Infinity or NaN, which replaces one gradient of the first client; None for no replacement."""


USUAL = Extreme()
OPTIMIZERS: dict[str, Optimizer] = {
    "sgd": SGD(),
    "momentum": SGD(0.9),
    "nesterov": SGD(0.9, nesterov=True),
    "adam": Adam(),
    "adamw": AdamW(betas=(0.8, 0.99), weight_decay=0.1),
}


@contextmanager
def filled_with_nan() -> Iterator[None]:
    """Fill new tensors with NaN."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def rounded(x: Tensor, precision: Precision) -> Tensor:
    """Round to float32 values that operands of this precision hold exactly, if in their range."""
    if precision != "tf32":
        return x.to(ROUND[precision]).float()
    bits = x.float().contiguous().view(torch.int32)
    return ((bits + 0xFFF + (bits >> 13 & 1)) & ~0x1FFF).view(torch.float32)


def distance(out: Tensor, reference: Tensor) -> float:
    out = out.detach().double().reshape(reference.shape)
    if not bool(torch.isfinite(out).all()):
        return float("inf")
    return float((out - reference).norm() / reference.norm().clamp(min=1e-30))


def hidden(out: Tensor, reference: Tensor) -> float:
    """Error of results whose reference is not finite for the first client.

    It is the number of that client's values that are finite and should not be, plus the distance of
    the other clients' values.
    """
    broken = ~reference[0].isfinite() & out[0].detach().reshape(reference[0].shape).isfinite()
    return float(broken.sum()) + (distance(out[1:], reference[1:]) if len(out) > 1 else 0.0)


def _compare(
    op: Callable[..., Tensor], plain: Callable[..., Tensor], inputs: list[Tensor], precision: Precision,
    first_grad: bool = True, offset: int = 0, extreme: Extreme = USUAL,
    decided: Callable[..., Tensor] | None = None,
) -> dict[str, float]:  # fmt: skip
    """Compare output and gradients of `op` over all clients with those of `plain` on each client.

    Inputs after the first are parameters: views of one matrix of rows, whose gradients are written
    to views of another. `decided` returns which outputs have a gradient that does not depend on
    rounding; the gradients of the others are set to zero.
    """
    clients = inputs[0].shape[0]
    inputs = [inputs[0] if extreme.inputs == 1 else inputs[0] * extreme.inputs, *inputs[1:]]
    operands = [rounded(t, precision) if t.is_floating_point() else t for t in inputs]
    doubles = [t.double() if t.is_floating_point() else t for t in operands]
    differentiated = doubles if first_grad else doubles[1:]
    for t in differentiated:
        t.requires_grad_()
    y = torch.stack([plain(*(t[c] for t in doubles)) for c in range(clients)])
    kept = 1.0 if decided is None else torch.stack([decided(*(t[c] for t in doubles)) for c in range(clients)])
    dy = _gradient_of(y, kept, extreme, precision)
    off = distance if extreme.broken is None else hidden
    reference = torch.autograd.grad(y, differentiated, dy.double())

    parameters = operands[1:]
    widths = [p[0].numel() for p in parameters]

    def views(rows: Tensor) -> list[Tensor]:
        parts = rows[:, offset:].split(widths, dim=1)
        return [_shaped(part, p.shape[1:]) for part, p in zip(parts, parameters, strict=True)]

    matrix = torch.zeros(clients, offset + sum(widths), device=y.device)
    for view, parameter in zip(views(matrix), parameters, strict=True):
        view.copy_(parameter)
    matrix.requires_grad_()
    gradients = torch.full_like(matrix, float("nan")).detach()
    correction = torch.randn_like(gradients)
    squares: list[Tensor] = []
    weight, bias = [*views(gradients), None][:2]
    add_weight, add_bias = [*views(correction), None][:2]
    assert weight is not None
    buffers = GradientBuffers(weight, bias, add_weight, add_bias, squares)
    x = operands[0].clone().requires_grad_(first_grad)
    with filled_with_nan():
        out = op(x, *views(matrix), gradient_buffers=buffers)
        out.backward(dy.to(out.dtype))
        returned = op(x.detach(), *views(matrix))
        (returned_rows,) = torch.autograd.grad(returned, matrix, dy.to(out.dtype))
    errors = {"output": distance(out, y.detach())}
    lengths = gradients[:, offset:].double().square().sum(1)
    errors["squares"] = off(torch.cat(squares, dim=1).sum(1), lengths)
    if first_grad:
        assert x.grad is not None
        errors["input gradient"] = off(x.grad, reference[0])
    for place, (got, back, ref) in enumerate(
        zip(views(gradients), views(returned_rows), reference[first_grad:], strict=True)
    ):
        errors[f"gradient {place}"] = off(got, ref + views(correction)[place])
        errors[f"returned gradient {place}"] = off(back, ref)
    return errors


def _gradient_of(y: Tensor, kept: Tensor | float, extreme: Extreme, precision: Precision) -> Tensor:
    """Random gradient of the output, times `kept`."""
    dy = rounded(torch.randn(y.shape, dtype=torch.float64, device=y.device) * extreme.gradients, precision) * kept
    if extreme.broken is not None:
        # at the largest output, ReLU does not set the gradient to zero
        dy[0].view(-1)[y[0].argmax()] = extreme.broken
    return dy


def _shaped(rows: Tensor, shape: torch.Size) -> Tensor:
    """Part of the rows in the shape of its parameter; filters are channels-last."""
    if len(shape) != 4:
        return rows.unflatten(1, shape)
    outputs, inputs, height, width = shape
    return rows.unflatten(1, (outputs, height, width, inputs)).permute(0, 1, 4, 2, 3)


def convolution_errors(
    clients: int, batch: int, image: tuple[int, int], channels: tuple[int, int], kernel: tuple[int, int], stride: int,
    padding: int, bias: bool, pool: bool, first_grad: bool, extreme: Extreme, precision: Precision, device: str,
) -> dict[str, float]:  # fmt: skip
    def r(*shape: int) -> Tensor:
        return torch.randn(shape, device=device)

    fan = channels[0] * kernel[0] * kernel[1]
    inputs = [
        r(clients, batch, *image, channels[0]),
        r(clients, channels[1], channels[0], *kernel) / fan**0.5,
        *([r(clients, channels[1]) * 0.1] if bias else []),
    ]

    def plain(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        y = functional.conv2d(x.permute(0, 3, 1, 2), w, b, stride=stride, padding=padding)
        return (functional.max_pool2d(functional.relu(y), 2) if pool else y).permute(0, 2, 3, 1)

    def op(x: Tensor, w: Tensor, b: Tensor | None = None, **more: Any) -> Tensor:
        if pool:
            return conv2d_relu_pool(x, w, b, padding=padding, precision=precision, **more)
        return conv2d(x, w, b, stride=stride, padding=padding, precision=precision, **more)

    def decided(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        y = functional.conv2d(x.permute(0, 3, 1, 2), w, b, stride=stride, padding=padding).detach()
        margin = 1e-4 * y.square().mean().sqrt()
        windows = y[:, :, : y.shape[2] // 2 * 2, : y.shape[3] // 2 * 2].unfold(2, 2, 2).unfold(3, 2, 2)
        first, second = windows.flatten(4).topk(2).values.unbind(-1)
        off = first < -margin
        chosen = (first > margin) & (first - second > margin)
        return (off | chosen).permute(0, 2, 3, 1)

    return _compare(
        op, plain, inputs, precision, first_grad, offset=3, extreme=extreme, decided=decided if pool else None
    )


def linear_errors(
    clients: int, batch: int, size: tuple[int, int], relu: bool, extreme: Extreme, precision: Precision, device: str
) -> dict[str, float]:
    inputs = [
        torch.randn(clients, batch, size[0], device=device),
        torch.randn(clients, size[1], size[0], device=device) / size[0] ** 0.5,
        torch.randn(clients, size[1], device=device),
    ]

    def plain(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        y = functional.linear(x, w, b)
        return functional.relu(y) if relu else y

    def op(x: Tensor, w: Tensor, b: Tensor, **more: Any) -> Tensor:
        return linear(x, w, b, relu=relu, precision=precision, **more)

    return _compare(op, plain, inputs, precision, extreme=extreme)


def group_norm_errors(
    clients: int, batch: int, image: tuple[int, int], channels: int, groups: int, device: str
) -> dict[str, float]:
    inputs = [
        torch.randn(clients, batch, *image, channels, device=device) * 2 + 5,
        torch.randn(clients, channels, device=device),
        torch.randn(clients, channels, device=device),
    ]

    def plain(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return functional.group_norm(x.permute(0, 3, 1, 2), groups, w, b).permute(0, 2, 3, 1)

    def op(x: Tensor, w: Tensor, b: Tensor, **more: Any) -> Tensor:
        return group_norm(x, groups, w, b, **more)

    return _compare(op, plain, inputs, "fp32")


def embedding_errors(
    clients: int, batch: int, length: int, entries: int, features: int, device: str
) -> dict[str, float]:
    inputs = [
        torch.randint(entries, (clients, batch, length), device=device),
        torch.randn(clients, entries, features, device=device),
    ]
    return _compare(
        lambda codes, w, **more: embedding(codes, w, **more),
        lambda codes, w: functional.embedding(codes, w),
        inputs, "fp32", first_grad=False,
    )  # fmt: skip


def flatten_errors(clients: int, batch: int, image: tuple[int, int], channels: int, device: str) -> dict[str, float]:
    x = torch.randn(clients, batch, *image, channels, device=device, requires_grad=True)
    expected = x.permute(0, 1, 4, 2, 3).flatten(2)
    dy = torch.randn_like(expected)
    (dx,) = torch.autograd.grad(expected, x, dy)
    with filled_with_nan():
        out = flatten(x)
        (got,) = torch.autograd.grad(out, x, dy)
    return {"output": distance(out, expected.detach().double()), "input gradient": distance(got, dx.double())}


def max_pool2d_errors(
    clients: int, batch: int, image: tuple[int, int], channels: int, kernel: tuple[int, int], stride: tuple[int, int],
    padding: tuple[int, int], precision: Precision, device: str,
) -> dict[str, float]:  # fmt: skip
    # few different values, so that many are equal: the first of them must get the gradient
    x = torch.randint(-3, 3, (clients, batch, *image, channels), device=device).to(ROUND[precision]).requires_grad_()
    exact = x.detach().double().requires_grad_()
    y = functional.max_pool2d(exact.flatten(0, 1).permute(0, 3, 1, 2), kernel, stride, padding).permute(0, 2, 3, 1)
    y = y.unflatten(0, (clients, batch))
    dy = torch.randint(-3, 4, y.shape, device=device)
    (expected,) = torch.autograd.grad(y, exact, dy.double())
    with filled_with_nan():
        out = max_pool2d(x, kernel, stride, padding)
        (got,) = torch.autograd.grad(out, x, dy.to(x.dtype))
    return {"output": distance(out, y.detach()), "input gradient": distance(got, expected)}


def convert_filters_errors(
    clients: int, outputs: int, inputs: int, height: int, width: int, device: str
) -> dict[str, float]:
    w = torch.randn(clients, 5 + outputs * inputs * height * width, device=device)[:, 5:]
    plain = w.unflatten(1, (outputs, inputs, height, width))
    with filled_with_nan():
        there, back = torch.empty_like(w), torch.empty_like(w)
        last = _shaped(there, plain.shape[1:])
        convert_filters(plain, last)
        convert_filters(last, back.unflatten(1, plain.shape[1:]))
    return {"there": distance(last, plain.double()), "back": distance(back, w.double())}


def cross_entropy_errors(clients: int, batch: int, classes: int, masked: bool, device: str) -> dict[str, float]:
    z = torch.randn(clients, batch, classes, device=device) * 3
    labels = torch.randint(classes, (clients, batch), device=device)
    mask = torch.rand(clients, batch, device=device) < 0.7
    mask[:, 0] = True
    mask = mask if masked else torch.ones_like(mask)
    exact = z.double().requires_grad_()
    sample_loss = functional.cross_entropy(exact.flatten(0, 1), labels.flatten(), reduction="none").view(clients, batch)
    loss = (sample_loss * mask).sum(1) / mask.sum(1)
    dloss = torch.randn(clients, device=device)
    (dz,) = torch.autograd.grad(loss, exact, dloss.double())
    z.requires_grad_()
    with filled_with_nan():
        out = cross_entropy(z, labels, mask if masked else None, loss_scale=8.0)
        out.backward(dloss)
    assert z.grad is not None
    return {"loss": distance(out, loss.detach()), "gradient": distance(z.grad / 8, dz)}


def optimizer_step_errors(
    clients: int, parameters: int, clip: float | None, name: str, gap: int, with_norms: bool, device: str
) -> dict[str, float]:
    """Errors of one optimizer step against the optimizer's own function in float64.

    The state is not the initial one. A path is updated, too, unless the optimizer is SGD.
    """

    def r() -> Tensor:
        apart = torch.zeros(clients, parameters + gap, device=device)
        apart[:, :parameters] = torch.randn(clients, parameters, device=device)
        return apart[:, :parameters]

    optimizer = OPTIMIZERS[name]
    x, g, path = r(), r(), None if isinstance(optimizer, SGD) else r()
    state = {key: r().abs_() for key in optimizer.init(x)}
    if STEP_COUNT in state:
        state[STEP_COUNT] = torch.arange(3, 3 + clients, device=device)[:, None]
    g *= torch.arange(clients, device=device)[:, None] * 0.1
    lr = torch.rand(clients, device=device)
    d = g.double()
    if clip is not None:
        d = d * (clip / d.norm(dim=1, keepdim=True).clamp(min=clip))
    d = d + 0.01 * x.double()
    exact = {key: rows.double() if rows.is_floating_point() else rows.clone() for key, rows in state.items()}
    exact, change = optimizer.step(exact, d, x.double(), lr.double()[:, None])
    expected = x.double() - change
    moved = None if path is None else path.double() - lr.double()[:, None] * d
    shortened = 0 if clip is None else int((g.double().norm(dim=1) > clip).sum())
    counted = torch.full((), 7, dtype=torch.int64, device=device)
    squares = [g.square()] if with_norms else []
    fused_optimizer_step(
        x,
        g,
        lr,
        clip_norm=clip,
        weight_decay=0.01,
        optimizer=optimizer,
        state=state,
        path_CP=path,
        squared_norms=squares,
        clipped_steps=counted,
    )
    errors = {"rows": distance(x, expected), "clipped": float(abs(int(counted) - 7 - shortened))}
    errors |= {key: distance(state[key].double(), rows.double()) for key, rows in exact.items()}
    return errors if path is None or moved is None else errors | {"path": distance(path, moved)}


def drift_errors(children: int, parents: int, parameters: int, device: str) -> dict[str, float]:
    x, added = (torch.randn(children, parameters, device=device) for _ in range(2))
    rows, rate = torch.randn(parents, parameters, device=device), torch.rand(children, 1, device=device) + 0.1
    of = torch.arange(children, device=device) * parents // children
    expected = (x.double() - rows.double()[of]) / rate.double()
    with filled_with_nan():
        errors = {"drift": distance(drift(x, rows, of, rate), expected)}
        for name, rows_added in {"plus": added, "plus one row": added[:1].expand_as(added)}.items():
            errors[name] = distance(drift(x, rows, of, rate, rows_added), expected + rows_added.double())
    return errors


def lstm_errors(
    clients: int, batch: int, steps: int, inputs: int, outputs: int, precision: Precision, device: str
) -> dict[str, float]:
    exact = [nn.LSTM(inputs, outputs, 2, batch_first=True).to(device).double() for _ in range(clients)]
    x = torch.randn(clients, batch, steps, inputs, device=device)
    dy = torch.randn(clients, batch, steps, outputs, device=device)
    y = torch.stack([module(part)[0] for module, part in zip(exact, x.double(), strict=True)])
    y.backward(dy.double())
    names = [name for name, _ in exact[0].named_parameters()]
    weights = {
        name: torch.stack([module.get_parameter(name).detach().float() for module in exact]).requires_grad_()
        for name in names
    }
    layers: list[Any] = [tuple(weights[f"{kind}_l{layer}"] for kind in KINDS) for layer in range(2)]
    with filled_with_nan():
        out = lstm(x, layers, precision)
        out.backward(dy.to(out.dtype))
    errors = {"y": distance(out, y.detach())}
    for name, weight in weights.items():
        gradients = [module.get_parameter(name).grad for module in exact]
        assert weight.grad is not None
        errors[name] = distance(weight.grad, torch.stack([grad for grad in gradients if grad is not None]))
    return errors


KINDS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
