"""A run directory, written: one process at a time, and every file whole."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import save

from stratafl.config import Config
from stratafl.divergence import diverged, diverged_after
from stratafl.errors import InvalidInput
from stratafl.experiment import Holdings, Study
from stratafl.simulate import Result, RoundResult
from stratafl.state import State
from stratafl.store import files, layout
from stratafl.store.checkpoint import Checkpoints
from stratafl.store.environment import environment
from stratafl.store.inputs import Inputs
from stratafl.store.lock import Lock
from stratafl.store.records import Records
from stratafl.tree import Tree


class RunFolder:
    """Open for writing, and locked until it is closed."""

    def __init__(
        self,
        path: Path,
        lock: Lock,
        checkpoints: Checkpoints,
        rounds: int,
        inputs: Inputs,
        history: Sequence[RoundResult] = (),
    ):
        self.path, self.checkpoints, self.rounds, self.inputs = path, checkpoints, rounds, inputs
        self._lock = lock
        self._records = Records(path, history)
        self._diverged = diverged(vars(record) for record in history)

    @staticmethod
    def create(parent: Path, name: str, config: Config, study: Study) -> RunFolder:
        """A new one; it gets its name when everything in it is complete, so nobody ever finds half of one."""
        id = layout.new_id()
        path = parent / f"{layout.check_name(name)}-{id}"
        partial = parent / f".{path.name}{files.PARTIAL}"
        files.make_folder(parent)
        try:
            partial.mkdir()
        except OSError as problem:
            raise files.unwritable(path, problem) from None
        try:
            lock = Lock(partial)
            for folder in layout.FOLDERS:
                (partial / folder).mkdir()
            inputs = Inputs.of(config.as_dict())
            described = {
                "format": layout.FORMAT,
                "name": name,
                "id": id,
                "created": layout.now(),
                "config": config.as_dict(),
                "engine": study.simulation.engine.name,
                "how": study.simulation.engine.how,
                "precision": study.simulation.engine.precision,
                "data": study.holdings.fingerprint,
                "inputs": inputs.noted(),
                "environment": environment(),
            }
            files.write_json(partial / layout.RUN, described)
            _write_tree(partial, study)
            _write_status(partial, layout.RUNNING, 0, config.run.rounds)
            partial.rename(path)
            files.sync_folder(parent)
        except (OSError, InvalidInput) as problem:
            files.remove(partial)
            raise problem if isinstance(problem, InvalidInput) else files.unwritable(path, problem) from None
        return RunFolder(path, lock, Checkpoints(path, id), config.run.rounds, inputs)

    @staticmethod
    def reopen(
        path: Path,
        lock: Lock,
        checkpoints: Checkpoints,
        study: Study,
        inputs: Inputs,
        described: dict[str, Any],
        changed: Sequence[str] = (),
    ) -> RunFolder:
        """One that is there, set back to where the study stands; whoever calls holds its lock.

        changed: what is no longer as the run began, and is noted.
        """
        files.remove_partials(path)
        files.remove_partials(checkpoints.folder)
        history, rounds = study.simulation.history, study.simulation.rounds
        done = len(history)
        # of rounds that are dropped, where they were computed is of no interest either
        before = [each for each in layout.continuations(described) if each["after"] < done]
        here = {"after": done, "time": layout.now(), "environment": environment()}
        if changed:
            here["changed"] = list(changed)
            _write_tree(path, study)
        now = {"data": study.holdings.fingerprint, "inputs": inputs.noted(), "continued": [*before, here]}
        files.write_json(path / layout.RUN, {**described, **now})
        opened = RunFolder(path, lock, checkpoints, rounds, inputs, history)
        for name in (layout.SUMMARY, layout.MODEL):
            files.remove(path / name)
        opened.end(layout.RUNNING, done)
        return opened

    def add(self, record: RoundResult) -> None:
        """One round more."""
        self._records.add(record)
        self._diverged = diverged_after(self._diverged, vars(record))
        _write_status(self.path, layout.RUNNING, record.round, self.rounds, diverged=self._diverged, sync=False)

    def checkpoint(self, round: int, state: State) -> None:
        """Keep where the run stands, unless that is kept already."""
        if round not in self.checkpoints.kept:
            self.checkpoints.write(round, state, self._records.mark(), self.inputs)

    def keep_only(self, *rounds: int) -> None:
        """Of the checkpoints."""
        self.checkpoints.keep_only(*rounds)

    def finish(self, result: Result) -> dict[str, Any]:
        """The summary, which is also written, with the root's model."""
        numbers = summary(result)
        # copies, since tied weights share memory and the format has no word for that
        tensors = {name: value.detach().cpu().clone() for name, value in result.module.state_dict().items()}
        with files.writing(self.path / layout.MODEL) as file:
            file.write(save(tensors))
        files.write_json(self.path / layout.SUMMARY, numbers)
        self.end(layout.DONE, len(result.history))
        return numbers

    def end(self, status: str, round: int, reason: str = "") -> None:
        _write_status(self.path, status, round, self.rounds, reason, self._diverged)

    def close(self) -> None:
        self._records.close()
        self._lock.release()


def _write_status(
    folder: Path,
    status: str,
    round: int,
    rounds: int,
    reason: str = "",
    diverged: int | None = None,
    *,
    sync: bool = True,
) -> None:
    found = {
        "status": status,
        "reason": reason,
        "round": round,
        "rounds": rounds,
        "diverged": diverged,
        "pid": os.getpid(),
        "updated": layout.now(),
    }
    files.write_json(folder / layout.STATUS, found, sync=sync)


def _write_tree(folder: Path, study: Study) -> None:
    tree = describe_tree(study.simulation.federation.tree.whole, study.holdings)
    files.write_json(folder / layout.TREE, tree, indent=None)


def describe_tree(tree: Tree, holdings: Holdings) -> dict[str, Any]:
    """The tree as plain data: per level each node's name, parent, weight among its siblings, and samples by class."""
    levels: list[dict[str, Any]] = []
    labels = holdings.labels
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
    return {"shape": str(tree), "classes": list(holdings.classes), "levels": levels}


def summary(result: Result) -> dict[str, Any]:
    """The run in numbers."""
    communication = result.communication
    last = next((r.metrics for r in reversed(result.history) if r.metrics), {})
    return {
        "rounds": len(result.history),
        "final": last,
        "diverged": result.diverged,
        "seconds": sum(r.seconds for r in result.history),
        "refused": result.refused,
        "too_large": result.too_large,
        "bytes_per_client": communication.bytes_per_client,
        "communication": [
            {"level": level, **dataclasses.asdict(communication.level(level))}
            for level in range(1, result.tree.depth + 1)
        ],
    }
