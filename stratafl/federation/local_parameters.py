"""What stays with the clients: parameters and buffers that each of them keeps to itself, such as
its batch norms (FedBN) or its head.

A federation knows nothing of them: its rows are what is shared, so that rules, meetings,
corrections and bytes are of that alone. Here is the seam to an engine, which trains whole modules:
a work is given the columns that the clients kept, and what was trained leaves them here again. They
are kept with the states of the leaves' optimiser, so that they count once a client's report does,
and are stored and dealt out with them.

Shape suffixes: N nodes, A leaves that take part, P parameters or buffer values of the whole, S
those that are shared, K those that stay, M rows that several leaves share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from stratafl.base.errors import InvalidInput
from stratafl.base.topology import Tree
from stratafl.base.validation import is_within, matching
from stratafl.core.client_training import Engine, LocalRule, TrainRequest, TrainResult
from stratafl.core.client_update import Leaf
from stratafl.core.flat_module import FlatModule
from stratafl.core.optimizer import Optimiser
from stratafl.core.rows import IndexedRows
from stratafl.core.rule import Edge, Proximal, Rows, Rule

BATCH_NORM = "batch_norm"
FIELD = "keep_at_home"
MODEL, BUFFERS, OPTIMISER = "home.model", "home.buffers", "home.optimiser."
"""What the rows are called that stay."""

Local = Callable[[Tensor, Tensor, Edge], Tensor]


class Columns(NamedTuple):
    """Which columns of rows are shared, and which stay."""

    shared_S: Tensor
    home_K: Tensor

    @staticmethod
    def of(stays_P: Tensor) -> Columns:
        return Columns(torch.nonzero(~stays_P)[:, 0], torch.nonzero(stays_P)[:, 0])

    @property
    def width(self) -> int:
        return len(self.shared_S) + len(self.home_K)

    @property
    def sent(self) -> int:
        """How many of them are."""
        return len(self.shared_S)

    def shared(self, rows_NP: Tensor) -> Tensor:
        return rows_NP.index_select(-1, self.shared_S)

    def home(self, rows_NP: Tensor) -> Tensor:
        return rows_NP.index_select(-1, self.home_K)

    def joined(self, shared_NS: Tensor, home_NK: Tensor) -> Tensor:
        """Rows of the whole."""
        rows_NP = shared_NS.new_empty(len(shared_NS), self.width)
        return rows_NP.index_copy_(1, self.shared_S, shared_NS).index_copy_(1, self.home_K, home_NK)

    def widened(self, shared_NS: Tensor) -> Tensor:
        """Rows of the whole, zero where columns stay."""
        return shared_NS.new_zeros(len(shared_NS), self.width).index_copy_(1, self.shared_S, shared_NS)


class LocalParameters:
    """The columns that stay with the clients of a run; of most runs there are none."""

    def __init__(self, flat: FlatModule, names: Sequence[str], leaf: Leaf, device: torch.device):
        """`names`: of the parameters and buffers that stay."""
        stays = torch.zeros(flat.parameters, dtype=torch.bool), torch.zeros(flat.buffers, dtype=torch.bool)
        views = flat.named(*stays)
        for name in names:
            views[name].fill_(True)
        self.parameters, self.buffers = (Columns.of(each.to(device)) for each in stays)
        self.is_empty = not names
        self._optimiser: Optimiser | None = leaf.optimiser if leaf.keeps else None
        self._locals: dict[int, tuple[Local, Local]] = {}

    def check(self, rules: Sequence[Rule]) -> None:
        """Refuse what only works on whole models."""
        if not len(self.parameters.shared_S):
            raise InvalidInput(FIELD, "everything", "leaves no parameter that clients share")
        for rule in rules:
            if not self.is_empty and isinstance(rule.local, Proximal) and rule.local.after_clip:
                raise InvalidInput(FIELD, "with a pull after the clip", "that pull takes all parameters alike")

    # -- the clients' work -------------------------------------------------------------------------

    def first(self, x_P: Tensor, b_B: Tensor) -> tuple[Tensor, Tensor, Rows]:
        """What is shared of the rows a run begins with, and what each client then keeps, as rows of
        one."""
        if self.is_empty:
            return x_P, b_B, {}
        x_1K = self.parameters.home(x_P)[None]
        kept = {MODEL: x_1K, BUFFERS: self.buffers.home(b_B)[None]}
        if self._optimiser is not None:
            whole = self._optimiser.init(x_P[None])
            kept |= {OPTIMISER + name: self.parameters.home(whole[name]) for name in self._rows_of(whole)}
        return self.parameters.shared(x_P), self.buffers.shared(b_B), kept

    def work(self, work: TrainRequest) -> TrainRequest:
        """A federation's work, of whole modules."""
        if self.is_empty:
            return work
        active, kept = work.active, work.optimiser
        leaves = kept[MODEL].nodes

        def whole(columns: Columns, shared: IndexedRows, name: str) -> IndexedRows:
            return _of_active(columns.joined(shared.some(active), kept[name].some(active)), active, leaves)

        optimiser = {}
        for name, rows in kept.items():
            if OPTIMISER + name in kept:
                optimiser[name] = whole(self.parameters, rows, OPTIMISER + name)
            elif not _stays(name):
                optimiser[name] = rows
        return work._replace(
            x=whole(self.parameters, work.x, MODEL),
            b=whole(self.buffers, work.b, BUFFERS),
            corrections=tuple(
                each._replace(rows_MP=self.parameters.widened(each.rows_MP)) for each in work.corrections
            ),
            pulls=tuple(self._pull(each) for each in work.pulls),
            optimiser=optimiser,
        )

    def trained(self, trained: TrainResult) -> TrainResult:
        """What is shared of what became of the clients; what stays is among what they keep."""
        if self.is_empty:
            return trained
        own = self.parameters
        kept = {MODEL: own.home(trained.x_AP), BUFFERS: self.buffers.home(trained.b_AB)}
        for name, rows in trained.optimiser.items():
            if name in self._rows_of(trained.optimiser):
                kept |= {name: own.shared(rows), OPTIMISER + name: own.home(rows)}
            else:
                kept[name] = rows
        path_AP = own.shared(trained.path_AP) if trained.path_AP.shape[1] else trained.path_AP
        return TrainResult(own.shared(trained.x_AP), self.buffers.shared(trained.b_AB), path_AP, kept)

    def shared(self, g_AP: Tensor) -> Tensor:
        """What is shared of gradients."""
        return g_AP if self.is_empty else self.parameters.shared(g_AP)

    def _rows_of(self, states: Rows) -> list[str]:
        """The states of an optimiser that have a number for every parameter; others count steps."""
        return [name for name, rows in states.items() if rows.shape[1] == self.parameters.width]

    def _pull(self, pull: LocalRule) -> LocalRule:
        """A rule's own direction, of what is shared alone. A captured step knows it by the same
        function."""
        local, own = pull.local, self.parameters
        if id(local) not in self._locals:

            def mine(x_NP: Tensor, g_NP: Tensor, edge: Edge) -> Tensor:
                return g_NP.index_copy(1, own.shared_S, local(own.shared(x_NP), own.shared(g_NP), edge))

            self._locals[id(local)] = local, mine
        return pull._replace(local=self._locals[id(local)][1])

    # -- whole models ------------------------------------------------------------------------------

    def whole(self, tree: Tree, level: int, model_NS: Tensor, b_NS: Tensor, kept: Rows) -> tuple[Tensor, Tensor]:
        """Rows of the nodes of a level with what stays: a client's own, or the mean of all clients
        below a node, which is made only to look at its model and is given to nobody. Where the tree
        lies in several parts, all of them must call it."""
        if self.is_empty:
            return model_NS, b_NS
        x_NK, b_NK = kept[MODEL], kept[BUFFERS]
        for below in range(tree.depth, level, -1):
            x_NK, b_NK = tree.mean(below, x_NK), tree.mean(below, b_NK)
        return self.parameters.joined(model_NS, x_NK), self.buffers.joined(b_NS, b_NK)

    def as_at_first(self, x_S: Tensor, b_S: Tensor, first: Rows) -> tuple[Tensor, Tensor]:
        """A model with what each client kept at first: all that a client which comes new has, and
        all that is known of what stays where no client tells."""
        if self.is_empty:
            return x_S, b_S
        x_1P = self.parameters.joined(x_S[None], first[MODEL])
        return x_1P[0], self.buffers.joined(b_S[None], first[BUFFERS])[0]

    def corrections(self, correction_NS: Tensor | None) -> Tensor | None:
        """Corrections in the columns of the whole: there are none of what stays."""
        return correction_NS if self.is_empty or correction_NS is None else self.parameters.widened(correction_NS)


