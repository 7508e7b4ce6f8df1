"""Settings of the paper's experiments, and their small counterparts.

Settings that the paper's text leaves open are those of the code released with it: weight decay,
clipping, flips and crops. At quick scale every data set is the embedded digits, on a tree of 3 x 8
instead of 10 x 10: few groups and many steps between two synchronisations, since digits are so easy
that methods differ only where clients and groups drift far apart.

The paper names neither FedProx's mu nor FedDyn's alpha. `stratafl reproduce search` trains the
`CANDIDATES` on CIFAR-10 (both levels non-i.i.d., another seed); a test compares `CHOSEN` with the
best candidates in docs/results. Figure 3 has a line for the released value and one
for the best.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from papers.harness.series import Case, Options, Panel
from stratafl import Experiment
from stratafl.base.errors import unknown_name

RELEASED: dict[str, dict[str, Any]] = {
    "fedprox": {"mu": 0.0001},
    "feddyn": {"alpha": 0.01, "pull": "after_clip"},
}
"""Parameters in the code released with the paper."""
CHOSEN: dict[str, dict[str, Any]] = {
    "fedprox": {"mu": 0.1},
    "feddyn": {"alpha": 0.1},
}
"""Best parameters of the search."""
CANDIDATES: dict[str, tuple[str, tuple[float, ...]]] = {
    "fedprox": ("mu", (0.0001, 0.001, 0.01, 0.1, 1.0)),
    "feddyn": ("alpha", (0.001, 0.01, 0.1, 1.0)),
}


TUNED = {"fedprox": "FedProx", "feddyn": "FedDyn"}
"""Methods with a parameter whose value the paper does not state."""


def _valued(name: str, whose: str, params: dict[str, Any]) -> str:
    """Title of a method with the value of its parameter and the source of the value."""
    parameter, _ = CANDIDATES[name]
    return f"{TUNED[name]} ({whose}: {parameter} = {params[parameter]:g})"


METHODS = {
    "hfedavg": "HFedAvg",
    "fedprox_released": _valued("fedprox", "released", RELEASED["fedprox"]),
    "fedprox": _valued("fedprox", "best of search", CHOSEN["fedprox"]),
    "scaffold": "SCAFFOLD",
    "feddyn_released": _valued("feddyn", "released", RELEASED["feddyn"]),
    "feddyn": _valued("feddyn", "best of search", CHOSEN["feddyn"]),
    "local_correction": "Local correction",
    "group_correction": "Group correction",
    "mtgc": "MTGC",
}
CONVENTIONAL = ("hfedavg", "fedprox_released", "fedprox", "scaffold", "feddyn_released", "feddyn", "mtgc")
AS_RELEASED = ("hfedavg", "fedprox_released", "scaffold", "feddyn_released", "mtgc")
"""Lines of the paper's own Figure 3."""
CORRECTIONS = ("hfedavg", "local_correction", "group_correction", "mtgc")

DISTRIBUTIONS = {
    "client": "group i.i.d. & client non-i.i.d.",
    "group": "group non-i.i.d. & client i.i.d.",
    "both": "group non-i.i.d. & client non-i.i.d.",
}

PERIODS = {"quick": (2, 20), "paper": (30, 20)}
"""Default E and H."""
ROUNDS = {"quick": 12, "paper": 100}
"""Default number of rounds; the paper states 100 for Fig. 7b only."""
GROUPS = {"quick": (3, 8), "paper": (10, 10)}
ALPHA = {"quick": 0.01, "paper": 0.1}
"""Dirichlet parameter; with the paper's value the few digits of quick scale are nearly i.i.d."""


@dataclass(frozen=True)
class Task:
    """Model, augmentation and learning rate that the paper uses for a data set."""

    title: str
    model: str
    augment: str = "none"
    lr: float = 0.1


