"""The operations that a module executes on a batch, recorded without computing anything.

They are seen above autograd, where a linear layer, a convolution, attention or an LSTM is one
operation each; whatever Python did on the way, arithmetic on shapes among it, has left nothing but
numbers. So a recording holds for one length of a batch.

Each value is stacked, with a row for every client, or shared: what is made of frozen weights and
numbers alone is the same for all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call

from stratafl.core.flat_module import FlatModule, copy_module
from stratafl.core.losses import find_scores, output_tensors
from stratafl.core.losses import map_outputs as replaced_in
from stratafl.data.inputs import Inputs, NamedInputs, call_arguments, tensors_of
from stratafl.engine.compiler.capture import (
    DATA_DEPENDENT,
    OpaqueFunction,
    UnsupportedModule,
    opaque_autograd_functions,
    trace_fx,
)
from stratafl.engine.module_profile import written
from stratafl.engine.random_streams import RANDOM_OP_HANDLERS

RANDOM_OPS = {
    *RANDOM_OP_HANDLERS, "dropout", "dropout_", "feature_dropout", "feature_dropout_", "alpha_dropout",
    "alpha_dropout_", "feature_alpha_dropout", "feature_alpha_dropout_", "rrelu", "rrelu_",
}  # fmt: skip
"""Operations that draw, of which clients have values of their own."""
GRADIENT_ONLY_OPS = {"detach_"}
"""What changes where gradients go, and no value."""
UNDECLARED_MUTATIONS = {"batch_norm", "instance_norm", "native_batch_norm"}
"""What writes its statistics though its schema does not say so."""

EMPTY = torch.empty(0)


class CapturedGraph(NamedTuple):
    """What a module does with a batch of one length."""

    nodes: list[fx.Node]
    """What is to be done, in its order."""
    given: dict[fx.Node, str]
    """The nodes that stand for parameters and buffers, with their names."""
    inputs: dict[fx.Node, str]
    """The nodes that stand for inputs, with their names."""
    constants: dict[fx.Node, Tensor]
    outputs: list[fx.Node]
    """What the loss is given, in the order in which it stands in the module's output."""
    form: Any
    """The module's output, with tensors without values in it."""
    replaced: dict[str, fx.Node]
    """Buffers that the module puts another tensor in the place of, with what it puts there."""
    written: set[str]
    """Buffers that change."""
    writes_inputs: bool
    """Whether inputs may change."""
    stacked: set[fx.Node]
    """Nodes whose values have a row for every client."""
    fixed: set[fx.Node]
    """Nodes whose values are the same in every step: what is made of numbers and constants
    alone."""

    @property
    def largest(self) -> int:
        """Bytes of the largest value that a client has."""
        values = [node.meta.get("val") for node in self.nodes if node in self.stacked]
        return max((value.nbytes for value in values if isinstance(value, Tensor)), default=0)

    @property
    def signature(self) -> list[str]:
        """Which operations there are."""
        return [str(node.target) for node in self.nodes]


def capture(flat: FlatModule, inputs: Inputs, whole: bool = False, apart: bool = False) -> CapturedGraph:
    """`inputs`: a batch of one client, of which the shape and type matter; `whole`: all that the
    module returns, not only the scores in it; `apart`: functions whose gradient is their own are
    one operation each, and there must be one."""
    flat.train()
    # a copy: a module may keep what it computed, which holds no values here
    module = copy_module(flat.module, shared=flat.module.parameters())
    own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    names, kinds = list(own), list(tensors_of(inputs))
    told: dict[str, Any] = {}

    def call(*given: Tensor) -> Any:
        values = dict(zip(names, given, strict=False))
        before = dict(values)
        samples = dict(zip(kinds, given[len(names) :], strict=True))
        positional, keywords = call_arguments(samples[""] if kinds == [""] else NamedInputs(samples))
        outputs = functional_call(module, values, positional, keywords)
        if not whole:
            outputs = find_scores(outputs)
            if outputs is None:
                raise UnsupportedModule("an output that holds no scores")
        form = replaced_in(outputs, lambda _: EMPTY)
        other = {name: value for name, value in values.items() if value is not before[name]}
        told.update(form=form, replaced=list(other))
        return output_tensors(outputs), list(other.values())

    trained = set(flat.names)
    values = [value.detach().requires_grad_(name in trained) for name, value in own.items()]
    with opaque_autograd_functions() if apart else nullcontext():
        graph = trace_fx(call, [*values, *tensors_of(inputs).values()])
    if apart and not any(isinstance(node.target, OpaqueFunction) for node in graph.graph.nodes):
        raise UnsupportedModule("no function with a gradient of its own")
    if any(not isinstance(size, int) for node in graph.graph.nodes for size in _sizes(node.meta.get("val"))):
        raise UnsupportedModule(DATA_DEPENDENT)
    places = [node for node in graph.graph.nodes if node.op == "placeholder"]
    output = next(node for node in graph.graph.nodes if node.op == "output")
    outputs, replacing = output.args[0]
    given = dict(zip(places, names, strict=False))
    constants = {node: _constant(graph, node) for node in graph.graph.nodes if node.op == "get_attr"}
    replaced = dict(zip(told["replaced"], replacing, strict=True))
    rows = set(flat.names) | set(flat.unflatten_buffers(torch.empty(flat.buffers, device="meta")))
    known = _Flow(graph.graph, given, rows, set(constants), set(replaced))
    known.check()
    inner = dict(zip(places[len(names) :], kinds, strict=True))
    stacked = known.stacked()
    if not stacked.intersection(outputs):
        raise UnsupportedModule("an output that does not depend on the input")
    return CapturedGraph(
        known.needed([*outputs, *replacing]), given, inner, constants, outputs, told["form"], replaced,
        known.written | set(replaced), known.writes_to(inner), stacked, known.fixed(stacked),
    )  # fmt: skip


