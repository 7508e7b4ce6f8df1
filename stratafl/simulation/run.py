"""A run: schedule x rules x engine, as a stream of round results."""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, get_args

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from stratafl import checks, model_checks
from stratafl.communication import Communication
from stratafl.data.batches import Sampling
from stratafl.drift import Diagnose, Drift
from stratafl.engine.choose import Name, differences, make_engine
from stratafl.engine.habits import FEW, habits, peculiarities, plain
from stratafl.engine.loop import LoopEngine
from stratafl.engine.ops import Compute
from stratafl.engine.work import Augment, Engine, Training
from stratafl.errors import InvalidInput, choice, number, whole
from stratafl.federation import Federation
from stratafl.flat import FROZEN, Flat
from stratafl.local import Leaf, clip
from stratafl.metrics import Loss, Tally, adds_up, metrics, tally
from stratafl.ranks.branch import Branch
from stratafl.ranks.deal import deal, leaf_work
from stratafl.ranks.group import Ranks
from stratafl.ranks.parts import check_whole, state_part, whole_state
from stratafl.record import RoundResult, Seen, hopeless, record
from stratafl.refusal import Refusal
from stratafl.registry import RuleLike, rules_for
from stratafl.result import Result
from stratafl.schedule import Participation, Schedule, check_participation, expected
from stratafl.state import State
from stratafl.tree import Shape, Tree

Data = tuple[Tensor, Tensor] | Dataset


