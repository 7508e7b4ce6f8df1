"""Writer of a run folder: one process at a time, and every file is complete."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save
from torch import Tensor

from stratafl.base import files
from stratafl.base.environment import environment
from stratafl.base.state_dict import StateDict
from stratafl.base.topology import Topology, subtree_counts
from stratafl.experiment.loading import LabelCounts
from stratafl.metrics.metrics import DEFAULT_DIRECTIONS, Directions
from stratafl.metrics.records import RoundResult, diverged, diverged_after
from stratafl.network.messages import RecordedWorkload
from stratafl.runs import format
from stratafl.runs.checkpoint import Checkpoints, Progress, RoundLog
from stratafl.runs.format import RunLock
from stratafl.runs.provenance import Provenance
from stratafl.simulation.result import Result
from stratafl.simulation.simulation import Simulation


@dataclass(frozen=True, eq=False)
class RunDescription:
    """Contents of `run.json` and `tree.json`."""

    config: Mapping[str, Any]
    """Config as plain tables."""
    tree: Topology
    counts: LabelCounts
    engine: str
    how: str
    """Engine, and the reason if another one was requested."""
    precision: str
    notes: Sequence[str] = ()
    """Remarks for the user about the execution."""
    objects: Mapping[str, str] = field(default_factory=dict)
    """Descriptions of the objects of a run from Python; see docs/runs.md."""
    job: str = ""
    """Job of a deployed run, whose root stores its own state; empty for a simulation."""
    better: Directions = field(default_factory=lambda: dict(DEFAULT_DIRECTIONS))
    """Direction in which each metric is better."""
    clock: Mapping[str, Any] = field(default_factory=dict)
    """Facts of the virtual clock: the network that the run is simulated on, under `network`."""
    workload: RecordedWorkload | None = None
    """Quantities that decide time and traffic on any network; None if unknown."""

    @staticmethod
    def of(
        config: Mapping[str, Any], simulation: Simulation, counts: LabelCounts, objects: Mapping[str, str] | None = None
    ) -> RunDescription:
        """Describe a simulation."""
        return RunDescription(
            config=config,
            tree=simulation.federation.tree.whole,
            counts=counts,
            engine=simulation.engine.name,
            how=simulation.engine.how,
            precision=simulation.engine.precision,
            notes=simulation.notes,
            objects=objects or {},
            better=simulation.objective.better,
            clock={} if simulation.clock is None else simulation.clock.facts,
            workload=simulation.workload,
        )

    @property
    def rounds(self) -> int:
        return int(self.config["rounds"])

    def described(self, path: Path, name: str, id: str, provenance: Provenance) -> dict[str, Any]:
        """Contents of run.json for a new run."""
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
            "inputs": provenance.digest(),
            "environment": environment(),
            "notes": list(self.notes),
            **({"objects": self.objects} if self.objects else {}),
            **({"job": self.job} if self.job else {}),
            **({"clock": dict(self.clock)} if self.clock else {}),
            **self.workload_entry,
        }

    @property
    def workload_entry(self) -> dict[str, Any]:
        """Entry of the workload in run.json."""
        return {} if self.workload is None else {"workload": self.workload.to_plain()}

    def write_tree(self, folder: Path) -> None:
        files.write_json(folder / format.TREE, describe_tree(self.tree, self.counts), indent=None)


class Continuation(NamedTuple):
    """Progress at which a run continues, and differences from the begun run."""

    progress: Progress
    changed: Sequence[str] = ()
    """Differences in its inputs."""
    extended: Sequence[str] = ()
    """Differences in its length."""

    def added_to(self, described: Mapping[str, Any]) -> dict[str, Any]:
        """Contents of run.json with this continuation, without those from dropped rounds."""
        entries = described.get("continued", ())
        before = [entry for entry in entries if Progress(entry["after"], entry.get("meetings", 0)) < self.progress]
        added: dict[str, Any] = {"after": self.progress.round, "time": format.now(), "environment": environment()}
        added |= {"meetings": self.progress.meetings} if self.progress.meetings else {}
        added |= {"changed": list(self.changed)} if self.changed else {}
        added |= {"extended": list(self.extended)} if self.extended else {}
        return {**described, "continued": [*before, added]}


class LockedRun(NamedTuple):
    """Existing run folder whose lock this process holds."""

    path: Path
    lock: RunLock
    checkpoints: Checkpoints
    described: dict[str, Any]
    """Contents of run.json."""


class RunWriter:
    """Run folder that is open for writing, and locked until it is closed."""

    def __init__(
        self,
        path: Path,
        lock: RunLock | None,
        checkpoints: Checkpoints,
        rounds: int,
        provenance: Provenance,
        history: Sequence[RoundResult] = (),
    ):
        """lock: None if the caller has a lock of its own."""
        self.path, self.checkpoints, self.rounds, self.provenance = path, checkpoints, rounds, provenance
        self._lock = lock
        self._records = RoundLog(path, history)
        self._diverged = diverged(vars(record) for record in history)

    @staticmethod
    def create(
        path: Path, name: str, id: str, description: RunDescription, history: Sequence[RoundResult] = ()
    ) -> RunWriter:
        """Create a run folder; it gets its name when all files are complete.

        history: earlier rounds of a run that is not recorded from its beginning.
        """
        files.make_folder(path.absolute().parent)
        with files.atomic_folder(path) as partial:
            lock = RunLock(partial)  # its open handle stays valid when the folder gets its name
            (partial / format.CHECKPOINTS).mkdir()
            provenance = Provenance.of(description.config)
            files.write_json(partial / format.RUN, description.described(path, name, id, provenance))
            description.write_tree(partial)
            _write_status(partial, format.RUNNING, Progress(len(history)), description.rounds)
        return RunWriter(path, lock, Checkpoints(path, id), description.rounds, provenance, history)

    @staticmethod
    def attach(path: Path, name: str, description: RunDescription, history: Sequence[RoundResult]) -> RunWriter:
        """Use an existing folder, such as a deployed root's, as the run folder.

        The caller is the only writer, and has the history.
        """
        provenance, progress = Provenance.of(description.config), Progress(len(history))
        is_new = not os.path.lexists(path / format.RUN)
        described = (
            description.described(path, name, description.job, provenance) if is_new else format.read_description(path)
        )
        writer = RunWriter(path, None, Checkpoints(path, description.job), description.rounds, provenance, history)
        description.write_tree(path)
        writer.set_status(format.RUNNING, progress)
        # last, since this file makes it a run folder
        files.write_json(path / format.RUN, described if is_new else Continuation(progress).added_to(described))
        return writer

    @staticmethod
    def reset_to(
        run: LockedRun,
        description: RunDescription,
        provenance: Provenance,
        history: Sequence[RoundResult],
        continuation: Continuation,
    ) -> RunWriter:
        """Open an existing run folder and reset it to this history, and to the progress at which
        the run continues."""
        path, lock, checkpoints, described = run
        files.remove_partials(path)
        files.remove_partials(checkpoints.folder)
        if continuation.changed:
            description.write_tree(path)
        current = {"config": description.config, "folder": os.path.abspath(path), "inputs": provenance.digest()}
        current |= {"data": description.counts.fingerprint, **description.workload_entry}
        files.write_json(path / format.RUN, {**continuation.added_to(described), **current})
        writer = RunWriter(path, lock, checkpoints, description.rounds, provenance, history)
        for name in (format.SUMMARY, format.MODEL):
            files.remove_tree(path / name)
        writer.set_status(format.RUNNING, continuation.progress)
        return writer

    def append_round(self, record: RoundResult, *, sync: bool = False) -> None:
        """Append the record of a round; with `sync` it is on the disk on return."""
        self._records.add(record)
        if sync:
            self._records.sync()
        self._diverged = diverged_after(self._diverged, vars(record))
        _write_status(
            self.path, format.RUNNING, Progress(record.round), self.rounds, diverged=self._diverged, sync=False
        )

    def checkpoint(self, progress: Progress, state: StateDict) -> None:
        """Write a checkpoint, unless there is one of this progress."""
        if progress not in self.checkpoints.available:
            self.checkpoints.write(progress, state, self._records.sync(), self.provenance)

    def keep_only(self, *kept: Progress) -> None:
        """Remove all other checkpoints."""
        self.checkpoints.keep_only(*kept)

    def finish(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any]) -> None:
        """Write the root's model and the summary of a finished run."""
        with files.atomic_write(self.path / format.MODEL) as file:
            # copies, since the format does not support tied weights
            copies = {
                name: value.detach().cpu().clone(memory_format=torch.contiguous_format)
                for name, value in tensors.items()
            }
            file.write(save(copies))
        files.write_json(self.path / format.SUMMARY, numbers)
        self.set_status(format.DONE, Progress(numbers["rounds"]))

    def set_status(self, status: str, progress: Progress, reason: str = "") -> None:
        """Write the status of the run, with a reason if it is unexpected."""
        _write_status(self.path, status, progress, self.rounds, reason, self._diverged)

    def close(self) -> None:
        self._records.close()
        if self._lock is not None:
            self._lock.release()


