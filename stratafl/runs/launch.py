"""A config's run, new or gone on with, recorded in a run directory."""

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
from stratafl.runs.recorder import MessageCallback, NullRunFolder, Recorder, StoragePolicy, ignore
from stratafl.runs.resume import ResumeSession, Ways, is_done, lock_for_resume
from stratafl.runs.writer import RunDescription, RunWriter
from stratafl.simulation.simulation import Simulation

DONE = "this run is done; with --set run.rounds=N it goes on, if it was to keep its state (run.keep_state)"
WAYS = Ways(
    "--resume",
    "--force goes on all the same",
    "begin another, with run.keep_state = true if that shall go on later",
)


class Launch(Recorder):
    """A config's run about to go on."""

    def __init__(self, name: str, config: Config, simulation: Simulation, folder: RunWriter | NullRunFolder):
        super().__init__(name, simulation, folder, StoragePolicy(config.run.checkpoint_every, config.run.keep_state))
        self.config = config

    @staticmethod
    def new(config: Config, name: str, parent: Path, ranks: Communicator | None = None) -> Launch:
        """Begin a run in a new folder."""
        ranks = Communicator() if ranks is None else ranks
        with ranks.together():
            format.check_name(name)
            if ranks.is_first:
                files.check_writable("--runs", parent)
            made = study(config, ranks)
        ranks.same("config", config.as_dict())
        ranks.same("data", made.counts.fingerprint)
        folder: RunWriter | NullRunFolder = NullRunFolder()
        with ranks.together():
            if ranks.is_first:
                id = format.new_id()
                facts = RunDescription.of(config.as_dict(), made.simulation, made.counts)
                folder = RunWriter.create(parent / f"{name}-{id}", name, id, facts)
        return Launch(name, config, made.simulation, folder)

    @staticmethod
    def resume(
        path: Path,
        say: MessageCallback = ignore,
        ranks: Communicator | None = None,
        force: bool = False,
        config: Config | None = None,
    ) -> Launch:
        """From the last good checkpoint of a run that was interrupted or failed, or of one that is
        done and is to go further.

        force: go on also where its config, the user's files or its data are no longer what they
            were, and note that.
        config: the run's own as it is now, which may say that it goes further, or have its files
            elsewhere; it goes on where and how it was computed.
        """
        ranks = Communicator() if ranks is None else ranks

        def check(described: Mapping[str, Any]) -> None:
            if "job" in described:
                told = "is the root of a deployed run: `stratafl deploy up`, or its start.sh, goes on with it"
                raise InvalidInput("--resume", path, told)
            if "objects" in described:
                told = "its model and data are objects of a Python program: run that again, with the same `save`"
                raise InvalidInput("--resume", path, told)

        with lock_for_resume(path, ranks, check) as (described, lock):
            before = Config.of(described["config"])
            config = before if config is None else config
            is_longer = extensions(described["config"], config.as_dict())
            if ranks.first(ranks.is_first and not is_longer and is_done(path)):
                raise InvalidInput("--resume", path, DONE)
            as_before = {key: getattr(before.run, key) for key in EXECUTION}
            config = dataclasses.replace(config, run=dataclasses.replace(config.run, **as_before))

            def make() -> tuple[Simulation, LabelCounts]:
                run = dataclasses.replace(config.run, engine=described["engine"])
                made = study(dataclasses.replace(config, run=run), ranks)
                return made.simulation, made.counts

            reopening = ResumeSession(path, described, lock, ranks, say, force, WAYS)
            restored = reopening.restored(config.as_dict(), make)
            folder = reopening.reopened(config.as_dict(), restored)
            return Launch(described["name"], config, restored.simulation, folder)

    @staticmethod
    def changed(path: Path, changes: Sequence[str]) -> Config:
        """A stored run's config with "section.key=value" changes on top, which may be of how far it
        goes and of what is kept of it."""
        allowed = [f"run.{key}" for key in (*EXTENT, *STORAGE)]
        for change in changes:
            if (key := change.partition("=")[0].strip()) not in allowed:
                raise InvalidInput("--set", key, f"a run goes on as it began: with --resume only {join_names(allowed)}")
        described = format.moved_along(format.read_description(path), path)
        return Config.of(with_changes(described["config"], changes))
