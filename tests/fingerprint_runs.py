"""Small runs of all features of a federation, with their results.

They use `simulate`, the command, and the in-memory deployment of the deployment's tests. Only
`nodes_of_simulation` and `nodes_of_deployment` depend on the layout of nodes' states; adapt these
two when the layout changes, and keep the fingerprints.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import asdict, astuple
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from stratafl import Cosine, ParticipationContext, Simulation, StepDecay, Topology, feddyn, mtgc
from stratafl.base.topology import Shape
from stratafl.cli.main import main
from stratafl.rules.registry import entries
from tests.deploy.trees import Deployed
from tests.flat import client_options, simulate

Tensors = dict[str, Tensor]
SHAPES: dict[str, Shape] = {
    "depth 1": 5,
    "depth 2": "2x2",
    "depth 2, uneven": [2, 3, 1],
    "depth 3": "2x2x2",
    "depth 3, uneven": [[2, 1], [3], [1, 2]],
    "depth 4": "2x1x2x2",
    "depth 4, uneven": [[[2], [1, 1]], [[3, 1]]],
}
PERIODS = {1: [3], 2: [2, 2], 3: [2, 1, 2], 4: [2, 1, 2, 1]}
FEATURES, CLASSES = 4, 3


class Left(NamedTuple):
    """Result of a run."""

    model: Tensors
    """State dict of the root's model."""
    nodes: dict[str, Tensors]
    """State of each node: see `nodes_of_simulation`."""
    records: list[dict[str, Any]]
    """Records of the rounds without times, then the traffic of every node and the engine."""


# -- states of nodes --------------------------------------------------------------------


def nodes_of_simulation(tree: Topology, state: dict[str, Any]) -> dict[str, Tensors]:
    """State of each node: its model and buffers, those it sends to its children, its rule's memory,
    its rule's state and correction on the edge to its parent, its sum of learning rates, and
    whether it takes part."""
    nodes: dict[str, Tensors] = {name: {} for level in tree.names for name in level}
    levels = state["federation"]["levels"]

    def add(kind: str, level: int, rows: Tensor | np.ndarray | None) -> None:
        if rows is not None:
            for name, row in zip(tree.names[level], torch.as_tensor(rows), strict=True):
                nodes[name][kind] = row

    for level, values in enumerate(levels):
        add("model", level, values["model"])
        add("buffers", level, values["buffers"])
        add("rate", level, values["lr_sum_N"])
        add("active", level, values["active_N"])
        if level < tree.depth:
            add("held", level, values["broadcast"]["model"])
            add("held buffers", level, values["broadcast"]["buffers"])
            for key, rows in values["memory"].items():
                add(f"memory {key}", level, rows)
        if level > 0:
            add("correction", level, values["correction"])
            for key, rows in values["state"].items():
                add(f"state {key}", level, rows)
    return nodes


def nodes_of_deployment(deployed: Deployed) -> dict[str, Tensors]:
    """The same for deployed nodes; a child's model is the last one that its parent sent."""
    nodes: dict[str, Tensors] = {}
    for name, stored in deployed.kept.items():
        values = nodes[name] = {}
        if stored.below is not None:
            values |= {"held": stored.below.held, "held buffers": stored.below.buffers}
            values["rate"] = torch.tensor(stored.below.rate, dtype=torch.float64)
            values |= {f"memory {key}": rows for key, rows in stored.below.memory.items()}
        if stored.above is not None:
            values |= {f"state {key}": rows for key, rows in (stored.above.state or {}).items()}
            if stored.above.start is not None:
                values |= {"given": stored.above.start.model, "given buffers": stored.above.start.buffers}
            if stored.above.correction is not None:
                values["correction"] = stored.above.correction
            if stored.above.above is not None:
                values["correction from above"] = stored.above.above
    return nodes


# -- ways to run ----------------------------------------------------------------


