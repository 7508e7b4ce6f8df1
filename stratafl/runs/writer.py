"""A run directory, written: one process at a time, and every file whole."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor

from stratafl.base import files
from stratafl.base.environment import environment
from stratafl.base.state_dict import StateDict
from stratafl.base.topology import Tree
from stratafl.config.data import LabelCounts
from stratafl.metrics.metrics import DEFAULT_DIRECTIONS, Directions
from stratafl.metrics.records import RoundResult, diverged, diverged_after
from stratafl.network.messages import RecordedWorkload
from stratafl.runs import format
from stratafl.runs.checkpoint import Checkpoints, Progress
from stratafl.runs.format import RunLock
from stratafl.runs.provenance import Provenance
from stratafl.runs.round_log import RoundLog
from stratafl.simulation.result import Result
from stratafl.simulation.simulation import Simulation


@dataclass(frozen=True, eq=False)
class RunDescription:
    """What a run folder says of its run, besides what came of it."""

    config: Mapping[str, Any]
    """The config as plain tables."""
    tree: Tree
    counts: LabelCounts
    engine: str
    how: str
    precision: str
    notes: Sequence[str] = ()
    """What the user should know about how it is done."""
    objects: Mapping[str, str] = field(default_factory=dict)
    """What the model, data and so on of a run from Python are; see docs/runs.md."""
    job: str = ""
    """The job of a deployed run, whose root keeps its state elsewhere; empty for a simulation."""
    better: Directions = field(default_factory=lambda: dict(DEFAULT_DIRECTIONS))
    """Which way each metric is better."""
    clock: Mapping[str, Any] = field(default_factory=dict)
    """The network of a run in virtual time."""
    workload: RecordedWorkload | None = None
    """What decides its time and traffic on any network; None where that is not known."""

    @staticmethod
    def of(
        config: Mapping[str, Any], simulation: Simulation, counts: LabelCounts, objects: Mapping[str, str] | None = None
    ) -> RunDescription:
        """The facts of a simulation."""
        engine, tree = simulation.engine, simulation.federation.tree.whole
        told = simulation.notes, objects or {}
        better, clock = simulation.objective.better, {} if simulation.clock is None else simulation.clock.facts
        return RunDescription(
            config,
            tree,
            counts,
            engine.name,
            engine.description,
            engine.precision,
            *told,
            better=better,
            clock=clock,
            workload=simulation.workload,
        )

    @property
    def rounds(self) -> int:
        return int(self.config["run"]["rounds"])

    def described(self, path: Path, name: str, id: str, origins: Provenance) -> dict[str, Any]:
        """run.json as a run begins in a folder."""
        return {
            "format": format.FORMAT,
            "name": name,
            "id": id,
            "created": format.now(),
            "folder": os.path.abspath(path),
            "config": self.config,
            "engine": self.engine,
            "how": self.how,
            "precision": self.precision,
            "data": self.counts.fingerprint,
            "better": dict(self.better),
            "inputs": origins.noted(),
            "environment": environment(),
            "notes": list(self.notes),
            **({"objects": self.objects} if self.objects else {}),
            **({"job": self.job} if self.job else {}),
            **({"clock": dict(self.clock)} if self.clock else {}),
            **self.measured,
        }

    @property
    def measured(self) -> dict[str, Any]:
        """The workload's part of run.json."""
        return {} if self.workload is None else {"workload": self.workload.as_plain()}

    def write_tree(self, folder: Path) -> None:
        files.write_json(folder / format.TREE, describe_tree(self.tree, self.counts), indent=None)


