"""A config's run, new or gone on with, recorded in a run directory."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stratafl.base import files
from stratafl.base.errors import InvalidInput
from stratafl.config.data import LabelCounts
from stratafl.config.schema import Config
from stratafl.config.setup import study
from stratafl.ranks.collectives import Ranks
from stratafl.runs import layout
from stratafl.runs.folder import RunFacts, RunFolder
from stratafl.runs.recorder import Keeping, NullRunFolder, Recorder, Say, silent
from stratafl.runs.resume import Reopening, is_done, opened
from stratafl.simulation.run import Simulation


class Launch(Recorder):
    """A config's run about to go on."""

    def __init__(self, name: str, config: Config, simulation: Simulation, folder: RunFolder | NullRunFolder):
        super().__init__(name, simulation, folder, Keeping(config.run.checkpoint_every, config.run.keep_state))
        self.config = config

    @staticmethod
    def new(config: Config, name: str, parent: Path, ranks: Ranks | None = None) -> Launch:
        """Begin a run in a new folder."""
        ranks = Ranks() if ranks is None else ranks
        with ranks.together():
            layout.check_name(name)
            if ranks.is_first:
                files.check_writable("--runs", parent)
            made = study(config, ranks)
        ranks.same("config", config.as_dict())
        ranks.same("data", made.counts.fingerprint)
        folder: RunFolder | NullRunFolder = NullRunFolder()
        with ranks.together():
            if ranks.is_first:
                id = layout.new_id()
                facts = RunFacts.of(config.as_dict(), made.simulation, made.counts)
                folder = RunFolder.create(parent / f"{name}-{id}", name, id, facts)
        return Launch(name, config, made.simulation, folder)

    @staticmethod
    def resume(path: Path, say: Say = silent, ranks: Ranks | None = None, force: bool = False) -> Launch:
        """From the last good checkpoint of a run that was interrupted or failed.

        force: go on also where its config, the user's files or its data are no longer what they
            were, and note that.
        """
        ranks = Ranks() if ranks is None else ranks

        def check(described: Mapping[str, Any]) -> None:
            if "job" in described:
                told = "is the root of a deployed run: `stratafl deploy up`, or its start.sh, goes on with it"
                raise InvalidInput("--resume", path, told)
            if "objects" in described:
                told = "its model and data are objects of a Python program: run that again, with the same `save`"
                raise InvalidInput("--resume", path, told)
            if is_done(path):
                raise InvalidInput("--resume", path, "this run is done")

        with opened(path, ranks, check) as (described, lock):
            config = Config.of(described["config"])

            def make() -> tuple[Simulation, LabelCounts]:
                run = dataclasses.replace(config.run, engine=described["engine"])
                made = study(dataclasses.replace(config, run=run), ranks)
                return made.simulation, made.counts

            reopening = Reopening(path, described, lock, ranks, say, force, normal=_normal)
            restored = reopening.restored(config.as_dict(), make)
            folder = reopening.reopened(config.as_dict(), restored)
            return Launch(described["name"], config, restored.simulation, folder)


def _normal(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return Config.of(config).as_dict()
