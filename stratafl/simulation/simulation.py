"""A run as an iterator of round records."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from stratafl.base.errors import InvalidInput
from stratafl.base.state_dict import StateDict
from stratafl.base.topology import Topology
from stratafl.base.user_code import attribute_errors
from stratafl.base.validation import check_integer, check_number
from stratafl.core.client_training import Engine
from stratafl.core.client_update import ClientUpdate, needs_sgd_path
from stratafl.core.schedule import SyncSchedule
from stratafl.data.dataset import FederatedData
from stratafl.distributed.checkpointing import check_full_state, gather_state, scatter_state
from stratafl.distributed.communicator import Communicator
from stratafl.experiment.algorithm import rule_names
from stratafl.experiment.experiment import Experiment
from stratafl.federation.federation import Federation
from stratafl.federation.local_parameters import ClientTrainer
from stratafl.federation.sync import SyncResult
from stratafl.federation.update_checks import Rejection
from stratafl.metrics.communication import Communication, CommunicationMeter, Total
from stratafl.metrics.drift import Drift
from stratafl.metrics.records import (
    PartialRecord,
    RankRecord,
    RoundResult,
    all_refused_error,
    merge_records,
)
from stratafl.network.messages import RecordedWorkload
from stratafl.network.virtual_clock import VirtualClock
from stratafl.rules.registry import method_label
from stratafl.simulation.callbacks import Tracker, tracking
from stratafl.simulation.evaluate import Evaluator, is_evaluation_round
from stratafl.simulation.progress import ProgressBar, is_interactive
from stratafl.simulation.result import LevelTotals, Result, RootOnly, not_kept, notebook_card

PARTS = ("federation", "traffic")
"""Parts of a run's state that have rows, which several ranks share."""


class RoundProgress(NamedTuple):
    """The part of a global round that is done."""

    before: PartialRecord = PartialRecord()
    syncs: int = 0
    seconds: float = 0.0

    @staticmethod
    def from_plain(values: StateDict, tree: Topology, syncs_per_round: int) -> RoundProgress:
        """Read a state's progress; raise where no round can have come so far."""
        kinds = {"meetings": int, "seconds": float, "rejected": list, "drift": list | None, "client_steps": int}
        kinds["clipped"] = int | None
        if set(values) != set(kinds) or not all(isinstance(values[name], kind) for name, kind in kinds.items()):
            raise InvalidInput("state.within", list(values), f"must be a table of {', '.join(kinds)}")
        syncs = check_integer("state.within.meetings", values["meetings"], at_least=1, at_most=syncs_per_round - 1)
        return RoundProgress(
            before=PartialRecord.from_plain(values, tree.whole, "state.within"),
            syncs=syncs,
            seconds=check_number("state.within.seconds", values["seconds"], at_least=0),
        )


def check_state(state: StateDict, engine: Engine, tree: Topology, syncs_per_round: int, several_ranks: bool) -> None:
    """Raise where a state is malformed, or another engine's."""
    kinds: dict[str, Any] = {"step": int, "history": list, "engine": str, "chunk": int | None}
    kinds |= dict.fromkeys(PARTS, dict)
    if isinstance(state, Mapping) and "within" in state:
        kinds["within"] = dict
    if not isinstance(state, Mapping) or set(state) != set(kinds):
        raise InvalidInput("state", type(state).__name__, f"must be a table of {', '.join(kinds)}")
    for name, kind in kinds.items():
        if not isinstance(state[name], kind):
            raise InvalidInput(f"state.{name}", state[name], "is of the wrong kind")
    history = [RoundResult.of(values) for values in state["history"]]
    if [result.round for result in history] != list(range(1, len(history) + 1)):
        raise InvalidInput("state.history", len(history), "its rounds are not one after another")
    check_integer("state.step", state["step"], at_least=0)
    if "within" in state:
        RoundProgress.from_plain(state["within"], tree, syncs_per_round)
    if state["engine"] != engine.name:
        raise InvalidInput("state.engine", state["engine"], f"another engine's; this run has {engine.name}")
    if engine.chunk_size is not None or state["chunk"] is not None:
        check_integer("state.chunk", state["chunk"], at_least=1)
    if several_ranks:
        check_full_state(tree, {name: state[name] for name in PARTS})


