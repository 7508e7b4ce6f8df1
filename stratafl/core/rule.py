"""The rule contract: what a child and its parent compute when they synchronise, one rule per edge
level of the tree.

A rule is a tuple of pure functions over rows (N x P, one row per node), state in and state out.
Called with all rows of a level (a simulation) or with one row (a real client), it is the same rule.
A new method is a difference from `average()`:

    fedprox = average()._replace(local=lambda x, g, edge: g + mu * (x - edge.model))

One synchronisation of edge level m, in order:

    clients train             direction = local(x, g + corrections on the path to the root, edge)
    children send             state, message = up(state, x, edge)
    the parent reduces        mean = weighted mean of the messages that arrived and are valid
    the parent merges         memory, model = merge(memory, start, mean, share)
    children take the answer  state = down(state, x, edge)
    if the parent synchronises with its own parent at once, a newer model comes from above:
                              state = relay(state), instead of `down` where the rule has one
    if the rule asks for it   state = from_gradient(state, g, mean_g), both at the new model
    the subtree adds          correction(state, note(memory))

A state that sums to zero over the children of a parent, or a memory that is their mean, does so
under weights. Where these change, before the merge with the new ones:

    the parent                memory, shift = reweigh(memory, moved, gain)
    every child               state = state - shift, present or not

With n_i the old and n_i' the new count of child i, N and N' their sums and d_i = n_i' - n_i, `gain`
is sum_i d_i / N', and `moved` has sum_i (d_i / N') state_i, entry by entry: only the states of
children whose count changed are needed. For counts that add up to one, the weights themselves,
`gain` is 0.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

Rows = dict[str, Tensor]
"""Named matrices with one row per node: a state, a memory, a message or a note."""
Kind = TypeVar("Kind", bound=type)


class LazyRows(Protocol):
    """Rows that siblings share: a parent's model is one row, and most rules need no copy for each
    child."""

    def dense(self) -> Tensor:
        """Each child's own copy."""
        ...

    def drift(self, x: Tensor, rate: Tensor, plus: Tensor | None = None) -> Tensor:
        """(x - each child's copy) / rate, added to `plus` if that is given."""
        ...


class SgdPath(NamedTuple):
    """The point that plain SGD would have reached along the same directions, where models did not
    reach it (see `core.client_update`)."""

    start: Tensor | LazyRows
    """The path's point when the child got its model."""
    end: Tensor
    """The end of the child's own path, as its parent knows it."""
    merged: Tensor | LazyRows | None = None
    """The end of the parent's path, in `down` only, like `Edge.merged`."""


class Edge:
    """Values that a child and its parent both know since their last synchronisation.

    `model` is the model the child got; `correction` what this edge adds to every gradient below it,
    None for nothing; `rate` the sum of the learning rates used since, one per row; `merged`, in
    `down` only, the parent's new model.
    """

    def __init__(
        self,
        model: Tensor | LazyRows,
        correction: Tensor | None,
        rate: Tensor,
        merged: Tensor | LazyRows | None = None,
        path: SgdPath | None = None,
    ):
        self._model, self.correction, self.rate, self._merged, self._path = model, correction, rate, merged, path

    @property
    def model(self) -> Tensor:
        if not isinstance(self._model, Tensor):
            self._model = self._model.dense()
        return self._model

    @property
    def merged(self) -> Tensor:
        assert self._merged is not None, "the parent has not answered yet"
        return self._merged if isinstance(self._merged, Tensor) else self._merged.dense()

    def gradient(self, x: Tensor) -> Tensor:
        """The mean direction of the steps below since the last synchronisation, with corrections:
        (model - x) / rate, or the same of the path; zero where the learning rates add up to 0."""
        start, end = (self.model, x) if self._path is None else (self._path.start, self._path.end)
        return ((start if isinstance(start, Tensor) else start.dense()) - end) / self._divisor

    def drift(self, x: Tensor, plus: Tensor | None = None) -> Tensor:
        """The mean direction of the parent minus that of the child, added to `plus`:
        (x - merged) / rate, or the same of the path; zero where the learning rates add up to 0."""
        end, merged = (x, self._merged) if self._path is None else (self._path.end, self._path.merged)
        if merged is None or isinstance(merged, Tensor):
            return drift(end, self.merged if merged is None else merged, self._divisor, plus)
        return merged.drift(end, self._divisor, plus)

    @property
    def _divisor(self) -> Tensor:
        """The rate; infinite where it is 0, so that a model without steps has gradient zero."""
        return torch.where(self.rate == 0, torch.inf, self.rate)

    def among(self, rows: int) -> Edge:
        """The edge of the first children alone."""
        return Edge(self.model[:rows], None if self.correction is None else self.correction[:rows], self.rate[:rows])

    def tensors(self) -> list[Tensor]:
        """Model, rate, and the correction if there is one."""
        return [part for part in (self.model, self.correction, self.rate) if part is not None]


