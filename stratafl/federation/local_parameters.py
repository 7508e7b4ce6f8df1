"""Parameters and buffers that never leave a client, such as its batch norms (FedBN,
arXiv:2102.07623) or its head (FedPer, arXiv:1912.00818).

A federation's rows are the shared columns alone, so that rules, aggregation, corrections and bytes
are of these. An engine trains whole modules: `ClientTrainer` adds the local columns to a request
and takes them off the result. They are kept with the clients' optimizer states, so that they count
once a client's report is accepted, and are stored and distributed with them.

Shape suffixes: N nodes, A clients that take part, P parameters or buffer values of the whole, S
those that are shared, K those that stay local, M rows that several clients share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from stratafl.base.errors import InvalidInput
from stratafl.base.topology import Topology
from stratafl.base.validation import is_within, matching
from stratafl.core.client_training import Engine, LocalRule, TrainRequest, TrainResult
from stratafl.core.client_update import ClientUpdate
from stratafl.core.flat_module import FlatModule
from stratafl.core.optimizer import Optimizer
from stratafl.core.rows import IndexedRows
from stratafl.core.rule import Edge, Proximal, Rows, Rule

BATCH_NORM = "batch_norm"
FIELD = "model.local_parameters"
MODEL, BUFFERS, OPTIMIZER = "local.model", "local.buffers", "local.optimizer."
"""Names of the local rows among the rows that a client keeps."""

Local = Callable[[Tensor, Tensor, Edge], Tensor]


class SharedLocalSplit(NamedTuple):
    """Indices of the parameters or buffer values that are shared, and of the local ones."""

    shared_S: Tensor
    local_K: Tensor

    @staticmethod
    def from_mask(is_local_P: Tensor) -> SharedLocalSplit:
        return SharedLocalSplit(torch.nonzero(~is_local_P)[:, 0], torch.nonzero(is_local_P)[:, 0])

    @property
    def width(self) -> int:
        """Number of columns of the whole."""
        return len(self.shared_S) + len(self.local_K)

    @property
    def shared_width(self) -> int:
        return len(self.shared_S)

    def shared(self, rows_NP: Tensor) -> Tensor:
        return rows_NP.index_select(-1, self.shared_S)

    def local(self, rows_NP: Tensor) -> Tensor:
        return rows_NP.index_select(-1, self.local_K)

    def join(self, shared_NS: Tensor, local_NK: Tensor) -> Tensor:
        """Rows of the whole from both parts."""
        rows_NP = shared_NS.new_empty(len(shared_NS), self.width)
        return rows_NP.index_copy_(1, self.shared_S, shared_NS).index_copy_(1, self.local_K, local_NK)

    def pad(self, shared_NS: Tensor) -> Tensor:
        """Rows of the whole with zeros in the local columns."""
        return shared_NS.new_zeros(len(shared_NS), self.width).index_copy_(1, self.shared_S, shared_NS)


class LocalParameters:
    """Columns of parameters and buffers that stay with the clients; most runs have none."""

    def __init__(self, flat: FlatModule, names: Sequence[str], client_update: ClientUpdate, device: torch.device):
        """names: parameters and buffers that stay local."""
        is_local = torch.zeros(flat.parameters, dtype=torch.bool), torch.zeros(flat.buffers, dtype=torch.bool)
        views = flat.unflatten(*is_local)
        for name in names:
            views[name].fill_(True)
        self.parameters, self.buffers = (SharedLocalSplit.from_mask(mask.to(device)) for mask in is_local)
        self.is_empty = not names
        self._optimizer: Optimizer | None = client_update.optimizer if client_update.keeps_optimizer_state else None
        self._wrapped: dict[int, tuple[Local, Local]] = {}

    def check(self, rules: Sequence[Rule]) -> None:
        """Raise where nothing is shared, or a rule only works on whole models."""
        if not len(self.parameters.shared_S):
            raise InvalidInput(FIELD, "everything", "leaves no parameter that clients share")
        for rule in rules:
            if not self.is_empty and isinstance(rule.local, Proximal) and rule.local.after_clip:
                raise InvalidInput(FIELD, "with a pull after the clip", "that pull takes all parameters alike")

    # -- training ----------------------------------------------------------------------------------

    def split_initial(self, x_P: Tensor, b_B: Tensor) -> tuple[Tensor, Tensor, Rows]:
        """Split the initial model and buffers into their shared columns, and the rows that each
        client keeps, given once for all clients."""
        if self.is_empty:
            return x_P, b_B, {}
        local = {MODEL: self.parameters.local(x_P)[None], BUFFERS: self.buffers.local(b_B)[None]}
        if self._optimizer is not None:
            state = self._optimizer.init(x_P[None])
            local |= {OPTIMIZER + name: self.parameters.local(state[name]) for name in self._per_parameter(state)}
        return self.parameters.shared(x_P), self.buffers.shared(b_B), local

    def widen_request(self, request: TrainRequest) -> TrainRequest:
        """Add the local columns to a federation's request."""
        clients, client_rows = request.clients, request.client_rows
        count = client_rows[MODEL].nodes

        def joined(split: SharedLocalSplit, shared: IndexedRows, name: str) -> IndexedRows:
            rows_AP = split.join(shared.take(clients), client_rows[name].take(clients))
            return _among_all(rows_AP, clients, count)

        optimizer_state = {}
        for name, rows in client_rows.items():
            if OPTIMIZER + name in client_rows:
                optimizer_state[name] = joined(self.parameters, rows, OPTIMIZER + name)
            elif not _is_local(name):
                optimizer_state[name] = rows
        return replace(
            request,
            model=joined(self.parameters, request.model, MODEL),
            buffers=joined(self.buffers, request.buffers, BUFFERS),
            corrections=tuple(
                correction._replace(rows_MP=self.parameters.pad(correction.rows_MP))
                for correction in request.corrections
            ),
            local_rules=tuple(map(self._widen_local_rule, request.local_rules)),
            client_rows=optimizer_state,
        )

    def split_result(self, result: TrainResult) -> TrainResult:
        """Move the local columns of a training result to the rows that clients keep."""
        parameters, buffers = self.parameters, self.buffers
        client_rows = {MODEL: parameters.local(result.model_AP), BUFFERS: buffers.local(result.buffers_AB)}
        per_parameter = self._per_parameter(result.client_rows)
        for name, rows in result.client_rows.items():
            if name in per_parameter:
                client_rows |= {name: parameters.shared(rows), OPTIMIZER + name: parameters.local(rows)}
            else:
                client_rows[name] = rows
        return TrainResult(
            model_AP=parameters.shared(result.model_AP),
            buffers_AB=buffers.shared(result.buffers_AB),
            path_AP=parameters.shared(result.path_AP) if result.path_AP.shape[1] else result.path_AP,
            client_rows=client_rows,
        )

    def shared(self, rows_NP: Tensor) -> Tensor:
        """The shared columns of models or gradients."""
        return rows_NP if self.is_empty else self.parameters.shared(rows_NP)

    def _per_parameter(self, state: Rows) -> list[str]:
        """Names of the optimizer states with a number for every parameter; others count steps."""
        return [name for name, rows in state.items() if rows.shape[1] == self.parameters.width]

    def _widen_local_rule(self, local_rule: LocalRule) -> LocalRule:
        """Apply a rule's `local` to the shared columns alone, by a function that is always the same
        for the same rule: captured steps are looked up by it."""
        local, parameters = local_rule.local, self.parameters
        if id(local) not in self._wrapped:

            def wrapped(x_NP: Tensor, g_NP: Tensor, edge: Edge) -> Tensor:
                direction_NS = local(parameters.shared(x_NP), parameters.shared(g_NP), edge)
                return g_NP.index_copy(1, parameters.shared_S, direction_NS)

            self._wrapped[id(local)] = local, wrapped
        return local_rule._replace(local=self._wrapped[id(local)][1])

    # -- whole models ------------------------------------------------------------------------------

    def whole_models(
        self, tree: Topology, level: int, model_NS: Tensor, buffers_NS: Tensor, client_rows: Rows
    ) -> tuple[Tensor, Tensor]:
        """Whole models of the nodes of a level: with a client's own local columns, or their mean
        over all clients below a node, which is used for evaluation only.

        Where the tree lies in several parts, all of them must call it.
        """
        if self.is_empty:
            return model_NS, buffers_NS
        model_NK, buffers_NK = client_rows[MODEL], client_rows[BUFFERS]
        for lower in range(tree.depth, level, -1):
            model_NK, buffers_NK = tree.mean(lower, model_NK), tree.mean(lower, buffers_NK)
        return self.parameters.join(model_NS, model_NK), self.buffers.join(buffers_NS, buffers_NK)

    def with_initial_local(self, model_S: Tensor, buffers_S: Tensor, initial: Rows) -> tuple[Tensor, Tensor]:
        """Whole model with the initial local columns: those of a new client, and the only ones that
        are known outside the clients."""
        if self.is_empty:
            return model_S, buffers_S
        model_1P = self.parameters.join(model_S[None], initial[MODEL])
        return model_1P[0], self.buffers.join(buffers_S[None], initial[BUFFERS])[0]

    def pad_corrections(self, correction_NS: Tensor | None) -> Tensor | None:
        """Corrections of whole models, zero in the local columns."""
        return correction_NS if self.is_empty or correction_NS is None else self.parameters.pad(correction_NS)


