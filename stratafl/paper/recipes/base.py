"""What a recipe is: named cases of a table or a figure, each a config, and the claim that they are
to show."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Literal

from stratafl.base.errors import InvalidInput, unknown_name
from stratafl.base.topology import Tree
from stratafl.base.validation import check_integer
from stratafl.config.schema import Config
from stratafl.core.schedule import Schedule
from stratafl.engine.precision import PRECISIONS
from stratafl.runs import format, provenance

Scale = Literal["quick", "paper"]
Form = Literal["rounds", "curves", "communication", "time"]
SCALES: tuple[Scale, ...] = ("quick", "paper")
PARTITIONS = ("release_dirichlet", "dirichlet")


@dataclass(frozen=True)
class Options:
    """How a recipe is to be made."""

    scale: Scale = "paper"
    partition: str = "release_dirichlet"
    methods: tuple[str, ...] | None = None
    """Instead of the recipe's own."""
    rounds: int | None = None
    """Instead of the recipe's limit."""
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
        """Whether a recipe is made with its own methods, as far as it goes."""
        return self.methods is None and self.rounds is None


@dataclass(frozen=True)
class Case:
    """One line of a panel: all its runs differ in their seed only."""

    panel: tuple[str, ...]
    line: str
    config: Config

    @property
    def name(self) -> str:
        return "/".join((*self.panel, self.line))

    @property
    def steps_per_round(self) -> int:
        """Client-steps of one global round."""
        tree, given = Tree.of(self.config.tree.shape), self.config.schedule
        depth = tree.depth
        if given.periods is not None:
            periods = Schedule.of(given.periods, depth).periods
        else:
            periods = Schedule.of_steps(given.steps_per_sync, depth).periods
        return tree.sizes[-1] * prod(periods)

    @property
    def steps(self) -> int:
        """Client-steps of one run that does all its rounds."""
        return self.steps_per_round * self.config.run.rounds

    def seeded(self, offset: int) -> Config:
        """The config with the seed that many further on."""
        return replace(self.config, run=replace(self.config.run, seed=self.config.run.seed + offset))


@dataclass(frozen=True, eq=False)
class Recipe:
    """A table or a figure of the paper."""

    name: str
    title: str
    where: str
    """Where it is in the paper."""
    form: Form
    make: Callable[[Options], Sequence[Case]]
    note: str = ""
    """What the paper leaves open here, and what was chosen."""
    target: Mapping[Scale, float] | None = None
    """A test accuracy: what the rounds, or the time, to it are reported for."""

    def cases(self, options: Options, only: Sequence[str] = ()) -> list[Case]:
        """The recipe's cases, or those whose name has one of these texts in it."""
        made = list(self.make(options))
        if options.methods is not None and not made:
            raise InvalidInput("--methods", list(options.methods), f"{self.name} has none of them")
        return [case for case in made if not only or any(text in case.name for text in only)]

    @property
    def figure(self) -> str:
        """The recipe's number in the paper, without the section."""
        return self.where.split(" (")[0]

    def fitting(self, options: Options) -> Options:
        """The options, with the usual partition where the recipe has its own and no use for the one
        asked for."""
        levels = [level for case in self.make(options) for level in case.config.data.partition]
        used = options.partition in {level["name"] for level in levels}
        return options if used else replace(options, partition=PARTITIONS[0])

    def titled(self, scale: Scale) -> str:
        """The recipe's title; that of a small one promises neither the paper's data nor its
        targets."""
        return self.title if scale == "paper" else f"{self.figure}, scaled down to embedded digits"

    def goal(self, scale: Scale) -> float | None:
        return None if self.target is None else self.target[scale]


def runs_of(cases: Sequence[Case], seeds: int) -> Iterator[tuple[Case, int]]:
    """One seed of everything comes before the next: what there is when time runs out is a whole
    comparison."""
    for seed in range(seeds):
        for case in cases:
            yield case, seed


def essence(config: Config | Mapping[str, Any]) -> str:
    """What a run computes, whatever computes it and however far it goes: equal texts mean equal
    histories."""
    return json.dumps(provenance.essence(config, extent=False), sort_keys=True)


def run_name(config: Config) -> str:
    """The name of a case's run, the same for all recipes that want this run, so that they share
    it."""
    periods = config.schedule.periods or config.schedule.steps_per_sync
    parts = (config.data.name, Tree.of(config.tree.shape), config.method.get("name", "rules"),
             *periods, f"s{config.run.seed}")  # fmt: skip
    digest = hashlib.sha256(essence(config).encode()).hexdigest()[:8]
    return format.slug("-".join(map(str, parts)))[: format.MAX_NAME_LENGTH - 9] + f"-{digest}"