def drift(x: Tensor, model: Tensor, rate: Tensor, plus: Tensor | None = None) -> Tensor:
    """(x - model) / rate, added to `plus` if that is given."""
    return (x - model) / rate if plus is None else torch.addcdiv(plus, x - model, rate)


def documented(kind: Kind) -> Kind:
    """Give the fields of a named tuple the docstrings that stand below them in its source, instead
    of "Alias for field number 6"; without the source they stay as they are."""
    try:
        (defined,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    except OSError:
        return kind
    assert isinstance(defined, ast.ClassDef)
    for field, below in zip(defined.body, defined.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(below, ast.Expr):
            value = below.value
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                getattr(kind, field.target.id).__doc__ = inspect.cleandoc(value.value)
    return kind


@documented
class Rule(NamedTuple):
    """The functions of one edge level. Those that may be None then do nothing and cost nothing."""

    init: Callable[[Tensor], Rows]
    """init(x) -> state: a child's first state, from the model of the first round in which it takes
    part."""
    up: Callable[[Rows, Tensor, Edge], tuple[Rows, Rows]]
    """up(state, x, edge) -> (state, message): the child's new state and the message it sends; the
    message has at least the entry "model"."""
    open: Callable[[Tensor], Rows]
    """open(x) -> memory: the parent's first memory, from the model of the first round in which it
    takes part."""
    merge: Callable[[Rows, Tensor, Rows, Tensor], tuple[Rows, Tensor]]
    """merge(memory, start, mean, share) -> (memory, model): the parent's new memory and model, from
    its model at the start, the mean message of the children that came, and the share of the
    children's weight that came."""
    note: Callable[[Rows], Rows]
    """note(memory) -> rows: what the parent sends beside its model."""
    correction: Callable[[Rows, Rows], Tensor | None]
    """correction(state, note) -> rows, or None for nothing: what the child's subtree adds to its
    gradients, from the child's state and the parent's note."""
    local: Callable[[Tensor, Tensor, Edge], Tensor] | None = None
    """local(x, g, edge) -> direction: the direction of a leaf's step, from its model and its
    direction so far, which is the gradient with all corrections added, and what the `local` of the
    edge levels above made of it. It is called where the leaf's chain has its stage `corrections`,
    before any clip of the usual chain, and once for each edge level whose rule has a `local`."""
    down: Callable[[Rows, Tensor, Edge], Rows] | None = None
    """down(state, x, edge) -> state: the child's state after it saw the parent's new model,
    `edge.merged`. Here `edge.rate` is the siblings' mean."""
    relay: Callable[[Rows], Rows] | None = None
    """relay(state) -> state: the child's state when a newer model came from above its parent."""
    from_gradient: Callable[[Rows, Tensor, Tensor], Rows] | None = None
    """from_gradient(state, g, mean_g) -> state: the child's state from its own gradient and the
    siblings' mean at a model that came from above."""
    reduce: Callable[[Tensor, Tensor], Tensor] | None = None
    """reduce(rows, weights) -> row: one parent's reducer, from K x P rows and K weights, instead of
    the weighted mean."""
    reweigh: Callable[[Rows, Rows, Tensor], tuple[Rows, Rows]] | None = None
    """reweigh(memory, moved, gain) -> (memory, shift): what changed weights of the children make of
    the parent's memory, and what is taken from every child's state: see the module. A rule without
    it says that states and memory need nothing then, and nothing of each other: they also stay as
    they are where a deployed child has lost its own, where all others of its family begin anew."""
    measures: bool = False
    """Whether it takes gradients from how far models moved, with `edge.gradient` or `edge.drift`:
    where an optimiser bends the way, nodes then carry what tells (see `core.client_update`)."""
    counts_late: bool = False
    """Whether what it keeps at children bears work that counts meetings later (see
    `federation.state`); a rule that keeps nothing there always does."""


@dataclass(frozen=True)
class Proximal:
    """A `local` that pulls towards the model the parent gave; engines know it and add it up with
    the corrections."""

    strength: float
    after_clip: bool = False
    """Whether its part strength * x is added behind a leaf's clip, as weight decay is, instead of
    before it."""

    def __call__(self, x: Tensor, g: Tensor, edge: Edge) -> Tensor:
        return g + self.strength * (x - edge.model)


def average() -> Rule:
    """Averaging: children send their models, the parent takes the weighted mean."""
    return Rule(
        init=lambda x: {},
        up=lambda state, x, edge: (state, {"model": x}),
        open=lambda x: {},
        merge=lambda memory, start, mean, share: (memory, mean["model"]),
        note=lambda memory: {},
        correction=lambda state, note: None,
    )
