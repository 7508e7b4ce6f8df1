"""Series of experiments of a paper: the cases of one table or figure, each an experiment."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

from stratafl import Experiment
from stratafl.base.errors import InvalidInput, unknown_name
from stratafl.base.validation import check_integer
from stratafl.engine.precision import PRECISIONS
from stratafl.experiment.algorithm import sync_schedule, topology_of
from stratafl.runs import format, provenance

Scale = Literal["quick", "paper"]
Panel = tuple[str, ...]
"""Panel of a figure or row of a table: its data set, distribution or setting."""
Form = Literal["rounds", "curves", "communication", "time"]
SCALES: tuple[Scale, ...] = ("quick", "paper")
PARTITIONS = ("release_dirichlet", "dirichlet")


@dataclass(frozen=True)
class Options:
    """Options of a reproduction."""

    scale: Scale = "paper"
    partition: str = "release_dirichlet"
    methods: tuple[str, ...] | None = None
    """Methods, instead of those of the series."""
    rounds: int | None = None
    """Number of rounds, instead of that of the series."""
    device: str = "cpu"
    precision: str = "fp32"

    def __post_init__(self) -> None:
        if self.scale not in SCALES:
            raise unknown_name("--scale", self.scale, SCALES)
        if self.partition not in PARTITIONS:
            raise unknown_name("--partition", self.partition, PARTITIONS)
        if self.precision not in PRECISIONS:
            raise unknown_name("--precision", self.precision, PRECISIONS)
        if self.rounds is not None:
            check_integer("--rounds", self.rounds, at_least=1)

    @property
    def quick(self) -> bool:
        return self.scale == "quick"

    @property
    def whole(self) -> bool:
        """Whether a series has its own methods and number of rounds."""
        return self.methods is None and self.rounds is None


@dataclass(frozen=True)
class Case:
    """Line of a panel; its runs differ in their seed only."""

    panel: Panel
    line: str
    experiment: Experiment

    @property
    def name(self) -> str:
        return "/".join((*self.panel, self.line))

    @property
    def steps_per_round(self) -> int:
        """Client-steps of one global round."""
        tree = topology_of(self.experiment)
        return tree.leaves * prod(sync_schedule(self.experiment.schedule, tree).periods)

    @property
    def steps(self) -> int:
        """Client-steps of one run that does all its rounds."""
        return self.steps_per_round * self.experiment.rounds

    def seeded(self, offset: int) -> Experiment:
        """Experiment with the seed increased by an offset."""
        return self.experiment.replace(seed=self.experiment.seed + offset)


@dataclass(frozen=True, eq=False)
class Series:
    """Series of experiments behind a table or a figure of a paper."""

    name: str
    title: str
    where: str
    """Place in the paper."""
    form: Form
    make: Callable[[Options], Sequence[Case]]
    note: str = ""
    """Settings that the paper leaves open, and the choices made here."""
    target: Mapping[Scale, float] | None = None
    """Test accuracy to which rounds and time are reported, by scale."""

    def cases(self, options: Options, only: Sequence[str] = ()) -> list[Case]:
        """Cases of the series; with `only` those whose name contains one of these texts."""
        cases = list(self.make(options))
        if options.methods is not None and not cases:
            raise InvalidInput("--methods", list(options.methods), f"{self.name} has none of them")
        return [case for case in cases if not only or any(text in case.name for text in only)]

    @property
    def figure(self) -> str:
        """Number of the table or figure, without the section."""
        return self.where.split(" (")[0]

    def fitting(self, options: Options) -> Options:
        """Options with the default partition if the series has a partition of its own."""
        levels = [level for case in self.make(options) for level in case.experiment.data.partition]
        used = options.partition in {level["name"] for level in levels}
        return options if used else replace(options, partition=PARTITIONS[0])

    def titled(self, scale: Scale) -> str:
        """Title of the series; at quick scale without the paper's data and targets."""
        return self.title if scale == "paper" else f"{self.figure}, scaled down to embedded digits"

    def goal(self, scale: Scale) -> float | None:
        return None if self.target is None else self.target[scale]


def runs_of(cases: Sequence[Case], seeds: int) -> Iterator[tuple[Case, int]]:
    """Cases with seed offsets, all cases of one seed before the next.

    So the finished runs form a complete comparison when time runs out.
    """
    for seed in range(seeds):
        for case in cases:
            yield case, seed


def identity(experiment: Experiment) -> str:
    """Text that is equal for runs with equal histories, without device and length."""
    return json.dumps(provenance.essence(experiment, extent=False), sort_keys=True)


def run_name(experiment: Experiment) -> str:
    """Name of a case's run, which is the same in all series that share the run."""
    parts = (experiment.data.source, topology_of(experiment), experiment.method.name,
             *experiment.schedule.periods, f"s{experiment.seed}")  # fmt: skip
    digest = hashlib.sha256(identity(experiment).encode()).hexdigest()[:8]
    return format.slug("-".join(map(str, parts)))[: format.MAX_NAME_LENGTH - 9] + f"-{digest}"
