"""Captured graph: the operations of a module on a batch, and which of its values differ by client.

Operations are captured above autograd, where a linear layer, a convolution, attention or an LSTM is
one operation each. Whatever Python did in between, such as arithmetic on shapes, has left only
numbers, so a graph is valid for one batch length.

A value is per client, with the client dimension in front when the graph runs, or shared, if it
depends on frozen weights and constants alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call
from torch.utils import _pytree as pytree

from stratafl.core.flat_module import FlatModule, copy_module
from stratafl.core.losses import find_scores, map_outputs, output_tensors
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
"""Random operations, whose results differ by client."""
RANDOM_IF_DROPOUT = {"scaled_dot_product_attention", "lstm", "gru", "rnn_tanh", "rnn_relu"}
"""Operations that are random if their dropout probability is not zero."""
GRADIENT_ONLY_OPS = {"detach_"}
"""Operations in place that change where gradients flow, but no value."""
GRAD_MODE_OPS = (torch._C._set_grad_enabled,)
UNDECLARED_MUTATIONS = {"batch_norm", "instance_norm", "native_batch_norm"}
"""Operations that update statistics in place without a declaration in their schema."""

EMPTY = torch.empty(0)


class CapturedGraph(NamedTuple):
    """Operations of a module on batches of one length."""

    nodes: list[fx.Node]
    """Operations to execute, in order."""
    parameters: dict[fx.Node, str]
    """Placeholders of parameters and buffers, with their names."""
    inputs: dict[fx.Node, str]
    """Placeholders of the module's inputs, with their names."""
    constants: dict[fx.Node, Tensor]
    """Tensors that the module created outside the graph."""
    outputs: list[fx.Node]
    """Tensors of the module's output, in the order of `output_tensors`."""
    output_structure: Any
    """The module's output with empty tensors."""
    replaced_buffers: dict[str, fx.Node]
    """Buffers that the module replaces by another tensor, with that tensor."""
    mutated_buffers: set[str]
    """Buffers whose values change, in place or by replacement."""
    mutates_inputs: bool
    """Whether inputs may be changed in place."""
    per_client: set[fx.Node]
    """Nodes whose values differ by client."""
    fixed: set[fx.Node]
    """Nodes computed from constants alone, whose values are the same in every step."""

    @property
    def max_value_bytes(self) -> int:
        """Bytes of one client's largest value."""
        values = [node.meta.get("val") for node in self.nodes if node in self.per_client]
        sizes = [value.nbytes for value in values if isinstance(value, Tensor)]
        # four gates for each output of an LSTM, which the operation keeps to itself
        sizes += [4 * node.meta["val"][0].nbytes for node in self.nodes if op_name(node) == "lstm"]
        return max(sizes, default=0)

    @property
    def op_names(self) -> list[str]:
        """Operations in order, with their overloads."""
        return [str(node.target) for node in self.nodes]


