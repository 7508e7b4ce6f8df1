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
from stratafl.base.topology import Tree
from stratafl.base.user_code import attribute_errors
from stratafl.base.validation import check_integer, check_number
from stratafl.core.channel import MODEL
from stratafl.core.client_training import Engine
from stratafl.core.client_update import Leaf, needs_sgd_path
from stratafl.core.flat_module import FlatModule
from stratafl.core.schedule import Schedule
from stratafl.data.inputs import Pair
from stratafl.distributed.checkpointing import check_full_state, gather_state, scatter_state
from stratafl.distributed.communicator import Communicator
from stratafl.federation.federation import Federation
from stratafl.federation.local_parameters import LocalParameters
from stratafl.federation.update_checks import Refusal
from stratafl.metrics.communication import Communication, CommunicationMeter
from stratafl.metrics.drift import Drift
from stratafl.metrics.evaluation import EvaluationSums
from stratafl.metrics.objective import Objective
from stratafl.metrics.records import (
    EMPTY_RECORD,
    PartialRecord,
    RankRecord,
    RoundResult,
    all_refused_error,
    merge_records,
)
from stratafl.network.messages import RecordedWorkload
from stratafl.network.virtual_clock import VirtualClock
from stratafl.simulation.callbacks import Tracker, tracking
from stratafl.simulation.evaluate import (
    ClientTestData,
    evaluate_level,
    evaluate_model,
    is_evaluation_round,
    shard_for_rank,
)
from stratafl.simulation.groups import Evaluation
from stratafl.simulation.progress import ProgressBar, is_interactive
from stratafl.simulation.result import Result, notebook_card


class Shown:
    """What a simulation shows of itself."""

    federation: Federation
    flat: FlatModule
    engine: Engine
    schedule: Schedule
    history: list[RoundResult]
    rounds: int
    notes: Sequence[str]
    method = ""
    """The rules in a few words."""

    def facts(self) -> dict[str, Any]:
        """What is run, in a few words and numbers."""
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
        told = f"<Simulation of {facts['method'] or 'a run'}: {facts['model']} of {facts['parameters']:,} parameters"
        where = f"{self.federation.tree.whole.leaves:,} clients, round {len(self.history)} of {self.rounds}"
        return f"{told} on {where}>"

    def _repr_html_(self) -> str:
        facts = {**self.facts(), "rounds": f"{len(self.history)} of {self.rounds}"}
        facts |= {"note": "; ".join(self.notes)} if self.notes else {}
        return notebook_card("Simulation", facts, self.history)


PARTS = ("federation", "traffic")
"""The parts of a run's state that have rows, which several ranks share."""


class RoundProgress(NamedTuple):
    """What was done of a global round."""

    before: PartialRecord = EMPTY_RECORD
    meetings: int = 0
    seconds: float = 0.0

    @staticmethod
    def read(values: StateDict, tree: Tree, meetings: int) -> RoundProgress:
        """Read it from a state, or complain; meetings: those of a whole round."""
        kinds = {"meetings": int, "seconds": float, "refused": list, "drift": list | None, "client_steps": int}
        kinds["clipped"] = int | None
        if set(values) != set(kinds) or not all(isinstance(values[name], kind) for name, kind in kinds.items()):
            raise InvalidInput("state.within", list(values), f"must be a table of {', '.join(kinds)}")
        return RoundProgress(
            PartialRecord.read(values, tree.whole, "state.within"),
            check_integer("state.within.meetings", values["meetings"], at_least=1, at_most=meetings - 1),
            check_number("state.within.seconds", values["seconds"], at_least=0),
        )


def check_state(state: StateDict, engine: Engine, tree: Tree, meetings: int, several_ranks: bool) -> None:
    """Refuse a state that is none, or another engine's."""
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
        RoundProgress.read(state["within"], tree, meetings)
    if state["engine"] != engine.name:
        raise InvalidInput("state.engine", state["engine"], f"another engine's; this run has {engine.name}")
    if engine.chunk_size is not None or state["chunk"] is not None:
        check_integer("state.chunk", state["chunk"], at_least=1)
    if several_ranks:
        check_full_state(tree, {name: state[name] for name in PARTS})


class Recorder(Protocol):
    """Keeps a run, round by round; see `Simulation.save`."""

    name: str

    def listening(self) -> AbstractContextManager[None]:
        """While this is open, Ctrl-C asks the run to stop at the end of a group round."""
        ...

    def next_round(self) -> RoundResult: ...


