"""The rule contract: computations of a child and its parent at a synchronisation, one rule per edge
level of the tree.

A rule keeps a state at every child and a memory at their parent. It is a tuple of pure functions
over rows (N x P, one row per node): they take a state or memory and return the next one. They are
called with all rows of a level in a simulation, and with a single row at a deployed node. A method
is written as a difference from `average()`:

    fedprox = average()._replace(local=lambda x, g, edge: g + mu * (x - edge.model))

One synchronisation of edge level m, in order:

    clients train             direction = local(x, g + corrections on the path to the root, edge)
    children send             state, message = up(state, x, edge)
    the parent reduces        mean = weighted mean of the messages that arrived and are valid
    the parent merges         memory, model = merge(memory, start, mean, share)
    children get its model    state = down(state, x, edge)
    if the parent synchronises with its own parent at once, a newer model comes from above:
                              state = relay(state), instead of `down`, if the rule has `relay`
    if the rule has it        state = from_gradient(state, g, mean_g), both at the new model
    the subtree adds          correction(state, note(memory))

A state whose weighted sum over the children of a parent is zero, or a memory that is their weighted
mean, has to change when the weights change. Before the merge under new weights:

    the parent                memory, shift = reweigh(memory, moved, gain)
    every child               state = state - shift, also at absent children

With n_i the old and n_i' the new count of child i, N and N' their sums and d_i = n_i' - n_i, `gain`
is sum_i d_i / N', and `moved` is sum_i (d_i / N') state_i for each entry of the state, so that only
the states of children with a changed count are needed. If counts are weights, which add up to one,
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
    """Rows shared by siblings, such as their parent's model, which are copied for each child only
    if a rule needs that."""

    def dense(self) -> Tensor:
        """Matrix with one row per child."""
        ...

    def drift(self, x: Tensor, rate: Tensor, plus: Tensor | None = None) -> Tensor:
        """(x - the child's row) / rate, plus `plus`."""
        ...


class SgdPath(NamedTuple):
    """Point that plain SGD would have reached along the same directions, for clients whose
    optimizer moves the model elsewhere (see `ClientUpdate.is_nonlinear`)."""

    start: Tensor | LazyRows
    """Point at which the child got its model."""
    end: Tensor
    """Point at which the child sent its update, as its parent decoded it."""
    merged: Tensor | LazyRows | None = None
    """Point of the parent after the merge, in `down` only, like `Edge.merged`."""


class Edge:
    """Values that a child and its parent both know since their last synchronisation.

    model: the model that the parent sent.
    correction: added to every gradient below this edge; None for zero.
    rate: sum of the learning rates since then, one per row.
    merged: the parent's new model, in `down` only.
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
        """Mean direction of the steps since the last synchronisation, corrections included:
        (model - x) / rate, or the same of the SGD path; zero where the learning rates add up to
        0."""
        start, end = (self.model, x) if self._path is None else (self._path.start, self._path.end)
        return ((start if isinstance(start, Tensor) else start.dense()) - end) / self._divisor

    def drift(self, x: Tensor, plus: Tensor | None = None) -> Tensor:
        """Mean direction of the siblings minus that of the child, plus `plus`: (x - merged) / rate,
        or the same of the SGD path; zero where the learning rates add up to 0."""
        end, merged = (x, self._merged) if self._path is None else (self._path.end, self._path.merged)
        if merged is None or isinstance(merged, Tensor):
            return drift(end, self.merged if merged is None else merged, self._divisor, plus)
        return merged.drift(end, self._divisor, plus)

    @property
    def _divisor(self) -> Tensor:
        """The rate, or infinity where it is 0, so that a model without steps has gradient zero."""
        return torch.where(self.rate == 0, torch.inf, self.rate)

    def first_rows(self, rows: int) -> Edge:
        """Values of the first children alone, without the SGD path."""
        correction = None if self.correction is None else self.correction[:rows]
        merged = None if self._merged is None else self.merged[:rows]
        return Edge(self.model[:rows], correction, self.rate[:rows], merged)

    def tensors(self) -> dict[str, Tensor]:
        """The values that are there, by name."""
        merged = None if self._merged is None else self.merged
        parts = {"model": self.model, "correction": self.correction, "rate": self.rate, "merged": merged}
        return {name: part for name, part in parts.items() if part is not None}


def drift(x: Tensor, model: Tensor, rate: Tensor, plus: Tensor | None = None) -> Tensor:
    """(x - model) / rate, plus `plus`."""
    return (x - model) / rate if plus is None else torch.addcdiv(plus, x - model, rate)


def documented(kind: Kind) -> Kind:
    """Decorator of a named tuple: copy the strings below its fields in the source into the fields'
    docstrings, which otherwise read "Alias for field number 6". Without source nothing changes."""
    try:
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    except OSError:
        return kind
    assert isinstance(definition, ast.ClassDef)
    for pair in zip(definition.body, definition.body[1:], strict=False):
        match pair:
            case ast.AnnAssign(target=ast.Name(id=field)), ast.Expr(value=ast.Constant(value=str(text))):
                getattr(kind, field).__doc__ = inspect.cleandoc(text)
    return kind


@documented
class Rule(NamedTuple):
    """The functions of one edge level. A function that is None does nothing and costs nothing."""

    init: Callable[[Tensor], Rows]
    """init(x) -> state: the child's first state, from the model that it gets in the first round in
    which it takes part."""
    up: Callable[[Rows, Tensor, Edge], tuple[Rows, Rows]]
    """up(state, x, edge) -> (state, message): the child's new state and the message it sends; the
    message has at least the entry "model"."""
    open: Callable[[Tensor], Rows]
    """open(x) -> memory: the parent's first memory, from the model of the first round in which it
    takes part."""
    merge: Callable[[Rows, Tensor, Rows, Tensor], tuple[Rows, Tensor]]
    """merge(memory, start, mean, share) -> (memory, model): the parent's new memory and model, from
    its model at the start of the round, the mean message of the present children, and the share of
    all children's weight that is present."""
    note: Callable[[Rows], Rows]
    """note(memory) -> rows: sent by the parent beside its model."""
    correction: Callable[[Rows, Rows], Tensor | None]
    """correction(state, note) -> rows: added to the gradients in the child's subtree, from the
    child's state and the parent's note; None for zero."""
    local: Callable[[Tensor, Tensor, Edge], Tensor] | None = None
    """local(x, g, edge) -> direction: the direction of a client's step, from its model and its
    direction so far: the gradient plus all corrections, changed by the `local` of the edge levels
    above. It is called once for each edge level whose rule has a `local`, where the client's chain
    has its transform `corrections`, which is before the clip of the standard chain."""
    down: Callable[[Rows, Tensor, Edge], Rows] | None = None
    """down(state, x, edge) -> state: the child's state after it got the parent's new model,
    `edge.merged`. Here `edge.rate` is the mean over the siblings."""
    relay: Callable[[Rows], Rows] | None = None
    """relay(state) -> state: the child's state after a newer model came from above its parent."""
    from_gradient: Callable[[Rows, Tensor, Tensor], Rows] | None = None
    """from_gradient(state, g, mean_g) -> state: the child's state from its gradient, and the mean
    gradient of its siblings, at a model that came from above its parent."""
    reduce: Callable[[Tensor, Tensor], Tensor] | None = None
    """reduce(rows, weights) -> row: one parent's aggregate of K x P rows with K weights, instead of
    the weighted mean."""
    reweigh: Callable[[Rows, Rows, Tensor], tuple[Rows, Rows]] | None = None
    """reweigh(memory, moved, gain) -> (memory, shift): the parent's memory under new weights of its
    children, and what is subtracted from every child's state (see the module's docstring). In a
    rule without it, states and memory depend neither on weights nor on each other: they also stay
    as they are if a deployed child loses its state, for which other rules reset all siblings."""
    measures: bool = False
    """Whether the rule derives gradients from displacements of models, with `edge.gradient` or
    `edge.drift`; nodes then carry an SGD path if the clients' optimizer needs it (see
    `ClientUpdate.is_nonlinear`)."""
    counts_late: bool = False
    """Whether the children's states stay valid when an update counts in a later synchronisation
    than the one it was made for (see `federation.state`). Not needed by a rule without states."""


@dataclass(frozen=True)
class Proximal:
    """Proximal term, a `local` that adds strength * (x - model), where the model is the one that
    the parent sent. Engines add it together with the corrections."""

    strength: float
    after_clip: bool = False
    """Whether strength * x is added after a client's clip, as weight decay, instead of before."""

    def __call__(self, x: Tensor, g: Tensor, edge: Edge) -> Tensor:
        return g + self.strength * (x - edge.model)


def average() -> Rule:
    """Averaging: children send their models, and the parent takes the weighted mean."""
    return Rule(
        init=lambda x: {},
        up=lambda state, x, edge: (state, {"model": x}),
        open=lambda x: {},
        merge=lambda memory, start, mean, share: (memory, mean["model"]),
        note=lambda memory: {},
        correction=lambda state, note: None,
    )