class Recorder(Protocol):
    """Records a run, round by round (see `Simulation.save`)."""

    name: str

    def listening(self) -> AbstractContextManager[None]:
        """Let Ctrl-C stop the run after the present synchronisation, while this is open."""
        ...

    def next_round(self) -> RoundResult: ...


class Simulation:
    """An iterator of round results; between two rounds its attributes may be read and changed."""

    def __init__(
        self,
        *,
        federation: Federation,
        trainer: ClientTrainer,
        schedule: SyncSchedule,
        experiment: Experiment,
        data: FederatedData,
        evaluator: Evaluator,
        evaluated_levels: Sequence[int],
        drift: Drift | None,
        clock: VirtualClock | None,
        workload: RecordedWorkload,
        ranks: Communicator,
        notes: Sequence[str] = (),
    ):
        self.experiment, self.data, self.ranks = experiment, data, ranks
        self.notes = tuple(notes)
        """Warnings about this run, logged once when it is set up."""
        self.federation, self.engine, self.home = federation, *trainer[:2]
        self.flat = self.engine.training.flat
        self.traffic, self.drift = CommunicationMeter(federation.tree), drift
        """Observers of the federation."""
        federation.observers = [self.traffic] if drift is None else [self.traffic, drift]
        self.schedule, self.evaluator, self.objective = schedule, evaluator, evaluator.objective
        self.rounds, self.evaluate_every = experiment.rounds, experiment.evaluation.every
        self.evaluate_levels = tuple(evaluated_levels)
        self.history: list[RoundResult] = []
        self.method = method_label(rule_names(experiment.method))
        """The rules in a few words."""
        self.step = 0
        self.on_sync: Callable[[int, int], None] = lambda syncs, syncs_per_round: None
        """Called after every synchronisation inside a global round, with the number of those done,
        and the number in a global round."""
        self.step_ratio = float(workload.steps_N.mean()) / schedule.periods[-1]
        """Mean steps of a client for each step of the schedule: more than one where the schedule
        counts passes over a client's data."""
        self.clock = clock
        """Virtual time of a network, where the run has one."""
        self.workload = workload
        """Messages and operations that decide the run's time and traffic on any network."""
        """Opens the recorder of a folder; set by `simulate`."""
        self._recorder: Recorder | None = None
        self._problem: InvalidInput | None = None
        self._kept: Result | None = None
        """Result of a finished run whose state was not kept."""
        self._rejected: list[list[Rejection]] = []
        self._clipped_before: int | None = None
        self._begin_round(RoundProgress())

    def facts(self) -> dict[str, Any]:
        """A summary of the run: method, tree, model, parameters, periods, engine and rounds."""
        tree = self.federation.tree.whole
        return {
            "method": self.method,
            "tree": " > ".join(f"{size:,}" for size in tree.sizes),
            "model": type(self.flat.module).__name__,
            "parameters": self.flat.parameters,
            "periods": list(self.schedule.periods),
            "engine": self.engine.how,
            "rounds": self.rounds,
        }

    def __repr__(self) -> str:
        facts = self.facts()
        model = f"{facts['model']} of {facts['parameters']:,} parameters"
        progress = f"round {len(self.history)} of {self.rounds}"
        clients = f"{self.federation.tree.whole.leaves:,} clients"
        return f"<Simulation of {facts['method'] or 'a run'}: {model} on {clients}, {progress}>"

    def _repr_html_(self) -> str:
        facts = {**self.facts(), "rounds": f"{len(self.history)} of {self.rounds}"}
        facts |= {"note": "; ".join(self.notes)} if self.notes else {}
        return notebook_card("Simulation", facts, self.history)

    @property
    def client_update(self) -> ClientUpdate:
        """The clients' chain, as the engine has it."""
        return self.engine.client_update

    @client_update.setter
    def client_update(self, update: ClientUpdate) -> None:
        present = self.engine.client_update
        keeps_state = present.keeps_optimizer_state or update.keeps_optimizer_state
        is_same_state = (present.optimizer, present.optimizer_state) == (update.optimizer, update.optimizer_state)
        if keeps_state and not is_same_state:
            raise InvalidInput(
                "client.optimizer", update.optimizer, "one whose state is kept cannot be changed in a run"
            )
        if needs_sgd_path(update, self.federation.rules) and not self.federation.has_path:
            raise InvalidInput("client.optimizer", update.optimizer, "must be there from the start where rules correct")
        if update.epochs != present.epochs:
            raise InvalidInput("schedule.periods", update.epochs, "cannot be changed in a run")
        self.engine.client_update = update

    @property
    def meetings_per_round(self) -> int:
        """Number of the clients' synchronisations in a global round; `meetings` of them are done in
        the present one."""
        return int(self.schedule.meetings[-1])

    @property
    def mean_steps(self) -> int:
        """Local steps of a client so far, mean over the clients."""
        return round(self.step * self.step_ratio)

    @property
    def done(self) -> bool:
        """Whether all rounds are done, or the last one reached all goals that stop the run."""
        reached = bool(self.history) and self.history[-1].reaches(self.objective.goals)
        return len(self.history) >= self.rounds or reached

    def __iter__(self) -> Iterator[RoundResult]:
        """The rounds that are left; of a run that is done, the records of all rounds."""
        return iter(list(self.history)) if self.done and self._problem is None else self

    def __next__(self) -> RoundResult:
        self.check()
        if self.done:
            raise StopIteration
        if self._recorder is not None:
            return self._recorder.next_round()
        while (result := self.advance()) is None:
            pass
        return result

    def advance(self) -> RoundResult | None:
        """Train the clients and synchronise; return the round's result if the root synchronised, or
        None inside a global round. The caller checks `done`."""
        self._check_kept()
        self.check()
        with attribute_errors(lambda: self.engine.training.function_names(), f", in round {len(self.history) + 1}"):
            return self._advance()

    def _advance(self) -> RoundResult | None:
        round = len(self.history)
        self.ranks.create_groups()
        began = time.perf_counter()
        check_number("client.lr", self.client_update.lr(round), at_least=0, at_most=torch.finfo(self.flat.dtype).max)
        sync_result = self._train_and_synchronize(round)
        if sync_result.top_level > 1:
            self._seconds += time.perf_counter() - began
            self.on_sync(self.meetings, self.meetings_per_round)
            return None
        evaluates = is_evaluation_round(round + 1, self.evaluate_every, self.rounds)
        parts = self._rank_records(sync_result.renewed, evaluates and self.evaluator.test is not None)
        tree = self.federation.tree.whole
        result = merge_records(
            tree,
            parts,
            self.objective,
            round=round + 1,
            steps=self.mean_steps,
            lr=float(self.client_update.lr(round)),
            seconds=self._seconds + time.perf_counter() - began,
            before=self._before,
        )
        if self.clock is not None:
            result = self.clock.record(result)
        self._begin_round(RoundProgress())
        self.history.append(result)
        self._problem = all_refused_error(tree, self.history, warns=self.ranks.is_first)
        return result

    def _train_and_synchronize(self, round: int) -> SyncResult:
        """Train the clients until their next synchronisation, and count what it did."""
        if self._clipped_before is None:
            self._clipped_before = self.engine.clipped_steps
        steps, top_level = self.schedule.event(self.meetings)
        trainer = ClientTrainer(self.engine, self.home)
        result = self.federation.train_and_synchronize(
            trainer, round=round, first_step=self.step, steps=steps, top_level=top_level
        )
        self._rejected.append(result.rejected)
        training = self.engine.training
        self._client_steps += sum(training.steps(self.client_update, client, steps) for client in result.participants)
        self.step += steps
        self.meetings += 1
        return result

    def _rank_records(self, renewed: bool, evaluates: bool) -> list[RankRecord]:
        """Collect the records of all ranks of the synchronisations since the last call; all ranks
        must call it."""
        tree = self.federation.tree
        owned = [tree.owned(level) for level in range(len(tree.sizes))]
        record = RankRecord(
            rejected=self._rejected,
            renewed=renewed,
            evaluation=self.evaluator.evaluate_root(self.ranks, *self.rows(0)) if evaluates else None,
            nodes=self._evaluate_nodes() if evaluates else [],
            traffic=self.traffic.communication.by_level(owned),
            drift=None if self.drift is None else self.drift.pop_round(),
            clipped=self._clipped(),
            client_steps=self._client_steps,
        )
        self._reset_counts()
        return [RankRecord.from_plain(values) for values in self.ranks.all_gather(record.to_plain())]

    def _begin_round(self, progress: RoundProgress) -> None:
        """Begin a round, or go on with one that was interrupted."""
        self._before, self.meetings, self._seconds = progress
        self._reset_counts()

    def _clipped(self) -> int | None:
        if not self.client_update.has_clip:
            return None
        return 0 if self._clipped_before is None else self.engine.clipped_steps - self._clipped_before

    def _reset_counts(self) -> None:
        self._rejected, self._client_steps = [], 0
        # read before the next training: until then others may use the engine
        self._clipped_before = None

    def check(self) -> None:
        """Raise the error of the whole run that the last round showed, such as rejection of all
        updates. It is raised once: a caller that calls again may continue."""
        problem, self._problem = self._problem, None
        if problem is not None:
            self.ranks.common_error = problem
            raise problem

    def state(self, history: bool = True) -> StateDict:
        """State of the run after a round or inside one; a run that is resumed from it has the same
        bits.

        The state is valid until the run continues; a deep copy of it, or a file, remains valid.
        Random numbers need no state: they are functions of the seed, the node and the step.

        history: whether the state includes the records of all rounds.
        """
        self._check_kept()
        parts = {"federation": self.federation.saved(), "traffic": self.traffic.saved()}
        return {
            "step": self.step,
            **({"history": [asdict(result) for result in self.history]} if history else {}),
            **(gather_state(self.ranks, self.federation.tree, parts) or {name: {} for name in parts}),
            # another engine gives other bits
            "engine": self.engine.name,
            # the number of clients in a batched product can change its last bits, and how many fit
            # depends on the free memory
            "chunk": self.engine.chunk_size,
            **({"within": self._within()} if self.meetings else {}),
        }

    def _within(self) -> StateDict:
        """The part of the present round that is done."""
        parts = self._rank_records(renewed=False, evaluates=False)
        self._before = self._before.append(PartialRecord.merge_ranks(self.federation.tree.whole, parts))
        return {"meetings": self.meetings, "seconds": self._seconds, **asdict(self._before)}

    def restore(self, state: StateDict) -> None:
        """Resume from the state of a run that was set up in the same way; where the state does not
        fit, raise and change nothing.

        On several ranks all must call this, and the first one's state is used.
        """
        federation, ranks = self.federation, self.ranks
        with ranks.raise_together():
            if ranks.is_first:
                check_state(state, self.engine, federation.tree, self.meetings_per_round, ranks.count > 1)
        shared = ranks.broadcast_first({name: value for name, value in state.items() if name not in PARTS})
        part = scatter_state(ranks, federation.tree, {name: state.get(name, {}) for name in PARTS})
        with ranks.raise_together():
            federation_state = federation.fitted(part["federation"])
            traffic_state = self.traffic.fitted(part["traffic"])
        ranks.create_groups()
        federation.restore(federation_state)
        self.traffic.restore(traffic_state)
        self.history, self.step = [RoundResult.of(values) for values in shared["history"]], shared["step"]
        self.engine.chunk_size = shared["chunk"]
        if self.drift is not None:
            self.drift.pop_round()
        progress = RoundProgress()
        if "within" in shared:
            progress = RoundProgress.from_plain(shared["within"], federation.tree, self.meetings_per_round)
        self._begin_round(progress)

    def restore_finished(
        self,
        history: Sequence[RoundResult],
        model: Mapping[str, Tensor],
        totals: Mapping[int, Total],
        bytes_per_client: float,
    ) -> None:
        """Take over a finished run of which no state was kept: its records, the state dict of the
        root's model, and the totals of its messages."""
        x_P, b_B = self.flat.load_initial(model)
        tree = self.federation.tree
        self.history = list(history)
        self._kept = Result(
            tree=tree,
            module=self.flat.build(x_P, b_B),
            models=RootOnly([x_P[None]]),
            corrections=RootOnly(),
            history=list(history),
            communication=LevelTotals(tree.whole, totals, bytes_per_client),
            flat=self.flat,
            buffers=RootOnly([b_B[None]]),
            method=self.method,
        )

    def save(
        self,
        path: str | Path,
        *,
        checkpoint_every: int | None = None,
        keep_state: bool | None = None,
        tensorboard: bool = False,
        force: bool = False,
    ) -> None:
        """Record the run in a folder, as `stratafl run` does: its records, checkpoints and report.

        If the folder has this very run, it is resumed from its last checkpoint, or is done, and
        then a loop over it gives its records; for the folder of another run an error is raised.
        Ctrl-C then stops the run after the present synchronisation, with a checkpoint.

        checkpoint_every, keep_state: those of the experiment's storage unless given; see `Storage`.
        tensorboard: whether to write events for TensorBoard, too.
        force: resume also where arguments, files or data have changed, and note it.
        """
        if not isinstance(path, str | Path):
            raise InvalidInput("save", path, "must be the path of a folder")
        from stratafl.runs.saved import saved  # what writes files is above the simulation

        storage = self.experiment.storage
        self._recorder = saved(
            self,
            Path(path),
            storage.checkpoint_every if checkpoint_every is None else checkpoint_every,
            storage.keep_state if keep_state is None else keep_state,
            tensorboard,
            force,
        )

    def run(self, progress: bool | None = None, callbacks: Sequence[Tracker] = ()) -> Result:
        """Run the remaining rounds.

        progress: whether to show a progress bar; unless given, at a terminal and in a notebook.
        callbacks: objects that are called at the beginning, after every round and at the end, on
            the first of several ranks (see `simulation.callbacks`).
        """
        quiet = not (self.ranks.is_first and (is_interactive() if progress is None else progress))
        title = "run" if self._recorder is None else self._recorder.name
        previous = self.on_sync
        with (
            nullcontext() if self._recorder is None else self._recorder.listening(),
            ProgressBar(title, self.rounds, quiet, len(self.history)) as progress_bar,
            tracking(callbacks if self.ranks.is_first else (), self.facts()) as follow,
        ):
            self.on_sync = previous if quiet else progress_bar.on_sync
            try:
                while not self.done:
                    record = next(self)
                    progress_bar.show(record)
                    follow(record)
                self.check()
            finally:
                self.on_sync = previous
        return self.result()

    def result(self) -> Result:
        """Result of the rounds so far; on several ranks, with the rows of this rank's nodes."""
        if self._kept is not None:
            return self._kept
        federation = self.federation
        models, buffers = zip(*map(self.rows, range(len(federation.levels))), strict=True)
        return Result(
            tree=federation.tree,
            module=self.flat.build(models[0][0], buffers[0][0]),
            models=list(models),
            corrections=[self.home.pad_corrections(level.correction) for level in federation.levels[1:]],
            history=list(self.history),
            communication=self._communication(),
            flat=self.flat,
            buffers=list(buffers),
            method=self.method,
        )

    def _communication(self) -> Communication:
        """Messages and bytes of the whole tree."""
        tree = self.federation.tree
        communication = Communication(tree.whole)
        counts = gather_state(self.ranks, tree, self.traffic.communication.saved())
        if counts:
            communication.restore(copy.deepcopy(counts))
        return communication

    def _check_kept(self) -> None:
        """Reject questions for the state of a finished run that was not kept."""
        if self._kept is not None:
            raise not_kept("models and corrections of the nodes")

    def rows(self, level: int) -> tuple[Tensor, Tensor]:
        """Whole models and buffers of the nodes of a level. On several ranks, all must call it."""
        self._check_kept()
        federation = self.federation
        model_NP, client_rows = federation.levels[level].model, federation.levels[-1].client_rows
        return self.home.whole_models(federation.tree, level, model_NP, federation.buffers(level), client_rows)

    def _evaluate_nodes(self) -> list[dict[str, dict[str, float]]]:
        """Metrics of the nodes of every evaluated level below the root."""
        tree, levels = self.federation.tree, [level for level in self.evaluate_levels if level > 0]
        return [self.evaluator.evaluate_level(tree, level, *self.rows(level)) for level in levels]
