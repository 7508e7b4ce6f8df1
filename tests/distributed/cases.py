"""Small runs whose results must not depend on the number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from stratafl import ParticipationContext, Simulation, feddyn, mtgc
from stratafl.base.topology import Shape, Topology
from stratafl.distributed.communicator import Communicator
from stratafl.rules.registry import entries
from tests.federation.test_weights import remembering
from tests.flat import client_options, simulate

SHAPES: dict[str, Shape] = {
    "depth 1": 5,
    "depth 2": "4x2",
    "depth 3": "2x2x2",
    "uneven": [5, 1, 2],
    "one large group": [7, 1],
    "uneven, depth 3": [[2, 1], [4], [1, 2, 2]],
}
PERIODS = {1: [3], 2: [2, 2], 3: [2, 2, 2]}
FEATURES, CLASSES = 6, 3
NETWORK = {
    "tier": [{"up_mbit_s": 1.0, "jitter_s": {"name": "pareto", "least": 0.01, "alpha": 1.2}}],
    "leaf": {"step_s": {"name": "lognormal", "median": 0.05, "sigma": 1.0}},
}


class Normed(nn.Module):
    """Model with buffers that change in training, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.norm, self.out = nn.Linear(FEATURES, 5), nn.BatchNorm1d(5), nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.dropout(torch.relu(self.norm(self.into(x))), 0.2, self.training))