TASKS = {
    "emnist_letters": Task("EMNIST-L", "mlp"),
    "fashion_mnist": Task("Fashion-MNIST", "mlp"),
    "cifar10": Task("CIFAR-10", "cnn", "flip_and_crop"),
    "cifar100": Task("CIFAR-100", "resnet18_gn", "flip_and_crop"),
    "cinic10": Task("CINIC-10", "cnn", "flip_and_crop"),
    "shakespeare": Task("Shakespeare", "lstm", lr=0.5),
}
FOUR = ("emnist_letters", "fashion_mnist", "cifar10", "cifar100")
TITLES = {"digits": "Digits", **{name: task.title for name, task in TASKS.items()}}


def eh_name(e: int, h: int) -> str:
    """Name of a setting (E, H) within a panel's name."""
    return f"E{e}H{h}"


def label(panel: Panel) -> str:
    """Short name of a panel."""
    return " ".join(TITLES.get(part, part) for part in panel)


def heading(panel: Panel) -> str:
    """Name of a panel in the words of the paper."""
    return ", ".join(DISTRIBUTIONS.get(part) or word(part) for part in panel)


def word(part: str) -> str:
    """Title of a data set, or of a setting: "E = 10, H = 20" for E10H20."""
    e, _, h = part.removeprefix("E").partition("H")
    return f"E = {e}, H = {h}" if e.isdigit() and h.isdigit() else TITLES.get(part, part)


def sets(options: Options, names: Sequence[str]) -> Sequence[str]:
    """Data sets of a figure; at quick scale the digits stand for all of them, in one panel."""
    return ("digits",) if options.quick else names


def split(distribution: str, options: Options, depth: int = 2) -> list[dict[str, Any]]:
    """Partitions per level: non-i.i.d. at the clients, at the levels above, or at all levels."""
    apart: dict[str, Any] = {"name": options.partition, "alpha": ALPHA[options.scale]}
    alike: dict[str, Any] = {"name": "iid"}
    above, clients = {"client": (alike, apart), "group": (apart, alike), "both": (apart, apart)}[distribution]
    return [above] * (depth - 1) + [clients]


def method(name: str) -> dict[str, Any]:
    """Table of a method, with the released or searched value of an unnamed parameter."""
    if name not in METHODS:
        raise unknown_name("--methods", name, METHODS)
    plain = name.removesuffix("_released")
    return {"name": plain, **(CHOSEN if name == plain else RELEASED).get(plain, {})}


def methods(options: Options, usual: Sequence[str]) -> Sequence[str]:
    """Methods of the options, checked, or the default ones."""
    chosen = usual if options.methods is None else options.methods
    for name in chosen:
        method(name)
    return chosen


def case(
    panel: tuple[str, ...],
    method_name: str,
    options: Options,
    data: str,
    *,
    partition: Sequence[Any],
    line: str | None = None,
    shape: Sequence[int] | None = None,
    periods: Sequence[int] | None = None,
    rounds: int | None = None,
    target: float | None = None,
    rotation: dict[str, Any] | None = None,
) -> Case:
    """Case of a figure; omitted settings are those of most of the paper's experiments.

    target: the test accuracy at which a run stops.
    """
    task, scale = TASKS.get(data, TASKS["fashion_mnist"]), options.scale
    experiment = Experiment(
        model=task.model,
        data={"source": data, "partition": list(partition), "augment": task.augment, "rotation": rotation},
        tree="x".join(map(str, shape or GROUPS[scale])),
        method=method(method_name),
        schedule=list(periods or PERIODS[scale]),
        client={"lr": task.lr, "batch_size": 50, "clip_norm": 10.0, "weight_decay": 1e-3},
        evaluation={"stop_when": None if target is None else f"accuracy >= {target}"},
        execution={"device": options.device, "precision": options.precision},
        # on a GPU a run takes minutes and a checkpoint gigabytes: written when a run is stopped
        storage={"checkpoint_every": 10 if options.device == "cpu" else 0},
        rounds=options.rounds or rounds or ROUNDS[scale],
    )
    if options.quick:
        small = {"data.source": "digits", "data.augment": "none", "client.lr": 0.1, "client.batch_size": 20}
        experiment = experiment.replace({**small, "execution.engine": "stacked"}, model={"name": "mlp", "hidden": [32]})
    return Case(panel, line or method_name, experiment)