class Simulation:
    """An iterator of round results; between two rounds its attributes may be read and changed."""

    def __init__(
        self,
        federation: Federation,
        engine: Engine,
        flat: Flat,
        schedule: Schedule,
        loss: Loss,
        test: tuple[Tensor, Tensor] | None,
        rounds: int,
        evaluate_every: int,
        evaluate_levels: Sequence[int],
        stop_at: float | None = None,
        ranks: Ranks | None = None,
        notes: Sequence[str] = (),
    ):
        self.ranks = Ranks() if ranks is None else ranks
        self.notes = tuple(notes)
        """What the user should know about how this run is done: said once, when it is set up."""
        self.federation, self.engine, self.flat = federation, engine, flat
        self.schedule, self.test, self._loss = schedule, test, loss
        self.rounds, self.evaluate_every = rounds, evaluate_every
        self.evaluate_levels = tuple(evaluate_levels)
        self.stop_at = stop_at
        self.history: list[RoundResult] = []
        self.step = 0
        self._problem: InvalidInput | None = None

    @property
    def leaf(self) -> Leaf:
        """The clients' chain; the engine's own, so that steps and rates cannot disagree."""
        return self.engine.leaf

    @leaf.setter
    def leaf(self, leaf: Leaf) -> None:
        self.engine.leaf = leaf

    @property
    def done(self) -> bool:
        """Whether all rounds were done, or the last one reached the accuracy to stop at."""
        if self.stop_at is not None and self.history:
            reached = self.history[-1].metrics.get("accuracy", -1.0) >= self.stop_at
        else:
            reached = False
        return reached or len(self.history) >= self.rounds

    def __iter__(self) -> Iterator[RoundResult]:
        return self

    def __next__(self) -> RoundResult:
        self.check()
        if self.done:
            raise StopIteration
        round = len(self.history)
        self.ranks.connect()
        began = time.perf_counter()
        federation, drift = self.federation, self.federation.drift
        number("leaf.lr", self.leaf.lr(round), at_least=0, at_most=torch.finfo(self.flat.dtype).max)
        refused: list[list[Refusal]] = []
        clipped_before = self.engine.clipped
        client_steps = 0
        for steps, top in self.schedule.events():
            federation.begin()
            if federation.wants_gradients:
                look = federation.work(self.step, 1, round)
                federation.start_from_gradients(self.engine.gradients(look))
            if drift is not None and top == 1:
                drift.compare(federation.correction, federation.held[-1])
            work = federation.work(self.step, steps, round)
            client_steps += steps * len(work.active)
            x_AP, b_AB = self.engine.train(work)
            federation.trained(x_AP, b_AB, self.leaf.rate(round, steps))
            met = federation.meet(top)
            refused.append(met.refused)
            self.step += steps
        evaluated = self.test is not None and ((round + 1) % self.evaluate_every == 0 or round + 1 == self.rounds)
        seen = Seen(
            refused=refused,
            renewed=met.renewed,
            tally=self._tally(0, 0, share=True) if evaluated else None,
            nodes=self._evaluate_nodes() if evaluated else [],
            client_bytes=federation.client_bytes,
            drift=None if drift is None else drift.take(),
            clipped=self._clipped(clipped_before),
            client_steps=client_steps,
        )
        parts = [Seen(**each) for each in self.ranks.all(vars(seen))]
        seconds = time.perf_counter() - began
        result = record(federation.tree.whole, parts, round + 1, self.step, self.leaf.lr(round), seconds)
        self.history.append(result)
        self._problem = hopeless(federation.tree.whole, self.history, self.ranks.is_first)
        return result

    def check(self) -> None:
        """Raise what the last round showed to be wrong with the run as a whole; asked again, it may go on."""
        problem, self._problem = self._problem, None
        if problem is not None:
            self.ranks.agreed_on = problem
            raise problem

    def _clipped(self, before: int) -> int | None:
        clips = any(isinstance(stage, clip) for stage in self.leaf.stages)
        return self.engine.clipped - before if clips else None

    def state(self, history: bool = True) -> State:
        """Where the run stands: enough to go on to the same bits, and valid until the next round begins (a deep copy
        of it, or what is written from it, for ever). Whoever keeps the records elsewhere can leave out the history.

        The random streams need no place in it: a draw is a function of the step, the node and the seed.
        """
        federation = whole_state(self.ranks, self.federation.tree, self.federation.saved())
        return {
            "step": self.step,
            **({"history": [asdict(result) for result in self.history]} if history else {}),
            "federation": federation,
            # another engine's bits are others
            "engine": self.engine.name,
            # how many clients share a batched product can change its last bits, and what fits depends on the moment
            "chunk": self.engine.chunk,
        }

    def restore(self, state: State) -> None:
        """Go on from the state of a run set up the same way; one that does not fit is refused, and nothing changed.

        Of several ranks the first one's is taken, and all must call this.
        """
        federation, ranks = self.federation, self.ranks
        with ranks.together():
            if ranks.is_first:
                self._check(state)
        known = ranks.first({name: value for name, value in state.items() if name != "federation"})
        part = state_part(ranks, federation.tree, state.get("federation", {}))
        with ranks.together():
            federation.restore(part)
        self.history, self.step = [RoundResult.of(values) for values in known["history"]], known["step"]
        self.engine.chunk = known["chunk"]

    def _check(self, state: State) -> None:
        kinds: dict[str, Any] = {"step": int, "history": list, "federation": dict, "engine": str, "chunk": int | None}
        if not isinstance(state, Mapping) or set(state) != set(kinds):
            raise InvalidInput("state", type(state).__name__, f"must be a table of {', '.join(kinds)}")
        for name, kind in kinds.items():
            if not isinstance(state[name], kind):
                raise InvalidInput(f"state.{name}", state[name], "is of the wrong kind")
        history = [RoundResult.of(values) for values in state["history"]]
        if [result.round for result in history] != list(range(1, len(history) + 1)):
            raise InvalidInput("state.history", len(history), "its rounds are not one after another")
        whole("state.step", state["step"], at_least=0)
        if state["engine"] != self.engine.name:
            raise InvalidInput("state.engine", state["engine"], f"another engine's; this run has {self.engine.name}")
        if self.engine.chunk is not None or state["chunk"] is not None:
            whole("state.chunk", state["chunk"], at_least=1)
        if self.ranks.count > 1:
            check_whole(self.federation.tree, state["federation"])

    def run(self) -> Result:
        """Do the rounds that are left."""
        for _ in self:
            pass
        return self.result()

    def result(self) -> Result:
        """The run as it stands now; on several ranks, with the rows of the nodes that are on this one."""
        federation = self.federation
        return Result(
            tree=federation.tree,
            module=self.flat.build(federation.held[0][0], federation.held_buffers[0][0]),
            models=list(federation.own),
            corrections=federation.correction[1:],
            history=list(self.history),
            communication=self._communication(),
            flat=self.flat,
            buffers=list(federation.own_buffers),
        )

    def _communication(self) -> Communication:
        """Everything sent in the whole tree."""
        tree = self.federation.tree
        saved = {"communication": self.federation.communication.saved()}
        found = Communication(tree.whole)
        joined = whole_state(self.ranks, tree, saved)
        if joined:
            found.restore(copy.deepcopy(joined["communication"]))
        return found

    def _tally(self, level: int, node: int, share: bool = False) -> Tally:
        """A node on the test data, or on this rank's share of it."""
        assert self.test is not None
        x_P = self.federation.own[level][node]
        b_B = self.federation.own_buffers[level][node].clone()  # an evaluation leaves everything as it was
        self.flat.eval()
        inputs, targets = self.test
        if share and self.ranks.count > 1:
            # a loss whose parts do not add up is asked once, of everything
            parts, mine = (self.ranks.count, self.ranks.rank) if adds_up(self._loss) else (1, 0)
            last = len(inputs) if adds_up(self._loss) or self.ranks.is_first else 0
            inputs, targets = (each[:last].tensor_split(parts)[mine] for each in self.test)
        return tally(lambda inputs: self.flat.call(x_P, b_B, inputs), self._loss, inputs, targets)

    def _evaluate_nodes(self) -> list[dict[str, dict[str, float]]]:
        tree = self.federation.tree
        return [
            {
                tree.names[level][node]: metrics([self._tally(level, int(node))])
                for node in np.flatnonzero(tree.counted(level))
            }
            for level in self.evaluate_levels
            if level > 0
        ]


