"""Who never took part in a run, by what its root has recorded: its rounds, and the news of its
tree."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from stratafl.base.topology import Topology
from stratafl.core.participation import sample_participants
from stratafl.deploy.host import newsroom
from stratafl.deploy.sites.rounds import read_lines
from stratafl.deploy.sites.site import stored_experiment, tree_of
from stratafl.experiment.algorithm import participation_of, sync_schedule
from stratafl.experiment.experiment import Experiment

INCOMPLETE = 4
"""The exit code of a run that ended, and in which a site never took part."""


def never(folder: Path) -> list[str]:
    """The leaves that were drawn and counted in no meeting, in the order of the tree. `folder`: the
    root's."""
    experiment = stored_experiment(folder)
    tree = tree_of(experiment)
    below = [name for level in tree.names[1:] for name in level]
    above = {name: _above(name, tree) for name in below}
    there = {name for name, entry in newsroom.read(folder).items() if entry.took_part}
    drawn: set[str] = set()
    for line, asked in zip(read_lines(folder), _drawn(experiment, tree, above), strict=False):
        drawn |= asked
        found = json.loads(line)
        missed = {*found["absent"], *found["refused"]}
        # who is not named counted in every meeting of this round, unless one above it did not
        there |= {name for name in asked - missed if not missed & above[name]}
        if len(there) >= len(below):
            break
    return [name for name in below if name in drawn - there]


def _drawn(experiment: Experiment, tree: Topology, above: dict[str, set[str]]) -> Iterator[set[str]]:
    """Per round, the sites that are to be in at least one meeting of it."""
    schedule = sync_schedule(experiment.schedule, tree)
    participation = participation_of(experiment, tree.depth)
    length = schedule.steps[0]
    for round in range(experiment.rounds):
        asked = set(tree.names[0])
        for level, every in enumerate(schedule.steps, 1):
            for meeting in range(round * length // every, (round + 1) * length // every):
                taking_N = sample_participants(participation[level - 1], tree, level, meeting, experiment.seed)
                names = [name for name, is_in in zip(tree.names[level], taking_N, strict=True) if is_in]
                asked.update(name for name in names if above[name] <= asked)
        yield asked - set(tree.names[0])


def _above(name: str, tree: Topology) -> set[str]:
    """The ancestors of a site."""
    level, number = tree.find(name)
    found = set()
    while level:
        number, level = int(tree.parents[level][number]), level - 1
        found.add(tree.names[level][number])
    return found