def _write_status(
    folder: Path,
    status: str,
    progress: Progress,
    rounds: int,
    reason: str = "",
    diverged: int | None = None,
    *,
    sync: bool = True,
) -> None:
    contents = {
        "status": status,
        "reason": reason,
        "round": progress.round,
        "meetings": progress.meetings,
        "rounds": rounds,
        "diverged": diverged,
        "pid": os.getpid(),
        "updated": format.now(),
    }
    files.write_json(folder / format.STATUS, contents, sync=sync)


def describe_tree(tree: Topology, counts: LabelCounts) -> dict[str, Any]:
    """Describe a tree as plain data: per level each node's name, parent, weight among its siblings,
    and samples by class."""
    levels = [
        {
            "names": list(names),
            "parents": parents.tolist(),
            "weights": weights.tolist(),
            "samples": labels.sum(axis=1).tolist(),
            "labels": labels.tolist(),
        }
        for names, parents, weights, labels in zip(
            tree.names, tree.parents, tree.weights, subtree_counts(tree.parents, counts.labels), strict=True
        )
    ]
    return {"shape": str(tree), "classes": list(counts.classes), "levels": levels}


def summary(
    history: Sequence[RoundResult], bytes_per_client: float, totals: Mapping[int, Mapping[str, int]]
) -> dict[str, Any]:
    """Summary of a run.

    totals: traffic between each level and its parents, as far as it is known.
    """
    records = [vars(record) for record in history]
    final = next((record.metrics for record in reversed(history) if record.metrics), dict[str, float]())
    return {
        "rounds": len(history),
        "final": final,
        "diverged": diverged(records),
        "seconds": sum(record.seconds for record in history),
        **format.exclusion_counts(records),
        "bytes_per_client": bytes_per_client,
        "communication": [{"level": level, **total} for level, total in totals.items()],
    }


def summary_of(result: Result) -> dict[str, Any]:
    """Summary of a simulation."""
    communication = result.communication
    levels = range(1, result.tree.depth + 1)
    totals = {level: dataclasses.asdict(communication.level(level)) for level in levels}
    return summary(result.history, communication.bytes_per_client, totals)