class ClientTrainer(NamedTuple):
    """What trains one leaf that is alone with its data."""

    engine: Engine
    home: LocalParameters
    at_home: Rows
    """What of the model stays with it, before the first round."""


def match_local_parameters(flat: FlatModule, given: object) -> list[str]:
    """The parameters and buffers that are to stay: those of all batch norms, or those in parts, or
    of names, that match patterns."""
    if given is None:
        return []
    module = flat.module
    own = list(flat.named(torch.empty(flat.parameters), torch.empty(flat.buffers)))
    parts = [name for name, _ in module.named_modules() if name]
    patterns = [given] if isinstance(given, str) else given
    if not isinstance(patterns, Sequence) or not all(isinstance(each, str) for each in patterns):
        raise InvalidInput(FIELD, given, f'must be "{BATCH_NORM}", or a list of names of parts or parameters')
    wholes: list[str] = []
    if BATCH_NORM in patterns:
        wholes = [name for name, part in module.named_modules() if isinstance(part, _BatchNorm)]
        if not wholes:
            raise InvalidInput(FIELD, given, f"{_kind(module)} has no batch norm")
    wholes += matching(FIELD, [each for each in patterns if each != BATCH_NORM], [*parts, *own], (BATCH_NORM,))
    found = [name for name in own if is_within(name, wholes) or "" in wholes]
    if not found:
        raise InvalidInput(FIELD, given, f"names nothing of {_kind(module)} that is trained or changes")
    return found


def _kind(module: nn.Module) -> str:
    return type(module).__name__


def _stays(name: str) -> bool:
    return name in (MODEL, BUFFERS) or name.startswith(OPTIMISER)


def _of_active(rows_AP: Tensor, active: list[int], leaves: int) -> IndexedRows:
    """The rows of those that take part, as those of all leaves."""
    if len(active) == leaves:
        return IndexedRows(rows_AP)
    of_N = np.zeros(leaves, dtype=np.int64)
    of_N[active] = np.arange(len(active))
    return IndexedRows(rows_AP, of_N)