def _sizes(value: Any) -> list[Any]:
    if isinstance(value, Tensor):
        return list(value.shape)
    return [size for each in value for size in _sizes(each)] if isinstance(value, tuple | list) else []


def _constant(graph: nn.Module, node: fx.Node) -> Tensor:
    value = getattr(graph, str(node.target))
    if not isinstance(value, Tensor):
        raise UnsupportedModule(f"attribute {node.target}")
    return value


def op_name(node: fx.Node) -> Any:
    """The name of a node's operation, whatever its overload; a user's own is no namesake of the
    library's."""
    target: Any = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return target
    return target._opname if target._namespace == "aten" else str(target)


def mutated_arguments(node: fx.Node) -> Iterator[fx.Node]:
    """The nodes into whose memory an operation writes."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return
    if op_name(node) in UNDECLARED_MUTATIONS:
        yield from (each for each in node.args[3:5] if isinstance(each, fx.Node) and node.args[5])
    if op_name(node) not in GRADIENT_ONLY_OPS:
        yield from (each for each in written(node.target, node.args, node.kwargs) if isinstance(each, fx.Node))


class _Flow:
    """What flows where in a recording."""

    def __init__(
        self, graph: fx.Graph, given: Mapping[fx.Node, str], rows: set[str], constants: set[fx.Node], replaced: set[str]
    ):
        """rows: the names of what every client has values of its own of."""
        self._nodes, self._given, self._rows, self._constants = list(graph.nodes), given, rows, constants
        self._memory = {node: storage_id(node) for node in self._nodes}
        self._sharing: dict[int, list[fx.Node]] = defaultdict(list)
        """The nodes whose values lie in one piece of memory."""
        for node, memory in self._memory.items():
            if memory is not None:
                self._sharing[memory].append(node)
        self._targets = {node: list(mutated_arguments(node)) for node in self._nodes}
        self.written: set[str] = set()
        self._counting: set[fx.Node] = set()
        """Nodes that have to do with nothing but a counter."""

    def check(self) -> None:
        """Refuse what writes to what all clients share, but for counters that nobody looks at."""
        for targets in self._targets.values():
            for target in targets:
                group = self._sharing[self._memory[target] or 0] or [target]
                if any(each in self._constants for each in group):
                    raise UnsupportedModule("a tensor that the module keeps between calls")
                for each in group:
                    name = self._given.get(each)
                    if name is None:
                        continue
                    if name in self._rows:
                        self.written.add(name)
                    elif self._memory[each] is not None and all(user in group for one in group for user in one.users):
                        self._counting |= set(group)
                    else:
                        raise UnsupportedModule(f"{name}, which training changes and which is in no row")

    def stacked(self) -> set[fx.Node]:
        """The nodes whose values have a row for every client: what depends on inputs, rows or
        draws, and all that lies in memory into which such a value is written."""
        found = {node for node in self._nodes if node.op == "placeholder" and self._own(node)}
        while True:
            before = len(found)
            for node in self._nodes:
                if node not in found and (
                    op_name(node) in RANDOM_OPS or any(each in found for each in node.all_input_nodes)
                ):
                    found.add(node)
                for target in self._targets[node] if node in found else []:
                    found |= set(self._sharing[self._memory[target] or 0] or [target])
            if len(found) == before:
                break
        if any(node.op == "get_attr" or (node.op == "placeholder" and not self._own(node)) for node in found):
            raise UnsupportedModule("a client's values written to what all clients share")
        return found

    def writes_to(self, nodes: Collection[fx.Node]) -> bool:
        """Whether anything is written to the memory of these, or something unknown is called."""
        memory = {self._memory[node] for node in nodes}
        targets = [target for targets in self._targets.values() for target in targets]
        unknown = any(isinstance(node.target, OpaqueFunction) for node in self._nodes)
        return unknown or any(self._memory[target] in memory for target in targets)

    def fixed(self, stacked: set[fx.Node]) -> set[fx.Node]:
        """The nodes that are made of numbers and constants alone, and whose memory nothing is
        written to."""
        written = {self._memory[target] for targets in self._targets.values() for target in targets} - {None}
        found = set(self._constants)
        for node in self._nodes:
            is_made = node.op == "call_function" and node.target not in GRAD_MODE_OPS and node not in stacked
            if is_made and self._memory[node] not in written and found.issuperset(node.all_input_nodes):
                found.add(node)
        return found

    def _own(self, node: fx.Node) -> bool:
        return node not in self._given or self._given[node] in self._rows

    def needed(self, wanted: list[fx.Node]) -> list[fx.Node]:
        """What leads to these, writes or draws, in its order."""
        found = set(wanted)
        for node in reversed(self._nodes):
            if node.op != "call_function" or node in self._counting:
                continue
            # gradients switched on or off, too
            effect = (
                self._targets[node]
                or op_name(node) in (RANDOM_OPS | RANDOM_IF_DROPOUT | GRADIENT_ONLY_OPS)
                or node.target in GRAD_MODE_OPS
            )
            if node in found or effect:
                found |= {node, *node.all_input_nodes}
        return [node for node in self._nodes if node in found and node.op == "call_function"]


GRAD_MODE_OPS = (torch._C._set_grad_enabled,)
RANDOM_IF_DROPOUT = {"scaled_dot_product_attention", "lstm", "gru", "rnn_tanh", "rnn_relu"}
"""Operations that draw where they are told of a share to leave out."""


def storage_id(node: fx.Node) -> int | None:
    """In which piece of memory a node's value lies."""
    value = node.meta.get("val")
    return value.untyped_storage()._cdata if isinstance(value, Tensor) else None
