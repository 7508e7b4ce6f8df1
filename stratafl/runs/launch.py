"""Start or resume the run of a config, recorded in a run folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stratafl.base import files
from stratafl.base.errors import InvalidInput, join_names
from stratafl.distributed.communicator import Communicator
from stratafl.experiment import toml
from stratafl.experiment.experiment import Experiment
from stratafl.experiment.fields import options
from stratafl.experiment.loading import LabelCounts
from stratafl.experiment.sections import Storage
from stratafl.runs import format
from stratafl.runs.provenance import EXTENT, extensions
from stratafl.runs.recorder import MessageCallback, NullRunFolder, RunRecorder, StoragePolicy, ignore
from stratafl.runs.resume import ResumeHints, ResumeSession, is_done, lock_for_resume
from stratafl.runs.writer import RunDescription, RunWriter
from stratafl.simulation.build import build
from stratafl.simulation.simulation import Simulation

DONE = "this run is done; with --set rounds=N it goes on, if it was to keep its state (storage.keep_state)"
HINTS = ResumeHints(
    "--resume",
    "--force goes on all the same",
    "begin another, with storage.keep_state = true if that shall go on later",
)


class Launch(RunRecorder):
    """Recorder of a config's run, ready to start or to continue."""

    def __init__(self, name: str, experiment: Experiment, simulation: Simulation, folder: RunWriter | NullRunFolder):
        storage = experiment.storage
        super().__init__(name, simulation, folder, StoragePolicy(storage.checkpoint_every, storage.keep_state))
        self.experiment = experiment

    @staticmethod
    def new(
        experiment: Experiment, name: str, parent: Path, ranks: Communicator | None = None, id: str | None = None
    ) -> Launch:
        """Begin a run in a new folder, whose id is a new one unless given."""
        ranks = Communicator() if ranks is None else ranks
        with ranks.raise_together():
            format.check_name(name)
            if ranks.is_first:
                files.check_writable("--runs", parent)
            simulation = build(experiment, ranks)
            counts = LabelCounts.of(simulation.data)
        config = experiment.to_table()
        ranks.check_equal("config", config)
        ranks.check_equal("data", counts.fingerprint)
        folder: RunWriter | NullRunFolder = NullRunFolder()
        with ranks.raise_together():
            if ranks.is_first:
                id = format.new_id() if id is None else id
                description = RunDescription.of(config, simulation, counts)
                folder = RunWriter.create(parent / f"{name}-{id}", name, id, description)
        return Launch(name, experiment, simulation, folder)

    @staticmethod
    def resume(
        path: Path,
        say: MessageCallback = ignore,
        ranks: Communicator | None = None,
        force: bool = False,
        experiment: Experiment | None = None,
    ) -> Launch:
        """Resume an interrupted or failed run, or extend a finished one, from its last valid
        checkpoint.

        force: continue also if its config, the user's files or its data have changed, and record
        that. experiment: the current one of the run, which may extend it, or have its files at
        other paths; device, engine and precision remain as they were.
        """
        ranks = Communicator() if ranks is None else ranks

        def check(described: Mapping[str, Any]) -> None:
            if "job" in described:
                reason = "is the root of a deployed run: `stratafl deploy up`, or its start.sh, goes on with it"
                raise InvalidInput("--resume", path, reason)
            if "objects" in described:
                reason = "its model and data are objects of a Python program: run that again, with the same `save`"
                raise InvalidInput("--resume", path, reason)

        with lock_for_resume(path, ranks, check) as (described, lock):
            before = Experiment.from_table(described["config"])
            experiment = before if experiment is None else experiment
            length_changes = extensions(described["config"], experiment.to_table())
            if ranks.broadcast_first(ranks.is_first and not length_changes and is_done(path)):
                raise InvalidInput("--resume", path, DONE)
            experiment = experiment.replace(execution=before.execution)

            def make() -> tuple[Simulation, LabelCounts]:
                simulation = build(experiment.replace({"execution.engine": described["engine"]}), ranks)
                return simulation, LabelCounts.of(simulation.data)

            session = ResumeSession(path, described, lock, ranks, say, force, HINTS)
            restored_run = session.restore(experiment.to_table(), make)
            folder = session.reopen(experiment.to_table(), restored_run)
            return Launch(described["name"], experiment, restored_run.simulation, folder)

    @staticmethod
    def changed(path: Path, changes: Sequence[str]) -> Experiment:
        """Experiment of a stored run with "section.key=value" changes of its length or storage."""
        allowed = [*EXTENT, *(f"storage.{key}" for key in options(Storage))]
        for change in changes:
            if (key := change.partition("=")[0].strip()) not in allowed:
                raise InvalidInput("--set", key, f"a run goes on as it began: with --resume only {join_names(allowed)}")
        described = format.with_moved_paths(format.read_description(path), path)
        return Experiment.from_table(toml.with_changes(described["config"], changes))