def simulate(
    model: nn.Module | Callable[[], nn.Module],
    data: Data,
    partition: Sequence[Sequence[int] | np.ndarray | Tensor],
    tree: Tree | Shape,
    rules: RuleLike | Sequence[RuleLike] = "mtgc",
    *,
    periods: Sequence[int] | Schedule,
    rounds: int,
    leaf: Leaf | float = 0.1,
    batch: int | None = 32,
    sampling: Sampling = "epochs",
    test: Data | None = None,
    loss: Loss | None = None,
    weights: str | Sequence | np.ndarray | None = None,
    participation: Participation | Sequence[Participation] = None,
    seed: int = 0,
    initial: Mapping[str, Tensor | np.ndarray] | None = None,
    evaluate_every: int = 1,
    evaluate_levels: Sequence[int] = (0,),
    stop_at: float | None = None,
    augment: Augment | None = None,
    device: str | torch.device = "cpu",
    engine: Name | None = None,
    precision: Compute = "fp32",
    diagnose: Diagnose = "drift",
    update_limit: float | None = None,
    update_factor: float | Sequence[float] | None = None,
    ranks: Ranks | None = None,
) -> Simulation:
    """Set up a run. Iterate over what it returns for one result per global round, or call its `run()`.

    model: a module, or a function that builds one (called with torch's generator set from the seed).
    data, test: (inputs, targets) tensors, or a map-style data set of such pairs.
    partition: each client's sample numbers, in the order of the tree's leaves.
    tree: a `Tree` or one of its notations, such as "4x5".
    rules: a method's name ("mtgc"), a table with parameters ({"name": "fedprox", "mu": 0.1}), or one rule per edge
        level, root first.
    periods: how often each level synchronises in units of the level below, root first ([E, H] of the paper); their
        product is the local steps of a global round, a million at most.
    leaf: the clients' chain, or just its learning rate.
    batch: samples per step, None for full batches; `sampling` "epochs" shuffles without replacement.
    loss: (outputs, targets) -> scalar; cross-entropy unless given.
    weights: of siblings: "uniform", "samples" or numbers (see `Tree.weighted`); the tree's own unless given.
    participation: per level, root first, or just the clients': all, a fraction, a number, or a function.
    initial: a state dict, of tensors or arrays, to start from instead of the module's own values.
    evaluate_levels: levels whose every node is evaluated besides the root.
    stop_at: a test accuracy; the run ends after the first evaluated round that reaches it.
    augment: (inputs, seed, client, step) -> inputs, applied to every training batch; see `data.transforms`.
    engine: "loop" (one client after another: the reference, and the default on a CPU), "stacked" (all clients at once:
        the default on a GPU), "vmap" (through `torch.func`), or "auto" (the fastest, measured). All give the same
        result up to rounding.
    precision: of the stacked engine's products: "fp32", "tf32", "bf16" or "fp16"; models and corrections stay float32.
    diagnose: "drift" measures how the levels drift apart, at every meeting; "ideal" also how far corrections are from
        the ideal ones, which takes full gradients once per edge level and round; "none" neither.
    update_limit: an update so many times larger than its siblings' median is refused, 0 for none; unless given,
        ten thousand where a rule takes the mean of its children. See docs/rules.md.
    update_factor: an update whose norm is so many times its siblings' median is refused, for all levels or one number
        per level, root first; 0 or None for none.
    ranks: the processes that share the run, each of which must call this with the same arguments; see docs/ranks.md.
    """
    shape = Tree.of(tree)
    pair = checks.tensors("data", data)
    parts = checks.partition(partition, shape, len(pair[0]))
    samples = [len(part) for part in parts]
    if weights is not None:
        shape = shape.weighted(weights, samples)
    edge_rules = rules_for(rules, shape.depth)
    schedule = Schedule.of(periods.periods if isinstance(periods, Schedule) else periods, shape.depth)
    chain = checks.chain(leaf)
    rounds = whole("rounds", rounds, at_least=1)
    evaluate_every = whole("evaluate_every", evaluate_every, at_least=1)
    evaluate_levels = checks.levels("evaluate_levels", evaluate_levels, shape.depth)
    if stop_at is not None:
        number("stop_at", stop_at, above=0, at_most=1)
    batch = checks.batching(batch, sampling)
    seed = whole("seed", seed)
    ranks = Ranks() if ranks is None else ranks
    if not isinstance(ranks, Ranks):
        raise InvalidInput("ranks", ranks, "must be those of stratafl.ranks; see docs/ranks.md")
    device = ranks.device(checks.place(device))
    shares = check_participation(participation, shape.depth)
    choice("diagnose", diagnose, get_args(Diagnose))
    if engine is not None:
        choice("engine", engine, get_args(Name))

    flat = checks.flattened(model, seed)
    checks.strengths(flat.dtype, chain, edge_rules)
    x_P, b_B = flat.row(flat.module) if initial is None else flat.start(checks.initial(initial))
    objective = F.cross_entropy if loss is None else loss

    def placed(pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        inputs, targets = (t.to(device, flat.dtype if t.is_floating_point() else t.dtype) for t in pair)
        return inputs, targets

    train = placed(pair)
    held_out = None if test is None else placed(checks.tensors("test", test))
    flat.module.to(device)
    x_P, b_B = x_P.to(device), b_B.to(device)
    subject = model_checks.Subject(flat, x_P, b_B, objective)
    for name, samples_of in (("data", train), ("test", held_out)):
        if samples_of is not None:
            model_checks.model_fits(name, subject, *samples_of, classes=loss is None)
    chosen = max(parts, key=len)[:FEW].to(device)
    few = plain(train[0][chosen]), plain(train[1][chosen])
    model_checks.model_trains(subject, *few, augment, seed)
    sizes = dict(zip(shape.names[-1], samples, strict=True))
    model_checks.batches_of_one(subject, *few, batch, sampling, sizes)

    here, first = shape, 0
    if ranks.count > 1:
        work_N = leaf_work(samples, batch, sampling) * expected(shares, shape)
        cuts = deal(shape, work_N, schedule.meetings, ranks.count)
        here, first = Branch.of_rank(shape, cuts, ranks), int(cuts[ranks.rank])
    federation = Federation(here, edge_rules, x_P, b_B, shares, seed, update_limit, update_factor)
    placed_parts = [part.to(device) for part in parts[first : first + here.leaves]]
    training = Training(flat, objective, *train, placed_parts, chain, batch, sampling, seed, augment, first)
    if diagnose == "drift":
        federation.drift = Drift(here)
    elif diagnose == "ideal":
        whole_data = LoopEngine(replace(training, batch=None, augment=None))
        federation.drift = Drift(here, lambda level, x_MP: whole_data.gradients(federation.looking(level, x_MP)))
    default: Name = "loop" if x_P.device.type == "cpu" else "stacked"
    name = default if engine is None else engine
    if name == "auto" and ranks.count > 1 and device.type == "cpu":
        raise InvalidInput("engine", name, "each rank would measure for itself: name one where there are several")
    if name != "loop":
        checks.drawn(schedule, float(expected(shares, shape).sum()), max(samples), batch)
    trainer = make_engine(name, training, precision=precision)
    known = habits(flat, objective, x_P, b_B, *few)
    if FROZEN in known.writes:
        told = "writes to parameters that are not trained, which clients share: make buffers of them, which each has"
        raise InvalidInput("model", subject.kind, told)
    notes = differences(trainer, name, precision) + peculiarities(known)
    if ranks.is_first:
        print("".join(f"stratafl: {note}\n" for note in notes), end="", file=sys.stderr)
    evaluation = rounds, evaluate_every, evaluate_levels, stop_at
    return Simulation(federation, trainer, flat, schedule, objective, held_out, *evaluation, ranks, notes)