class RunWriter:
    """Open for writing, and locked until it is closed."""

    def __init__(
        self,
        path: Path,
        lock: RunLock | None,
        checkpoints: Checkpoints,
        rounds: int,
        origins: Provenance,
        history: Sequence[RoundResult] = (),
    ):
        """lock: None where whoever opens it keeps others away by a lock of its own."""
        self.path, self.checkpoints, self.rounds, self.origins = path, checkpoints, rounds, origins
        self._lock = lock
        self._records = RoundLog(path, history)
        self._diverged = diverged(vars(record) for record in history)

    @staticmethod
    def create(path: Path, name: str, id: str, facts: RunDescription, history: Sequence[RoundResult] = ()) -> RunWriter:
        """A new one; it gets its name when everything in it is complete, so nobody ever finds half
        of one.

        history: of a run that is not kept from its beginning.
        """
        files.make_folder(path.absolute().parent)
        with files.atomic_folder(path) as partial:
            lock = RunLock(partial)
            (partial / format.CHECKPOINTS).mkdir()
            origins = Provenance.of(facts.config)
            files.write_json(partial / format.RUN, facts.described(path, name, id, origins))
            facts.write_tree(partial)
            _write_status(partial, format.RUNNING, Progress(len(history)), facts.rounds)
        return RunWriter(path, lock, Checkpoints(path, id), facts.rounds, origins, history)

    @staticmethod
    def adopt(path: Path, name: str, facts: RunDescription, history: Sequence[RoundResult]) -> RunWriter:
        """A folder that is there for another purpose, such as a deployed root's, as that of the run
        that goes on in it; whoever calls is the only one to write there, and knows the history."""
        origins, done = Provenance.of(facts.config), Progress(len(history))
        begins = not os.path.lexists(path / format.RUN)
        described = facts.described(path, name, facts.job, origins) if begins else format.read_description(path)
        opened = RunWriter(path, None, Checkpoints(path, facts.job), facts.rounds, origins, history)
        facts.write_tree(path)
        opened.end(format.RUNNING, done)
        # last, since it is what makes a run folder of a folder
        files.write_json(path / format.RUN, described if begins else _continued(described, done))
        return opened

    @staticmethod
    def reopen(
        path: Path,
        lock: RunLock,
        checkpoints: Checkpoints,
        facts: RunDescription,
        origins: Provenance,
        described: dict[str, Any],
        history: Sequence[RoundResult],
        place: Progress,
        changed: Sequence[str] = (),
        extended: Sequence[str] = (),
    ) -> RunWriter:
        """One that is there, set back to this history and place; whoever calls holds its lock.

        changed, extended: what is no longer as the run began, and of how far it goes; both are
            noted.
        """
        files.remove_partials(path)
        files.remove_partials(checkpoints.folder)
        if changed:
            facts.write_tree(path)
        now = {"config": facts.config, "folder": os.path.abspath(path), "inputs": origins.noted()}
        now |= {"data": facts.counts.fingerprint, **facts.measured}
        files.write_json(path / format.RUN, {**_continued(described, place, changed, extended), **now})
        opened = RunWriter(path, lock, checkpoints, facts.rounds, origins, history)
        for name in (format.SUMMARY, format.MODEL):
            files.remove_tree(path / name)
        opened.end(format.RUNNING, place)
        return opened

    def add(self, record: RoundResult, *, sync: bool = False) -> None:
        """One round more; with `sync` it is on the disk when this returns."""
        self._records.add(record)
        if sync:
            self._records.mark()
        self._diverged = diverged_after(self._diverged, vars(record))
        _write_status(
            self.path, format.RUNNING, Progress(record.round), self.rounds, diverged=self._diverged, sync=False
        )

    def checkpoint(self, place: Progress, state: StateDict) -> None:
        """Keep where the run stands, unless that is kept already."""
        if place not in self.checkpoints.kept:
            self.checkpoints.write(place, state, self._records.mark(), self.origins)

    def keep_only(self, *places: Progress) -> None:
        """Remove all checkpoints but these."""
        self.checkpoints.keep_only(*places)

    def finish(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any]) -> None:
        """The run is done: the root's model and the run in numbers are written."""
        with files.atomic_write(self.path / format.MODEL) as file:
            # copies, since tied weights share memory and the format has no word for that
            plain = {
                name: value.detach().cpu().clone(memory_format=torch.contiguous_format)
                for name, value in tensors.items()
            }
            file.write(save(plain))
        files.write_json(self.path / format.SUMMARY, numbers)
        self.end(format.DONE, Progress(numbers["rounds"]))

    def end(self, status: str, place: Progress, reason: str = "") -> None:
        """Note how the run stands from now on, and why where that is not to be expected."""
        _write_status(self.path, status, place, self.rounds, reason, self._diverged)

    def close(self) -> None:
        self._records.close()
        if self._lock is not None:
            self._lock.release()


def _continued(
    described: Mapping[str, Any], place: Progress, changed: Sequence[str] = (), extended: Sequence[str] = ()
) -> dict[str, Any]:
    """run.json of a run that goes on from there."""
    # of rounds that are dropped, where they were computed is of no interest either
    before = [
        each for each in format.continuations(described) if Progress(each["after"], each.get("meetings", 0)) < place
    ]
    here: dict[str, Any] = {"after": place.round, "time": format.now(), "environment": environment()}
    here |= {"meetings": place.meetings} if place.meetings else {}
    here |= {"changed": list(changed)} if changed else {}
    here |= {"extended": list(extended)} if extended else {}
    return {**described, "continued": [*before, here]}


def _write_status(
    folder: Path,
    status: str,
    place: Progress,
    rounds: int,
    reason: str = "",
    diverged: int | None = None,
    *,
    sync: bool = True,
) -> None:
    found = {
        "status": status,
        "reason": reason,
        "round": place.round,
        "meetings": place.meetings,
        "rounds": rounds,
        "diverged": diverged,
        "pid": os.getpid(),
        "updated": format.now(),
    }
    files.write_json(folder / format.STATUS, found, sync=sync)


def describe_tree(tree: Tree, counts: LabelCounts) -> dict[str, Any]:
    """The tree as plain data: per level each node's name, parent, weight among its siblings, and
    samples by class."""
    levels: list[dict[str, Any]] = []
    labels = counts.labels
    for level in range(tree.depth, -1, -1):
        levels.insert(
            0,
            {
                "names": list(tree.names[level]),
                "parents": tree.parents[level].tolist(),
                "weights": tree.weights[level].tolist(),
                "samples": labels.sum(axis=1).tolist(),
                "labels": labels.tolist(),
            },
        )
        if level > 0:
            above = np.zeros((tree.sizes[level - 1], labels.shape[1]), dtype=labels.dtype)
            np.add.at(above, tree.parents[level], labels)
            labels = above
    return {"shape": str(tree), "classes": list(counts.classes), "levels": levels}


def summary(
    history: Sequence[RoundResult], bytes_per_client: float, totals: Mapping[int, Mapping[str, int]]
) -> dict[str, Any]:
    """The run in numbers. totals: what was sent between a level and its parents, as far as that is
    known."""
    records = [vars(record) for record in history]
    last = next((record.metrics for record in reversed(history) if record.metrics), dict[str, float]())
    return {
        "rounds": len(history),
        "final": last,
        "diverged": diverged(records),
        "seconds": sum(record.seconds for record in history),
        **format.exclusion_counts(records),
        "bytes_per_client": bytes_per_client,
        "communication": [{"level": level, **total} for level, total in totals.items()],
    }


def summary_of(result: Result) -> dict[str, Any]:
    """A simulation in numbers."""
    communication = result.communication
    levels = range(1, result.tree.depth + 1)
    totals = {level: dataclasses.asdict(communication.level(level)) for level in levels}
    return summary(result.history, communication.bytes_per_client, totals)