class Masked(nn.Module):
    """Model with a constant buffer that is not finite, and one that changes in training."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(FEATURES, CLASSES)
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf, torch.inf, torch.nan]))
        self.register_buffer("mean", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean()
        return self.out(x)


class Telling(nn.Linear):
    """Model that returns a dict of outputs."""

    def forward(self, x: Tensor) -> Any:
        return {"logits": super().forward(x), "inputs": x}


def furthest(outputs: Tensor, targets: Tensor) -> Tensor:
    """Metric that is not a mean over samples."""
    return (outputs.argmax(dim=1) - targets).double().std(correction=0) + outputs.double().max()


class Noisy(Dataset):
    """Data set whose items have new noise whenever they are read."""

    def __init__(self, inputs: Tensor, targets: Tensor):
        self.inputs, self.targets = inputs, targets

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, number: int) -> tuple[dict[str, Tensor], Tensor]:
        return {"input": self.inputs[number] + 0.1 * torch.randn(FEATURES)}, self.targets[number]


def every_second(draw: ParticipationContext) -> np.ndarray:
    return (np.arange(draw.tree.sizes[draw.level]) + draw.round) % 2 == 0


def make(
    ranks: Communicator | None,
    shape: str,
    rules: Any,
    *,
    ragged: bool = False,
    broken: int | None = None,
    huge: dict[int, float] | None = None,
    own_test: bool = False,
    lazy: bool = False,
    **settings: Any,
) -> Simulation:
    tree = Topology.of(SHAPES[shape])
    random = torch.Generator().manual_seed(3)
    sizes = [3 + (5 * client % 11 if ragged else 4) for client in range(tree.leaves)]
    inputs = torch.randn(sum(sizes), FEATURES, generator=random, dtype=torch.float64)
    targets = (inputs @ torch.randn(FEATURES, CLASSES, generator=random, dtype=torch.float64)).argmax(dim=1)
    ends = np.cumsum(sizes)
    parts = [np.arange(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    test = inputs[:7].clone(), targets[:7]
    if broken is not None:
        inputs[parts[broken]] = float("nan")
    for client, size in (huge or {}).items():
        inputs[parts[client]] = size
    if own_test:
        settings["test_partition"] = [[client % 7, (3 * client + 1) % 7][: client % 3] for client in range(tree.leaves)]
    data: Any = inputs, targets
    tests: Any = test
    if lazy:
        data, tests = Noisy(inputs, targets), ({"input": test[0]}, test[1])
    options = {"model": lambda: nn.Linear(FEATURES, CLASSES), "weights": "samples", "rounds": 2, **settings}
    model, chain = options.pop("model"), options.pop("leaf", client_options(0.1, clip_norm=1.0, momentum=0.5))
    periods = PERIODS[tree.depth] if chain.get("epochs") is None else PERIODS[tree.depth][:-1]
    return simulate(
        lambda: model().double(), data, parts, tree, rules,
        periods=periods, leaf=chain, batch=4, seed=5,
        test=tests, evaluate_levels=list(range(1, tree.depth + 1)), ranks=ranks, lazy=lazy, **options,
    )  # fmt: skip


CASES: dict[str, Callable[[Communicator | None], Simulation]] = {}


def add(name: str, *arguments: Any, **settings: Any) -> None:
    CASES[name] = partial(_make_case, arguments, settings)


def _make_case(arguments: tuple, settings: dict, ranks: Communicator | None) -> Simulation:
    return make(ranks, *arguments, **settings)


for entry in entries():
    for shape in ("depth 2", "uneven, depth 3", "one large group"):
        depth = Topology.of(SHAPES[shape]).depth
        add(f"{entry.name}, {shape}", shape, [entry.name] * depth, ragged=shape != "depth 2")
for shape in SHAPES:
    depth = Topology.of(SHAPES[shape]).depth
    add(f"mtgc, {shape}, some take part", shape, "mtgc", participation=[0.6] * depth, ragged=True)
    add(f"gradient restart, {shape}", shape, [mtgc(restart="gradient")] * depth)
    add(f"scaffold everywhere, {shape}, one each", shape, ["scaffold"] * depth, participation=[1] * depth)
    add(f"NaN in a client, {shape}", shape, "mtgc", broken=4)
    add(f"states of first models, {shape}", shape, [remembering()] * depth, participation=[0.6] * depth, ragged=True)
for shape in ("one large group", "uneven, depth 3"):
    depth = Topology.of(SHAPES[shape]).depth
    everywhere = [mtgc(restart="gradient")] * depth
    add(f"NaN in the first client, {shape}", shape, "mtgc", broken=0)
    add(f"NaN and a median, {shape}", shape, ["median"] * depth, broken=3, participation=[1.0] * (depth - 1) + [0.7])
    add(f"NaN and gradient restart, {shape}", shape, everywhere, participation=[0.5] * depth, broken=1)
    add(f"ideal corrections, {shape}", shape, "mtgc", drift="ideal")
    add(f"buffers and dropout, {shape}", shape, "mtgc", model=Normed)
    kept = client_options(0.1, momentum=0.5, optimizer_state="keep")
    own = {"model": Normed, "local_parameters": "batch_norm", "leaf": kept}
    add(f"batch norm at home, {shape}", shape, "mtgc", participation=[0.7] * depth, **own)
    add(f"a pull behind the clip, {shape}", shape, [feddyn(0.5, pull="after_clip")] * depth, ragged=True)
    add(f"a function of one's own, {shape}", shape, "feddyn", participation=every_second)
    adam = client_options(0.05, optimizer="adam", optimizer_state="keep", clip_norm=1.0)
    add(f"kept Adam, {shape}", shape, "mtgc", leaf=adam, participation=[0.7] * depth, ragged=True)
    add(f"passes, {shape}", shape, "mtgc", leaf=client_options(0.1, epochs=2), ragged=True, participation=[0.7] * depth)
    add(f"stacked, {shape}", shape, ["mtgc"] * (depth - 1) + ["fedprox"], engine="stacked", ragged=True)
    add(f"everything explodes, {shape}", shape, "mtgc", leaf=client_options(1e200))
    add(f"a mask among the buffers, {shape}", shape, "mtgc", model=Masked, participation=[0.7] * depth)
    add(f"a deadline, {shape}", shape, "mtgc", network=NETWORK, wait={"deadline": 0.15}, participation=[0.7] * depth)
    two = {"network": NETWORK, "wait": ["all"] * (depth - 1) + [{"buffer": 2}]}
    add(f"a buffer, {shape}", shape, {"name": "mtgc", "restart": "keep"}, **two, participation=[1.0] * depth)
    add(f"buffers, {shape}", shape, "scaffold", network=NETWORK, wait=[{"buffer": 2}] * depth, engine="stacked")
    add(f"the first, {shape}", shape, "mtgc", network=NETWORK, wait=[{"first": 0.6}] * depth, engine="stacked")
    add(f"lazy, with names, {shape}", shape, "mtgc", lazy=True, ragged=True, engine="stacked")
    add(f"NaN beside a mask, {shape}", shape, "hfedavg", model=Masked, broken=3)
for shape in ("one large group", "uneven, depth 3"):
    add(f"metrics that add up, {shape}", shape, "mtgc", metrics=["f1", "top2", "perplexity"])
    add(f"a metric of everything, {shape}", shape, "mtgc", metrics={"furthest": furthest, "f1": "f1"}, own_test=True)
    add(f"a table of outputs, {shape}", shape, "mtgc", model=lambda: Telling(FEATURES, CLASSES), own_test=True)
    add(f"a loss by name, {shape}", shape, "mtgc", loss={"name": "cross_entropy", "label_smoothing": 0.1})
for shape in SHAPES:
    depth = Topology.of(SHAPES[shape]).depth
    free = {"leaf": client_options(0.1), "broken": 4}
    add(f"a huge client, {shape}", shape, "mtgc", huge={1: -1e38}, **free)
    add(f"huge clients, {shape}", shape, ["mtgc"] * depth, huge={0: 1e30, 3: 1e60}, participation=[0.8] * depth, **free)
    add(f"a huge gradient, {shape}", shape, [mtgc(restart="gradient")] * depth, huge={2: 1e100}, **free)

IN_TWO_GOES = [
    "scaffold, one large group",
    "gradient restart, uneven, depth 3",
    "stacked, uneven, depth 3",
    "kept Adam, uneven, depth 3",
    "batch norm at home, uneven, depth 3",
    "lazy, with names, one large group",
    "ideal corrections, uneven, depth 3",
    "NaN and a median, one large group",
    "the first, uneven, depth 3",
]
"""Cases that are also stopped after the first round and within the second, and then resumed on
another number of ranks."""
WITHIN = ", within a round"