class Simulation(Shown):
    """An iterator of round results; between two rounds its attributes may be read and changed."""

    def __init__(
        self,
        federation: Federation,
        home: LocalParameters,
        traffic: CommunicationMeter,
        drift: Drift | None,
        engine: Engine,
        flat: FlatModule,
        schedule: Schedule,
        objective: Objective,
        test: Pair | None,
        own_test: ClientTestData | None,
        evaluation: Evaluation,
        ranks: Communicator,
        notes: Sequence[str] = (),
    ):
        self.ranks = ranks
        self.notes = tuple(notes)
        """What the user should know about how this run is done: said once, when it is set up."""
        self.federation, self.engine, self.flat = federation, engine, flat
        self.home = home
        """What of the clients' models stays with them: the federation's rows are without it."""
        self.traffic, self.drift = traffic, drift
        """Who watches the federation."""
        self.schedule, self.objective = schedule, objective
        self.test, self.own_test = test, own_test
        """What the root is evaluated on, and what each other node has of its own."""
        self.rounds, self.evaluate_every = evaluation.rounds, evaluation.evaluate_every
        self.evaluate_levels = tuple(evaluation.evaluate_levels)
        self.history: list[RoundResult] = []
        self.step = 0
        self.met: Callable[[int, int], None] = lambda meetings, of: None
        """Called after every meeting inside a global round: how many were held, of how many."""
        self.pace = 1.0
        """Steps of a client, on average, for each that the schedule counts: more than one where
        these are passes over its data."""
        self.clock: VirtualClock | None = None
        """The virtual time of a network, where the run has one."""
        self.workload: RecordedWorkload | None = None
        """What decides its time and traffic on any network."""
        self.saving: Callable[..., Recorder | None] | None = None
        """How it can be kept: known to whoever set it up."""
        self._recorder: Recorder | None = None
        self._problem: InvalidInput | None = None
        self._refused: list[list[Refusal]] = []
        self._clipped_before: int | None = None
        self._begin_round(RoundProgress())

    @property
    def leaf(self) -> Leaf:
        """The clients' chain; the engine's own, so that steps and rates cannot disagree."""
        return self.engine.leaf

    @leaf.setter
    def leaf(self, leaf: Leaf) -> None:
        now = self.engine.leaf
        if (now.keeps or leaf.keeps) and (now.optimiser, now.keeps) != (leaf.optimiser, leaf.keeps):
            raise InvalidInput("leaf.optimiser", leaf.optimiser, "one whose state is kept cannot be changed in a run")
        if needs_sgd_path(leaf, self.federation.rules) and not self.federation.has_path:
            raise InvalidInput("leaf.optimiser", leaf.optimiser, "must be there from the start where rules correct")
        if leaf.epochs != now.epochs:
            raise InvalidInput("leaf.epochs", leaf.epochs, "cannot be changed in a run")
        self.engine.leaf = leaf

    @property
    def meetings_per_round(self) -> int:
        """How often the leaves meet their parents in a global round; `meetings` were held in the
        one under way."""
        return int(self.schedule.meetings[-1])

    @property
    def mean_steps(self) -> int:
        """Local steps of a client so far, on average over the clients."""
        return round(self.step * self.pace)

    @property
    def done(self) -> bool:
        """Whether all rounds were done, or the last one reached what the run is to stop at."""
        reached = bool(self.history) and self.history[-1].reaches(self.objective.goals)
        return len(self.history) >= self.rounds or reached

    def __iter__(self) -> Iterator[RoundResult]:
        return self

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
        """Train the leaves until the next meeting, and let it be held: the round's result where the
        root met, and None inside a global round. Whoever calls this looks at `done`."""
        self.check()
        with attribute_errors(lambda: self.engine.training.owners(), f", in round {len(self.history) + 1}"):
            return self._advance()

    def _advance(self) -> RoundResult | None:
        round = len(self.history)
        self.ranks.connect()
        began = time.perf_counter()
        check_number("leaf.lr", self.leaf.lr(round), at_least=0, at_most=torch.finfo(self.flat.dtype).max)
        top, renewed = self._one_meeting(round)
        if top > 1:
            self._seconds += time.perf_counter() - began
            self.met(self.meetings, self.meetings_per_round)
            return None
        test = self.test if is_evaluation_round(round + 1, self.evaluate_every, self.rounds) else None
        parts = [RankRecord(**each) for each in self.ranks.all(vars(self._seen(renewed, test)))]
        seconds = self._seconds + time.perf_counter() - began
        tree = self.federation.tree.whole
        rate, steps = float(self.leaf.lr(round)), self.mean_steps
        result = merge_records(tree, parts, self.objective, round + 1, steps, rate, seconds, self._before)
        if self.clock is not None:
            result = self.clock.record(result)
        self._begin_round(RoundProgress())
        self.history.append(result)
        self._problem = all_refused_error(tree, self.history, self.ranks.is_first)
        return result

    def _one_meeting(self, round: int) -> tuple[int, bool]:
        """Train and meet; the topmost edge level that met, and whether its parents have a new
        model."""
        federation, drift = self.federation, self.drift
        if self._clipped_before is None:
            self._clipped_before = self.engine.clipped_steps
        steps, top = self.schedule.event(self.meetings)
        federation.begin()
        if federation.wants_gradients:
            look = self.home.work(federation.work(self.step, 1, round))
            federation.start_from_gradients(self.home.shared(self.engine.gradients(look)))
        if drift is not None and top == 1:
            corrections = [level.correction for level in federation.levels]
            drift.compare(corrections, federation.levels[-2].given[MODEL])
        work = self.home.work(federation.work(self.step, steps, round))
        federation.trained(self.home.trained(self.engine.train(work)), self.leaf.rate(round, steps))
        met = federation.meet(top)
        self._refused.append(met.refused)
        self._client_steps += sum(self.engine.training.steps(self.leaf, client, steps) for client in work.active)
        self.step += steps
        self.meetings += 1
        return top, met.renewed

    def _seen(self, renewed: bool, test: Pair | None) -> RankRecord:
        """What this process saw since it was last asked."""
        seen = RankRecord(
            refused=self._refused,
            renewed=renewed,
            tally=None if test is None else self._tally_of_root(test),
            nodes=[] if test is None else self._evaluate_nodes(test),
            client_bytes=self.traffic.communication.client_bytes,
            drift=None if self.drift is None else self.drift.take(),
            clipped=self._clipped(),
            client_steps=self._client_steps,
        )
        self._look_from_here()
        return seen

    def _begin_round(self, done: RoundProgress) -> None:
        """Go on with a round of which so much is done."""
        self._before, self.meetings, self._seconds = done
        self._look_from_here()

    def _clipped(self) -> int | None:
        if not self.leaf.clips:
            return None
        return 0 if self._clipped_before is None else self.engine.clipped_steps - self._clipped_before

    def _look_from_here(self) -> None:
        self._refused, self._client_steps = [], 0
        # read at the next meeting: until then somebody else may use the engine
        self._clipped_before = None

    def check(self) -> None:
        """Raise what the last round showed to be wrong with the run as a whole; asked again, it may
        go on."""
        problem, self._problem = self._problem, None
        if problem is not None:
            self.ranks.agreed_on = problem
            raise problem

    def state(self, history: bool = True) -> StateDict:
        """Where the run stands, after a round or `within` one: enough to go on to the same bits,
        and valid until it goes on (a deep copy of it, or what is written from it, for ever).
        Whoever keeps the records elsewhere can leave out the history.

        The random streams need no place in it: a draw is a function of the step, the node and the
        seed.
        """
        parts = {"federation": self.federation.saved(), "traffic": self.traffic.saved()}
        return {
            "step": self.step,
            **({"history": [asdict(result) for result in self.history]} if history else {}),
            **(gather_state(self.ranks, self.federation.tree, parts) or {name: {} for name in parts}),
            # another engine's bits are others
            "engine": self.engine.name,
            # how many clients share a batched product can change its last bits, and what fits
            # depends on the moment
            "chunk": self.engine.chunk_size,
            **({"within": self._within()} if self.meetings else {}),
        }

    def _within(self) -> StateDict:
        """What was done of the round under way."""
        tree = self.federation.tree.whole
        parts = [RankRecord(**each) for each in self.ranks.all(vars(self._seen(False, None)))]
        self._before = self._before.then(PartialRecord.of(tree, parts))
        return {"meetings": self.meetings, "seconds": self._seconds, **asdict(self._before)}

    def restore(self, state: StateDict) -> None:
        """Go on from the state of a run set up the same way; one that does not fit is refused, and
        nothing changed.

        Of several ranks the first one's is taken, and all must call this.
        """
        federation, ranks = self.federation, self.ranks
        with ranks.together():
            if ranks.is_first:
                check_state(state, self.engine, federation.tree, self.meetings_per_round, ranks.count > 1)
        known = ranks.first({name: value for name, value in state.items() if name not in PARTS})
        mine = scatter_state(ranks, federation.tree, {name: state.get(name, {}) for name in PARTS})
        with ranks.together():
            held, sent = federation.fitted(mine["federation"]), self.traffic.fitted(mine["traffic"])
        ranks.connect()
        federation.restore(held)
        self.traffic.restore(sent)
        self.history, self.step = [RoundResult.of(values) for values in known["history"]], known["step"]
        self.engine.chunk_size = known["chunk"]
        if self.drift is not None:
            self.drift.take()
        is_within = "within" in known
        self._begin_round(
            RoundProgress.read(known["within"], federation.tree, self.meetings_per_round)
            if is_within
            else RoundProgress()
        )

    def save(
        self,
        path: str | Path,
        *,
        checkpoint_every: int = 10,
        keep_state: bool = True,
        tensorboard: bool = False,
        force: bool = False,
    ) -> None:
        """Keep the run in a folder, as `stratafl run` does: its records, checkpoints, report.

        If the folder has this very run, it goes on from its last checkpoint, or is done; another
        run's is refused. Ctrl-C then stops a run at the end of a group round, with a checkpoint.

        checkpoint_every: rounds; 0 for only when the run is stopped.
        keep_state: whether every node's model and correction stay when the run is done, so that the
            same call gives the same result.
        tensorboard: whether its events are written, too.
        force: go on also where arguments, files or data are no longer what they were, and note it.
        """
        if not isinstance(path, str | Path):
            raise InvalidInput("save", path, "must be the path of a folder")
        if self.saving is None:
            raise InvalidInput("save", path, "is for what `simulate` returns; `stratafl run` keeps a config's run")
        self._recorder = self.saving(self, Path(path), checkpoint_every, keep_state, tensorboard, force)

    def run(self, progress: bool | None = None, callbacks: Sequence[Tracker] = ()) -> Result:
        """Do the rounds that are left.

        progress: whether to show how far it is; unless given, at a terminal and in a notebook.
        callbacks: who is told of the beginning, every round and the end, on the first of several
            ranks: see `simulation.callbacks`.
        """
        quiet = not (self.ranks.is_first and (is_interactive() if progress is None else progress))
        title = "run" if self._recorder is None else self._recorder.name
        before = self.met
        with (
            nullcontext() if self._recorder is None else self._recorder.listening(),
            ProgressBar(title, self.rounds, quiet, len(self.history)) as display,
            tracking(callbacks if self.ranks.is_first else (), self.facts()) as follow,
        ):
            self.met = before if quiet else display.met
            try:
                for record in self:
                    display.show(record)
                    follow(record)
            finally:
                self.met = before
        return self.result()

    def result(self) -> Result:
        """The run as it stands now; on several ranks, with the rows of the nodes that are on this
        one."""
        federation = self.federation
        models, buffers = zip(*map(self.rows, range(len(federation.levels))), strict=True)
        return Result(
            tree=federation.tree,
            module=self.flat.build(models[0][0], buffers[0][0]),
            models=list(models),
            corrections=[self.home.corrections(level.correction) for level in federation.levels[1:]],
            history=list(self.history),
            communication=self._communication(),
            flat=self.flat,
            buffers=list(buffers),
            method=self.method,
        )

    def _communication(self) -> Communication:
        """Everything sent in the whole tree."""
        tree = self.federation.tree
        communication = Communication(tree.whole)
        joined = gather_state(self.ranks, tree, self.traffic.communication.saved())
        if joined:
            communication.restore(copy.deepcopy(joined))
        return communication

    def _tally_of_root(self, test: Pair) -> EvaluationSums:
        """The root's tally on this rank's share of the test data."""
        (x_P,), (b_B,) = self.rows(0)
        return evaluate_model(self.flat, self.objective, shard_for_rank(self.ranks, self.objective, test), x_P, b_B)

    def rows(self, level: int) -> tuple[Tensor, Tensor]:
        """The models and the buffers of all nodes of a level, whole. On several ranks, all must
        call it."""
        federation = self.federation
        now, kept = federation.levels[level], federation.levels[-1].optimiser
        return self.home.whole(federation.tree, level, now.model, federation.buffers(level), kept)

    def _evaluate_nodes(self, test: Pair) -> list[dict[str, dict[str, float]]]:
        """Per level that was asked for below the root."""
        tree = self.federation.tree
        subject = self.flat, self.objective, test if self.own_test is None else self.own_test
        return [evaluate_level(tree, level, *subject, *self.rows(level)) for level in self.evaluate_levels if level > 0]