def capture(
    flat: FlatModule, inputs: Inputs, all_outputs: bool = False, opaque_functions: bool = False
) -> CapturedGraph:
    """Capture a module; raises `UnsupportedModule` if the graph cannot run for many clients.

    `inputs`: a batch of one client, of which only shapes and dtypes matter; `all_outputs`: keep the
    module's whole output instead of its scores; `opaque_functions`: keep a user's autograd
    functions as one operation each; raises if there are none.
    """
    flat.train()
    # a copy: a module may store tensors that it computes, which have no values here
    module = copy_module(flat.module, shared=flat.module.parameters())
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    names, fields = list(state), list(tensors_of(inputs))
    output_structure: Any = None
    replaced: dict[str, Any] = {}

    def forward(*args: Tensor) -> Any:
        nonlocal output_structure, replaced
        values = dict(zip(names, args, strict=False))
        before = dict(values)
        samples = dict(zip(fields, args[len(names) :], strict=True))
        positional, keywords = call_arguments(samples[""] if fields == [""] else NamedInputs(samples))
        outputs = functional_call(module, values, positional, keywords)
        if not all_outputs:
            outputs = find_scores(outputs)
            if outputs is None:
                raise UnsupportedModule("an output that holds no scores")
        output_structure = map_outputs(outputs, lambda _: EMPTY)
        replaced = {name: value for name, value in values.items() if value is not before[name]}
        return output_tensors(outputs), list(replaced.values())

    state_values = [value.detach().requires_grad_(name in flat.names) for name, value in state.items()]
    with opaque_autograd_functions() if opaque_functions else nullcontext():
        traced = trace_fx(forward, [*state_values, *tensors_of(inputs).values()])
    nodes = list(traced.graph.nodes)
    if opaque_functions and not any(isinstance(node.target, OpaqueFunction) for node in nodes):
        raise UnsupportedModule("no function with a gradient of its own")
    values = [value for node in nodes for value in pytree.tree_leaves(node.meta.get("val"))]
    if any(not isinstance(size, int) for value in values if isinstance(value, Tensor) for size in value.shape):
        raise UnsupportedModule(DATA_DEPENDENT)
    placeholders = [node for node in nodes if node.op == "placeholder"]
    outputs, replacements = nodes[-1].args[0]
    parameters = dict(zip(placeholders, names, strict=False))
    input_nodes = dict(zip(placeholders[len(names) :], fields, strict=True))
    constants = {node: _constant(traced, node) for node in nodes if node.op == "get_attr"}
    rows = set(flat.names) | set(flat.unflatten_buffers(torch.empty(flat.buffers, device="meta")))
    flow = _Dataflow(nodes, parameters, rows, constants)
    mutated = flow.check_shared_mutations()
    per_client = flow.per_client_nodes()
    if not per_client.intersection(outputs):
        raise UnsupportedModule("an output that does not depend on the input")
    return CapturedGraph(
        nodes=flow.live_nodes([*outputs, *replacements]), parameters=parameters, inputs=input_nodes,
        constants=constants, outputs=outputs, output_structure=output_structure,
        replaced_buffers=dict(zip(replaced, replacements, strict=True)), mutated_buffers=mutated | set(replaced),
        mutates_inputs=flow.mutates(input_nodes), per_client=per_client, fixed=flow.fixed_nodes(per_client),
    )  # fmt: skip


def _constant(module: nn.Module, node: fx.Node) -> Tensor:
    value = getattr(module, str(node.target))
    if not isinstance(value, Tensor):
        raise UnsupportedModule(f"attribute {node.target}")
    return value


def op_name(node: fx.Node) -> Any:
    """Name of a node's operation without its overload; custom operations keep their namespace."""
    target: Any = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return target
    return target._opname if target._namespace == "aten" else str(target)