class ClientTrainer(NamedTuple):
    """Trains clients on a federation's requests: an engine, and the columns that stay local."""

    engine: Engine
    local_parameters: LocalParameters
    initial_local: Rows = {}  # noqa: RUF012 -- never changed
    """Local rows of a client before its first round, where it is trained alone."""

    def train(self, request: TrainRequest) -> TrainResult:
        """Train the clients that take part."""
        local = self.local_parameters
        if local.is_empty:
            return self.engine.train(request)
        return local.split_result(self.engine.train(local.widen_request(request)))

    def gradients(self, request: TrainRequest) -> Tensor:
        """The gradient of each client that takes part, at its first model and first batch."""
        local = self.local_parameters
        if local.is_empty:
            return self.engine.gradients(request)
        return local.shared(self.engine.gradients(local.widen_request(request)))


def match_local_parameters(flat: FlatModule, patterns: object) -> list[str]:
    """Names of the parameters and buffers that stay local.

    patterns: "batch_norm" for those of all batch norms, names or patterns of parts or parameters, a
        list of these, or None.
    """
    if patterns is None:
        return []
    module = flat.module
    names = list(flat.unflatten(torch.empty(flat.parameters), torch.empty(flat.buffers)))
    parts = [name for name, _ in module.named_modules() if name]
    pattern_list = [patterns] if isinstance(patterns, str) else patterns
    if not isinstance(pattern_list, Sequence) or not all(isinstance(pattern, str) for pattern in pattern_list):
        raise InvalidInput(FIELD, patterns, f'must be "{BATCH_NORM}", or a list of names of parts or parameters')
    chosen: list[str] = []
    if BATCH_NORM in pattern_list:
        chosen = [name for name, part in module.named_modules() if isinstance(part, _BatchNorm)]
        if not chosen:
            raise InvalidInput(FIELD, patterns, f"{_kind(module)} has no batch norm")
    others = [pattern for pattern in pattern_list if pattern != BATCH_NORM]
    chosen += matching(FIELD, others, [*parts, *names], (BATCH_NORM,))
    local = [name for name in names if is_within(name, chosen) or "" in chosen]
    if not local:
        raise InvalidInput(FIELD, patterns, f"names nothing of {_kind(module)} that is trained or changes")
    return local


def _kind(module: nn.Module) -> str:
    return type(module).__name__


def _is_local(name: str) -> bool:
    return name in (MODEL, BUFFERS) or name.startswith(OPTIMIZER)


def _among_all(rows_AP: Tensor, clients: list[int], count: int) -> IndexedRows:
    """Rows of the clients that take part, indexed by the numbers of all clients."""
    if len(clients) == count:
        return IndexedRows(rows_AP)
    index_N = np.zeros(count, dtype=np.int64)
    index_N[clients] = np.arange(len(clients))
    return IndexedRows(rows_AP, index_N)
