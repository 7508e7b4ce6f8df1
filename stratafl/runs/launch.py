"""Start or resume the run of a config, recorded in a run folder."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stratafl.base import files
from stratafl.base.errors import InvalidInput, join_names
from stratafl.config.data import LabelCounts
from stratafl.config.schema import Config, with_changes
from stratafl.config.setup import study
from stratafl.distributed.communicator import Communicator
from stratafl.runs import format
from stratafl.runs.provenance import EXECUTION, EXTENT, STORAGE, extensions
from stratafl.runs.recorder import MessageCallback, NullRunFolder, RunRecorder, StoragePolicy, ignore
from stratafl.runs.resume import ResumeHints, ResumeSession, is_done, lock_for_resume
from stratafl.runs.writer import RunDescription, RunWriter
from stratafl.simulation.simulation import Simulation

DONE = "this run is done; with --set run.rounds=N it goes on, if it was to keep its state (run.keep_state)"
HINTS = ResumeHints(
    "--resume", "--force goes on all the same", "begin another, with run.keep_state = true if that shall go on later"
)


class Launch(RunRecorder):
    """Recorder of a config's run, ready to start or to continue."""

    def __init__(self, name: str, config: Config, simulation: Simulation, folder: RunWriter | NullRunFolder):
        super().__init__(name, simulation, folder, StoragePolicy(config.run.checkpoint_every, config.run.keep_state))
        self.config = config

    @staticmethod
    def new(config: Config, name: str, parent: Path, ranks: Communicator | None = None) -> Launch:
        """Begin a run in a new folder."""
        ranks = Communicator() if ranks is None else ranks
        with ranks.raise_together():
            format.check_name(name)
            if ranks.is_first:
                files.check_writable("--runs", parent)
            prepared = study(config, ranks)
        ranks.check_equal("config", config.as_dict())
        ranks.check_equal("data", prepared.counts.fingerprint)
        folder: RunWriter | NullRunFolder = NullRunFolder()
        with ranks.raise_together():
            if ranks.is_first:
                id = format.new_id()
                description = RunDescription.of(config.as_dict(), prepared.simulation, prepared.counts)
                folder = RunWriter.create(parent / f"{name}-{id}", name, id, description)
        return Launch(name, config, prepared.simulation, folder)

    @staticmethod
    def resume(
        path: Path,
        say: MessageCallback = ignore,
        ranks: Communicator | None = None,
        force: bool = False,
        config: Config | None = None,
    ) -> Launch:
        """Resume an interrupted or failed run, or extend a finished one, from its last valid
        checkpoint.

        force: continue also if its config, the user's files or its data have changed, and record
        that. config: the current config of the run, which may extend it, or have its files at other
        paths; device, engine and precision remain as they were.
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
            before = Config.of(described["config"])
            config = before if config is None else config
            length_changes = extensions(described["config"], config.as_dict())
            if ranks.broadcast_first(ranks.is_first and not length_changes and is_done(path)):
                raise InvalidInput("--resume", path, DONE)
            as_before = {key: getattr(before.run, key) for key in EXECUTION}
            config = dataclasses.replace(config, run=dataclasses.replace(config.run, **as_before))

            def make() -> tuple[Simulation, LabelCounts]:
                run = dataclasses.replace(config.run, engine=described["engine"])
                prepared = study(dataclasses.replace(config, run=run), ranks)
                return prepared.simulation, prepared.counts

            session = ResumeSession(path, described, lock, ranks, say, force, HINTS)
            restored_run = session.restore(config.as_dict(), make)
            folder = session.reopen(config.as_dict(), restored_run)
            return Launch(described["name"], config, restored_run.simulation, folder)

    @staticmethod
    def changed(path: Path, changes: Sequence[str]) -> Config:
        """Config of a stored run with "section.key=value" changes of its length or storage."""
        allowed = [f"run.{key}" for key in (*EXTENT, *STORAGE)]
        for change in changes:
            if (key := change.partition("=")[0].strip()) not in allowed:
                raise InvalidInput("--set", key, f"a run goes on as it began: with --resume only {join_names(allowed)}")
        described = format.with_moved_paths(format.read_description(path), path)
        return Config.of(with_changes(described["config"], changes))
