"""The run folder of a deployed run: its root's own site, which `stratafl runs` and `report` read
like any other.

Every round is in its record once. The root's state holds the record of its last round. So whenever
the root dies, rounds.jsonl holds at least the records before that one, and at its next start that
one is added if it is not there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from stratafl.base import files
from stratafl.base.errors import InvalidInput
from stratafl.base.topology import Topology
from stratafl.deploy.sites.site import TOPOLOGY, Site, stored_topology
from stratafl.engine.loop import LoopEngine
from stratafl.engine.precision import effective_precision
from stratafl.experiment.algorithm import sync_schedule
from stratafl.experiment.experiment import Experiment
from stratafl.metrics.records import RoundResult
from stratafl.network.replay import leaf_steps
from stratafl.runs import format
from stratafl.runs.writer import RunDescription, RunWriter, summary
from stratafl.simulation.build import batch_size
from stratafl.simulation.deployed import CPU, RootSetup


class RootRun:
    """The root's alone to write: its process holds the lock of the root's state."""

    def __init__(self, folder: Path, site: Site, experiment: Experiment, made: RootSetup, last: str):
        """Bring the folder to where the state is; `last` is the record of the last round, empty
        before the first."""
        self.history = _history(folder, last)
        precision = effective_precision("fp32", CPU, made.start.flat.dtype, supports_half=False)
        own = _with_own_data(folder, made.tree.names[-1])
        counts = made.counts.without(own)
        # how many samples a leaf of its own data takes in a step, only that leaf knows
        workload = None if own else made.workload
        engine, better = LoopEngine.name, made.objective.better
        how = engine, engine, precision
        facts = RunDescription(
            experiment.to_table(), made.tree, counts, *how, job=site.job, better=better, workload=workload
        )
        self._folder = RunWriter.attach(folder, format.slug(folder.absolute().parent.name), facts, self.history)
        self._steps = _steps_per_round(site, experiment, made.tree)

    def steps(self, rounds: int) -> int:
        """Local steps of a client in so many global rounds, mean over the clients."""
        return round(rounds * self._steps)

    @property
    def last(self) -> RoundResult | None:
        return self.history[-1] if self.history else None

    def add(self, line: str) -> RoundResult:
        """A round more, on the disk when this returns: the state of the next round will not hold
        it."""
        record = _record(self._folder.path / format.ROUNDS, line)
        self._folder.append_round(record, sync=True)
        self.history.append(record)
        return record

    def finish(
        self, tensors: Mapping[str, Tensor], bytes_per_client: float, totals: Mapping[int, Mapping[str, int]]
    ) -> None:
        """The run is over. totals: what was sent between a level and its parents, as far as the
        root knows."""
        self._folder.finish(tensors, summary(self.history, bytes_per_client, totals))

    def close(self) -> None:
        self._folder.close()


def _steps_per_round(site: Site, experiment: Experiment, tree: Topology) -> float:
    """Local steps of a client in a global round, mean over the clients. Where clients make passes
    over their data, and the samples of some were not declared, a pass counts as one step."""
    schedule = sync_schedule(experiment.schedule, tree)
    if experiment.schedule.unit != "epochs" or not all(site.samples):
        return schedule.steps[0]
    steps_N, _ = leaf_steps(site.samples, batch_size(experiment), schedule, counts_epochs=True)
    return schedule.steps[0] / schedule.periods[-1] * float(steps_N.mean())


def read_lines(folder: Path) -> list[str]:
    """The records that are wholly written."""
    path = folder / format.ROUNDS
    return [line.decode(errors="replace") for line in _whole_lines(files.read_bytes(path))] if path.exists() else []


def _history(folder: Path, last: str) -> list[RoundResult]:
    """What the record holds of the rounds before the last one, and that."""
    if not last:
        return []
    path = folder / format.ROUNDS
    ending = _record(path, last)
    lines = _whole_lines(files.read_bytes(path)) if path.exists() else []
    # beyond that there is what a state told that is gone, or never was saved
    before = [record for line in lines if (record := _known(path, line)) is not None and record.round < ending.round]
    return [*before, ending]


def _record(path: Path, line: str) -> RoundResult:
    return RoundResult.of(files.parse_json(path, line.encode()))


def _known(path: Path, line: bytes) -> RoundResult | None:
    """None where a line is no record of ours."""
    try:
        return _record(path, line.decode())
    except (InvalidInput, UnicodeDecodeError):
        return None


def _whole_lines(text: bytes) -> list[bytes]:
    return text.split(b"\n")[:-1]


def _with_own_data(folder: Path, leaves: Sequence[str]) -> list[int]:
    """The numbers of the leaves whose labels only they know."""
    topology: dict[str, Any] = stored_topology(folder).config if (folder / TOPOLOGY).exists() else {}
    return [number for number, name in enumerate(leaves) if name in topology.get("data", {})]