def simulated(sim: Simulation) -> Left:
    """Run a simulation; on several ranks the first one returns the result of all."""
    result = sim.run()
    tree, state = result.tree.whole, sim.state()
    if not sim.ranks.is_first:
        return Left({}, {}, [])
    records = [asdict(record) for record in result.history]
    traffic = {
        name: astuple(result.communication.node(level, number))
        for level in range(1, tree.depth + 1)
        for number, name in enumerate(tree.names[level])
    }
    records = [*timeless(records), {"engine": state["engine"], "traffic": traffic}]
    return Left(result.module.state_dict(), nodes_of_simulation(tree, state), records)


def resumed(make: Callable[[], Simulation]) -> Left:
    """Run one round, and the others in a new simulation with its state."""
    first, second = make(), make()
    next(first)
    second.restore(copy.deepcopy(first.state()))
    return simulated(second)


def deployed(make: Callable[[], Simulation], restart: bool = False, **settings: Any) -> Left:
    """Run deployed nodes in memory; `restart`: restore all from their stored states after every
    round."""
    sim = make()
    run = Deployed(sim, **settings)
    tree, records = run.job.tree, []
    run.root.greet()
    while run.root.round < run.job.rounds:
        refused, absent = run.root.one_round()
        records.append({"refused": refused, "absent": absent})
        if restart:
            for level in range(tree.depth, -1, -1):
                for number, name in enumerate(tree.names[level]):
                    run.make(level, number, run.kept[name])
    run.root.end()
    traffic = {
        name: run.traffic(level, number)
        for level in range(1, tree.depth + 1)
        for number, name in enumerate(tree.names[level])
    }
    nodes = nodes_of_deployment(run)
    module = sim.flat.build(nodes["root"]["held"][0], nodes["root"]["held buffers"][0])
    return Left(module.state_dict(), nodes, [*records, {"traffic": traffic}])


CONFIG = """
rounds = 3
tree.shape = [2, 3]
data.source = "synthetic"
data.arguments = {samples = 20, features = 5, classes = 3}
model.name = "net.py:Net"
method.rules = ["mtgc", "scaffold"]
client = {batch_size = 4, optimizer = {name = "sgd", momentum = 0.5}, clip_norm = 1.0}
schedule = {periods = [2, 2], participation = [1.0, 0.6]}
evaluation.levels = [1]
execution.engine = "loop"
storage.checkpoint_every = 1
"""
NET = """
from pathlib import Path
from torch import nn

class Net(nn.Linear):
    steps = 0
    def __init__(self, input_shape, classes):
        super().__init__(input_shape[0], classes)
        self.double()

    def forward(self, x):
        Net.steps += self.training
        if Net.steps > 20 and Path("stop").exists():
            raise KeyboardInterrupt
        return super().forward(x.double())
"""


def commanded(interrupt: bool) -> Left:
    """Run the command with a config, optionally interrupted and resumed; read the run's folder."""
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        Path("study.toml").write_text(CONFIG)
        Path("net.py").write_text(NET)
        runs = Path("runs")
        if interrupt:
            Path("stop").touch()
            assert command("run", "study.toml", "--quiet") != 0
            Path("stop").unlink()
            assert 0 < len(lines := next(runs.glob("*/rounds.jsonl")).read_text().splitlines()) < 3, lines
            assert command("run", "--resume", next(runs.iterdir()), "--quiet") == 0
        else:
            assert command("run", "study.toml", "--quiet") == 0
        (run,) = runs.iterdir()
        records = [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
        return Left(load_file(run / "model.safetensors"), {}, timeless(records))


def command(*arguments: object) -> int:
    argv = ["stratafl", *map(str, arguments)]
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        try:
            with patch.object(sys, "argv", argv):
                main()
        except SystemExit as ended:
            return int(ended.code or 0)
    return 0


def timeless(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Records without times and derived numbers."""
    left_out = ("seconds", "over_nodes", "traffic")
    return [{key: value for key, value in record.items() if key not in left_out} for record in records]


# -- the runs --------------------------------------------------------------------------------------


class Normed(nn.Module):
    """A module with running statistics, a buffer that is not finite, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.norm, self.out = nn.Linear(FEATURES, 5), nn.BatchNorm1d(5), nn.Linear(5, CLASSES)
        self.register_buffer("mask", torch.tensor([0.0, 0.0, -torch.inf]))

    def forward(self, x: Tensor) -> Tensor:
        inner = torch.dropout(torch.relu(self.norm(self.into(x))), 0.2, self.training)
        return self.out(inner) + self.mask.clamp(min=-1.0)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, CLASSES))


