"""Modules put together at random. A plan is plain data, so that a failing one can be read and built
again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.engine.zoo.entry import Entry, Net, reals

WIDTH, SIDE = 4, 5
Plan = str | tuple


def _frozen(layer: nn.Module) -> nn.Module:
    return layer.requires_grad_(False)


def _without_gradients(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        return m.layer(x)


def _unused(m: Any, x: Tensor) -> Tensor:
    m.layer(x)
    return x


def _shifted(m: Any, x: Tensor) -> Tensor:
    """Write in place, through another name; nothing changes while the gate is zero."""
    y = m.identity(x)
    y += m.gate**2
    return x


def _moving(m: Any, x: Tensor) -> Tensor:
    mean = x.detach().mean()
    m.mean.mul_(0.9).add_(0.1 * mean)
    return x - m.mean


def _layers(layer: Callable[[], nn.Module], batch_norm: Callable[[], nn.Module], shape: tuple[int, ...]) -> dict:
    """Layers for tables and for images; `layer` makes one with weights that keeps the shape."""
    return {
        "layer": layer,
        "frozen layer": lambda: _frozen(layer()),
        "tanh": nn.Tanh,
        "GELU": nn.GELU,
        "sigmoid": nn.Sigmoid,
        "ReLU": nn.ReLU,
        "ReLU in place": lambda: nn.ReLU(inplace=True),
        "ELU in place": lambda: nn.ELU(inplace=True),
        "slopes": nn.PReLU,
        "identity": nn.Identity,
        "softmax": lambda: nn.Softmax(dim=1),
        "layer norm": lambda: nn.LayerNorm(SIDE if len(shape) > 1 else WIDTH),
        "group norm": lambda: nn.GroupNorm(2, WIDTH),
        "batch norm": batch_norm,
        "batch norm, evaluating": lambda: batch_norm().eval(),
        "dropout": lambda: nn.Dropout(0.3),
        "dropout, evaluating": lambda: nn.Dropout(0.3).eval(),
        "scale": lambda: Net(lambda m, x: x * m.scale, scale=nn.Parameter(torch.ones(shape))),
        "shift by a buffer": lambda: Net(lambda m, x: x + m.shift / m.shift.sum(), shift=torch.rand(shape) + 1),
        "moving mean": lambda: Net(_moving, mean=torch.tensor(0.0)),
        "without gradients": lambda: Net(_without_gradients, layer=layer()),
        "unused": lambda: Net(_unused, layer=layer()),
        "cut off": lambda: Net(lambda m, x: m.layer(x.detach()), layer=layer()),
        "rounded": lambda: Net(lambda m, x: m.layer(torch.sigmoid(x)) + (4 * x).long(), layer=layer()),
        "shifted by another name": lambda: Net(_shifted, identity=nn.Identity(), gate=nn.Parameter(torch.zeros(()))),
        "centred over the batch": lambda: Net(lambda m, x: x - x.mean(dim=0, keepdim=True)),
        "decided by values": lambda: Net(lambda m, x: m.layer(x) if x.detach().sum() > 0 else x, layer=layer()),
        "there and back": lambda: Net(lambda m, x: x.transpose(1, -1).flatten(1).view(x.shape)),
    }


TABLE = _layers(lambda: nn.Linear(WIDTH, WIDTH), lambda: nn.BatchNorm1d(WIDTH), (WIDTH,))
IMAGE = _layers(lambda: nn.Conv2d(WIDTH, WIDTH, 3, padding=1), lambda: nn.BatchNorm2d(WIDTH), (WIDTH, 1, 1)) | {
    "max pool": lambda: nn.MaxPool2d(3, stride=1, padding=1),
    "mean pool": lambda: nn.AvgPool2d(3, stride=1, padding=1),
    "depthwise": lambda: nn.Conv2d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH, bias=False),
    "instance norm": lambda: nn.InstanceNorm2d(WIDTH, affine=True),
    "dropout of channels": lambda: nn.Dropout2d(0.3),
    "linear along rows": lambda: nn.Linear(SIDE, SIDE),
}


def _added(m: Any, x: Tensor) -> Tensor:
    y = m.body(x)
    y += x
    return y


WITHIN: dict[str, Callable[[nn.Module], nn.Module]] = {
    "residual": lambda body: Net(lambda m, x: x + m.body(x), body=body),
    "residual in place": lambda body: Net(_added, body=body),
    "twice": lambda body: nn.Sequential(body, body),
    "recomputed": lambda body: Net(lambda m, x: checkpoint(m.body, x, use_reentrant=False), body=body),
    "behind a gate": lambda body: Net(
        lambda m, x: x + m.gate**2 * m.body(x), body=body, gate=nn.Parameter(torch.zeros(()))
    ),
    "straight through": lambda body: Net(lambda m, x: x + (m.body(x) - x).detach(), body=body),
    "frozen": _frozen,
    "evaluating": lambda body: body.eval(),
}
BETWEEN: dict[str, Callable[[nn.Module, nn.Module], nn.Module]] = {
    "then": nn.Sequential,
    "plus": lambda a, b: Net(lambda m, x: m.a(x) + m.b(x), a=a, b=b),
    "times": lambda a, b: Net(lambda m, x: m.a(x) * torch.sigmoid(m.b(x)), a=a, b=b),
    "halves": lambda a, b: Net(lambda m, x: torch.cat([m.a(x)[:, :2], m.b(x)[:, 2:]], dim=1), a=a, b=b),
    "but used": lambda a, b: Net(lambda m, x: (m.a(x), m.b(x))[1], a=a, b=b),
}


def plans(leaves: dict[str, Callable[[], nn.Module]]) -> st.SearchStrategy[Plan]:
    def larger(parts: st.SearchStrategy[Plan]) -> st.SearchStrategy[Plan]:
        within = st.tuples(st.sampled_from(sorted(WITHIN)), parts)
        return st.one_of(st.tuples(st.sampled_from(sorted(BETWEEN)), parts, parts), within)

    return st.recursive(st.sampled_from(sorted(leaves)), larger, max_leaves=6)


def built(plan: Plan, leaves: dict[str, Callable[[], nn.Module]]) -> nn.Module:
    if isinstance(plan, str):
        return leaves[plan]()
    name, *parts = plan
    return {**WITHIN, **BETWEEN}[name](*(built(part, leaves) for part in parts))


@st.composite
def entries(draw: st.DrawFn) -> tuple[Plan, Entry]:
    """A plan, and the module it describes between a layer and a head."""
    image = draw(st.booleans())
    leaves = IMAGE if image else TABLE
    plan = draw(plans(leaves))
    first, shape = leaves["layer"], (WIDTH, SIDE, SIDE) if image else (WIDTH,)

    def build() -> nn.Module:
        head = nn.Linear(WIDTH * SIDE * SIDE if image else WIDTH, 3)
        return nn.Sequential(first(), built(plan, leaves), nn.Flatten(), head)

    return plan, Entry(build, reals(*shape), loss=F.cross_entropy, draws=True, pairs=True)