def bind_arguments(op: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """Arguments of an ATen operation by name, with defaults."""
    schema = op._schema.arguments
    defaults = {argument.name: argument.default_value for argument in schema if argument.has_default_value()}
    return defaults | dict(zip((argument.name for argument in schema), args, strict=False)) | kwargs


def node_arguments(node: fx.Node) -> dict[str, Any]:
    """Arguments of a node by name, with defaults."""
    return bind_arguments(node.target, node.args, node.kwargs)


def mutated_arguments(node: fx.Node) -> Iterator[fx.Node]:
    """Nodes to whose memory an operation writes."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return
    targets: list[Any] = []
    # arguments 3 and 4 are the running mean and variance, 5 says whether they are updated
    if op_name(node) in UNDECLARED_MUTATIONS and node.args[5]:
        targets += node.args[3:5]
    if op_name(node) not in GRADIENT_ONLY_OPS:
        targets += written(node.target, node.args, node.kwargs)
    yield from (target for target in targets if isinstance(target, fx.Node))


def storage_id(node: fx.Node) -> int | None:
    """Identity of the memory in which a node's value is stored; views share it."""
    value = node.meta.get("val")
    return value.untyped_storage()._cdata if isinstance(value, Tensor) else None


class _Dataflow:
    """Analysis of a traced graph: which values depend on the client, and where memory is shared."""

    def __init__(
        self, nodes: list[fx.Node], parameters: Mapping[fx.Node, str], rows: set[str], constants: Collection[fx.Node]
    ):
        """`rows`: names of the parameters and buffers that every client has own values of."""
        self._nodes, self._parameters, self._rows, self._constants = nodes, parameters, rows, set(constants)
        self._memory = {node: storage_id(node) for node in nodes}
        self._by_memory: dict[int | None, list[fx.Node]] = defaultdict(list)
        for node, memory in self._memory.items():
            self._by_memory[memory].append(node)
        self._targets = {node: list(mutated_arguments(node)) for node in nodes}
        self._mutated = [target for targets in self._targets.values() for target in targets]
        self._counters: set[fx.Node] = set()
        """Nodes of shared buffers that training changes and no other operation reads, such as
        `num_batches_tracked`."""

    def _aliases(self, node: fx.Node) -> list[fx.Node]:
        """Nodes that share memory with a node, and itself."""
        memory = self._memory[node]
        return [node] if memory is None else self._by_memory[memory]

    def check_shared_mutations(self) -> set[str]:
        """Names of the clients' buffers that change; raises if a shared value does, unless it is a
        counter that nothing else uses."""
        buffers: set[str] = set()
        for target in self._mutated:
            aliases = self._aliases(target)
            if not self._constants.isdisjoint(aliases):
                raise UnsupportedModule("a tensor that the module keeps between calls")
            for alias in aliases:
                name = self._parameters.get(alias)
                if name is None:
                    continue
                if name in self._rows:
                    buffers.add(name)
                elif self._memory[alias] is not None and all(
                    user in aliases for node in aliases for user in node.users
                ):
                    self._counters |= set(aliases)
                else:
                    raise UnsupportedModule(f"{name}, which training changes and which is in no row")
        return buffers

    def per_client_nodes(self) -> set[fx.Node]:
        """Nodes that depend on inputs, clients' parameters or random numbers, and all nodes in
        memory to which such a value is written."""
        per_client = {node for node in self._nodes if node.op == "placeholder" and not self._is_shared(node)}
        size = 0
        while len(per_client) > size:
            size = len(per_client)
            for node in self._nodes:
                if op_name(node) in RANDOM_OPS or not per_client.isdisjoint(node.all_input_nodes):
                    per_client.add(node)
                if node in per_client:
                    per_client.update(alias for target in self._targets[node] for alias in self._aliases(target))
        if any(node.op == "get_attr" or self._is_shared(node) for node in per_client):
            raise UnsupportedModule("a client's values written to what all clients share")
        return per_client

    def _is_shared(self, node: fx.Node) -> bool:
        """Whether a node is a parameter or buffer that all clients share."""
        return node in self._parameters and self._parameters[node] not in self._rows

    def mutates(self, nodes: Collection[fx.Node]) -> bool:
        """Whether an operation may write to the memory of these nodes."""
        memory = {self._memory[node] for node in nodes}
        has_opaque = any(isinstance(node.target, OpaqueFunction) for node in self._nodes)
        return has_opaque or any(self._memory[target] in memory for target in self._mutated)

    def fixed_nodes(self, per_client: set[fx.Node]) -> set[fx.Node]:
        """Nodes that depend on constants alone, and to whose memory nothing is written."""
        mutated = {self._memory[target] for target in self._mutated} - {None}
        fixed = set(self._constants)
        for node in self._nodes:
            is_op = node.op == "call_function" and node.target not in GRAD_MODE_OPS and node not in per_client
            if is_op and self._memory[node] not in mutated and fixed.issuperset(node.all_input_nodes):
                fixed.add(node)
        return fixed

    def live_nodes(self, results: list[fx.Node]) -> list[fx.Node]:
        """Operations on which the results depend, or which mutate values, draw random numbers or
        switch gradients on and off."""
        effects = RANDOM_OPS | RANDOM_IF_DROPOUT | GRADIENT_ONLY_OPS
        live = set(results)
        for node in reversed(self._nodes):
            if node.op != "call_function" or node in self._counters:
                continue
            has_effect = self._targets[node] or op_name(node) in effects or node.target in GRAD_MODE_OPS
            if node in live or has_effect:
                live |= {node, *node.all_input_nodes}
        return [node for node in self._nodes if node in live and node.op == "call_function"]