def every_second(draw: ParticipationContext) -> np.ndarray:
    return (np.arange(draw.tree.sizes[draw.level]) + draw.round) % 2 == 0


def make(shape: str, rules: Any, wrong: dict[int, float] | None = None, **settings: Any) -> Simulation:
    """Set up a simulation; `wrong`: value of all inputs of some clients."""
    tree = Topology.of(SHAPES[shape])
    random = np.random.default_rng(3)
    sizes = [4 + 5 * client % 7 for client in range(tree.leaves)]
    inputs = torch.tensor(random.normal(size=(sum(sizes), FEATURES)))
    targets = (inputs @ torch.tensor(random.normal(size=(FEATURES, CLASSES)))).argmax(dim=1)
    ends = np.cumsum(sizes)
    parts = [np.arange(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    test = inputs[:9].clone(), targets[:9]
    for client, value in (wrong or {}).items():
        inputs[parts[client]] = value
    options = {
        "model": lambda: nn.Linear(FEATURES, CLASSES), "periods": PERIODS[tree.depth], "rounds": 2, "batch": 3,
        "seed": 5, "test": test, "evaluate_levels": list(range(1, tree.depth + 1)), "engine": "loop", **settings,
    }  # fmt: skip
    model = options.pop("model")
    return simulate(lambda: model().double(), (inputs, targets), parts, tree, rules, **options)


RUNS: dict[str, Callable[[], Left]] = {}
RANKED: dict[str, Callable[..., Simulation]] = {}
"""Simulations that are also run on several ranks."""


def add(name: str, *arguments: Any, **settings: Any) -> None:
    RUNS[name] = lambda: simulated(make(*arguments, **settings))


def depth_of(shape: str) -> int:
    return Topology.of(SHAPES[shape]).depth


REGISTERED = [entry.name for entry in entries() if entry.make.__module__.startswith("stratafl.")]
"""Rules of the package, without those that other tests register in this process."""
FULL = client_options(0.1, clip_norm=0.5, momentum=0.6, weight_decay=0.01)
for rule in REGISTERED:
    add(f"{rule}, as a method", "depth 2, uneven", rule, weights="samples")
    add(f"{rule}, everywhere", "depth 3, uneven", [rule] * 3, leaf=FULL, participation=[1.0, 1.0, 0.7])
    RUNS[f"{rule}, deployed"] = partial(deployed, partial(make, "depth 2", rule, weights="samples"))
for shape in SHAPES:
    add(f"mtgc, {shape}", shape, "mtgc")
    add(f"hfedavg, {shape}, some take part", shape, "hfedavg", participation=[0.6] * depth_of(shape), weights="samples")
    add(f"gradient restart, {shape}", shape, [mtgc(restart="gradient")] * depth_of(shape), leaf=FULL)
for engine in ("loop", "stacked", "vmap"):
    uneven = "depth 3, uneven"
    add(f"{engine}, mtgc", uneven, "mtgc", engine=engine, model=network, leaf=FULL, weights="samples")
    mixed = ["mtgc", "scaffold", {"name": "fedprox", "mu": 0.3}]
    add(f"{engine}, three rules", uneven, mixed, engine=engine, model=network, participation=[1.0, 0.6, 0.6])
    add(f"{engine}, feddyn, whole batches", "depth 1", "feddyn", engine=engine, model=network, batch=None)
add("given weights", "depth 2, uneven", "mtgc", weights=[[3, 1, 2], [1, 2, 3, 1, 1, 5]])
add("weights of clients", "depth 2, uneven", "mtgc", weights=[1.0, 2.0, 0.5, 4.0, 1.0, 3.0])
add("one of each group", "depth 3, uneven", "mtgc", participation=[1, 1, 1])
add("a participation of one's own", "depth 2, uneven", ["mtgc", "scaffold"], participation=every_second)
add("momentum alone", "depth 2", "mtgc", leaf=client_options(0.1, momentum=0.9))
add("clipping alone", "depth 2", "mtgc", leaf=client_options(0.1, clip_norm=0.1))
add(
    "steps with replacement",
    "depth 2",
    "mtgc",
    sampling="replacement",
    leaf=client_options(0.2, lr_schedule=StepDecay(1, 0.5)),
)
add("whole batches", "depth 2", "mtgc", batch=None, leaf=client_options(0.2, lr_schedule=Cosine(rounds=3)), rounds=3)
add("corrections that are kept", "depth 3", [mtgc(restart="keep")] * 3, participation=[1.0, 1.0, 0.5])
add("a pull behind the clip", "depth 2, uneven", [feddyn(0.5, pull="after_clip")] * 2, leaf=FULL)
add("buffers, a mask and dropout", "depth 2, uneven", "mtgc", model=Normed, batch=10, weights="samples")
add("ideal corrections", "depth 3", "mtgc", drift="ideal", evaluate_every=2)
add("no number in a client", "depth 3, uneven", "mtgc", wrong={1: float("nan")})
add("a huge client", "depth 2, uneven", ["mtgc", "scaffold"], wrong={2: -1e38})
add("a bounded norm", "depth 2, uneven", "hfedavg", wrong={0: 30.0}, update_factor=2.0, rounds=3)
RUNS["resumed, mtgc"] = partial(resumed, partial(make, "depth 2, uneven", "mtgc"))
three = [mtgc(restart="gradient"), "feddyn", "scaffold"]
settings = {"model": Normed, "batch": 10, "leaf": FULL, "rounds": 3}
some = partial(make, "depth 3, uneven", three, participation=[1.0, 0.6, 0.6], **settings)
RUNS["three rules"] = lambda: simulated(some())
RUNS["resumed, three rules"] = partial(resumed, some)
RUNS["by the command"] = partial(commanded, interrupt=False)
RUNS["by the command, interrupted"] = partial(commanded, interrupt=True)
served = partial(make, "depth 2", ["mtgc", "scaffold"], weights="samples", **settings)
RUNS["deployed, buffers"] = partial(deployed, served)
RUNS["deployed, restarted"] = partial(deployed, served, restart=True)
RUNS["deployed, by samples"] = partial(deployed, partial(served, weights="uniform"), by_samples=True)
RUNS["deployed, some take part"] = partial(deployed, partial(served, participation=[1.0, 0.5]))
RUNS["deployed, a huge client"] = partial(deployed, partial(served, model=network, wrong={1: 1e38}))
for shape in ("depth 1", "depth 2, uneven", "depth 3, uneven"):
    shared = partial(make, shape, "mtgc", weights="samples", leaf=FULL, participation=[0.8] * depth_of(shape))
    RANKED[f"mtgc, {shape}"] = shared
    RANKED[f"no number in a client, {shape}"] = partial(make, shape, ["scaffold"] * depth_of(shape), {1: float("nan")})
RANKED["stacked, mtgc"] = partial(make, "depth 3, uneven", "mtgc", engine="stacked", model=network, leaf=FULL)


def every_run() -> Iterator[tuple[str, Left]]:
    """Run all runs of this process."""
    for name, run in RUNS.items():
        yield name, run()
    for name, shared in RANKED.items():
        yield f"{name}, one rank", simulated(shared())
