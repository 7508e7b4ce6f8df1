"""Captured program: run the graph of a module for all clients at once.

Every operation on per-client values is computed once for all clients, by its batching rule or by
`torch.func.vmap` of this operation. An operation that vmap cannot map either is called for one
client after another, and is listed in `BatchedProgram.unbatched_ops`. Values that no step changes,
such as a causal mask, are computed once.

A program runs on the device of its inputs. A tensor that the module creates on the host and then
moves is created on this device, since a step that waits for the host cannot become a CUDA graph.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.func import vmap
from torch.utils import _pytree as pytree

from stratafl.base.errors import reraise_out_of_memory
from stratafl.base.rng import PROCESS_LOCK
from stratafl.core.flat_module import FlatModule
from stratafl.core.losses import map_outputs
from stratafl.data.inputs import Inputs, tensors_of
from stratafl.engine import kernels
from stratafl.engine.compiler.batching_rules import BATCHING_RULES, is_pointwise, pointwise_rule
from stratafl.engine.compiler.capture import OpaqueFunction, UnsupportedModule
from stratafl.engine.compiler.fusion import functional_twin, fuse, overwrites_alone
from stratafl.engine.compiler.graph import RANDOM_IF_DROPOUT, RANDOM_OPS, capture, op_name
from stratafl.engine.compiler.recurrent_rules import RECURRENT_RULES
from stratafl.engine.compiler.values import Context, GradientPlaces, PerClient, tensor_arguments, wrap
from stratafl.engine.module_profile import written
from stratafl.engine.precision import Precision
from stratafl.engine.random_streams import RandomSource


@contextmanager
def vmap_fallback_disabled() -> Iterator[None]:
    """Let vmap fail for operations without a rule, instead of looping over the clients with a
    warning."""
    functorch: Any = torch._C._functorch
    with PROCESS_LOCK:
        before = functorch._is_vmap_fallback_enabled()
        functorch._set_vmap_fallback_enabled(False)
        try:
            yield
        finally:
            functorch._set_vmap_fallback_enabled(before)


RULES = {**BATCHING_RULES, **RECURRENT_RULES}

CHANNELS_LAST_SAFE = {
    "conv2d", "batch_norm", "max_pool2d", "avg_pool2d", "adaptive_avg_pool2d", "linear", "dropout", "dropout_",
    "feature_dropout", "feature_dropout_", "prelu", "flatten", "view", "reshape", "mean",
}  # fmt: skip
"""Operations besides pointwise ones that are right for channels-last images. Of some others, such
as instance norm of one sample, torch's own gradients are wrong for such images."""


class Instruction(NamedTuple):
    """Operation of a program."""

    node: fx.Node
    """Node of the graph whose value is the result."""
    run: Callable[..., Any]
    """(context, positional arguments, keyword arguments) -> value of the node."""
    args: list[Any]
    """Arguments, with nodes in place of their values."""
    kwargs: dict[str, Any]
    result_shape: Any
    free: list[fx.Node]
    """Nodes whose values no later instruction uses."""

    def execute(self, context: Context, values: dict[fx.Node, Any]) -> None:
        context.result_shape = self.result_shape
        values[self.node] = self.run(context, _lookup(self.args, values), _lookup(self.kwargs, values))
        for node in self.free:
            del values[node]


class BatchedProgram:
    """A module's operations on batches of one length; a call returns the outputs of all clients."""

    def __init__(
        self, flat: FlatModule, inputs: Inputs, all_outputs: bool = False, opaque_functions: bool = False,
        backend: kernels.Backend | None = None, filters: Collection[str] | None = None,
    ):  # fmt: skip
        """Capture the module and replace operations by the kernels of a backend.

        `inputs`: a batch of one client; `all_outputs`: return the module's whole output, not only
        its scores; `opaque_functions`: see `capture`; `backend`: kernels to use, None for none;
        `filters`: parameters that may be channels-last, None for all.
        """
        self.graph = graph = capture(flat, inputs, all_outputs, opaque_functions)
        self._backend = kernels.TORCH_BACKEND if backend is None else backend
        fused = [] if backend is None else fuse(graph, flat.names, backend, filters)
        self._fused = {op.nodes[0]: op for op in fused}
        self._fused_results = {op.nodes[-1] for op in fused}
        self.filters = {str(op.names[0]) for op in fused if op.kernel.startswith("conv2d")}
        """Parameters that kernels use as convolution filters."""
        kernel_inputs = {op.source for op in fused if op.parameters}
        self.casts_inputs = all(node in kernel_inputs and len(node.users) == 1 for node in graph.inputs)
        """Whether the inputs may have 16 bits, since only kernels use them."""
        self.unbatched_ops: set[str] = set()
        """Names of operations that were called for one client after another."""
        names = {op_name(node) for node in graph.nodes if not is_pointwise(node.target)}
        # kernels return channels-last images, and a CPU pools those several times as fast
        self._channels_last = bool(self.filters) or ("max_pool2d" in names and names <= CHANNELS_LAST_SAFE)
        self._device = inputs.device
        self._constants: dict[fx.Node, Any] = {node: value.to(self._device) for node, value in graph.constants.items()}
        inner = {node for op in fused for node in op.nodes[1:]}
        nodes = [node for node in graph.nodes if node not in graph.fixed and node not in inner]
        results = {*graph.outputs, *graph.replaced_buffers.values()}
        self._instructions = self._compile(nodes, results)
        fixed = [node for node in graph.nodes if node in graph.fixed]
        used = {used for node in nodes for used in node.all_input_nodes}
        with torch.no_grad():
            for instruction in self._compile(fixed, results | used):
                instruction.execute(Context(0, None), self._constants)

    def __call__(
        self, named: Mapping[str, Tensor], shared: Mapping[str, Tensor], inputs_CB: Inputs,
        source: RandomSource | None, precision: Precision = "fp32", places: GradientPlaces | None = None,
    ) -> Any:  # fmt: skip
        """Output of the module, with the client dimension in front of every tensor.

        `named`: the clients' parameters and buffers (C, *shape), of which mutated buffers are
        changed; `shared`: parameters and buffers that all clients share; `precision`: of operands
        in kernels; `places`: where kernels write gradients.
        """
        graph, inputs = self.graph, tensors_of(inputs_CB)
        context = Context(
            len(inputs_CB), source, unbatched_ops=self.unbatched_ops, backend=self._backend, precision=precision,
            channels_last=self._channels_last and self._device.type == "cpu", places=places,
        )  # fmt: skip
        values = dict(self._constants)
        for node, name in graph.parameters.items():
            values[node] = PerClient(named[name]) if name in named else shared[name]
        for node, name in graph.inputs.items():
            values[node] = PerClient(inputs[name])
        for instruction in self._instructions:
            instruction.execute(context, values)
        with torch.no_grad():
            for name, node in graph.replaced_buffers.items():
                if name not in named:
                    raise UnsupportedModule(f"{name}, which training changes and which is in no row")
                named[name].copy_(context.stacked(values[node]))
        outputs = iter(graph.outputs)
        return map_outputs(graph.output_structure, lambda _: context.stacked(values[next(outputs)]))

    def _compile(self, nodes: list[fx.Node], results: set[fx.Node]) -> list[Instruction]:
        """Instructions for nodes, which free all values but the results after their last use."""
        last_user = {used: node for node in nodes for used in node.all_input_nodes}
        free: dict[fx.Node, list[fx.Node]] = {}
        for used, node in last_user.items():
            if used not in results:
                free.setdefault(node, []).append(used)
        return [self._instruction(node, free.get(node, [])) for node in nodes]

    def _instruction(self, node: fx.Node, free: list[fx.Node]) -> Instruction:
        op = self._fused.get(node)
        if op is None:
            args, kwargs = (_to_plain(value, self._device) for value in (node.args, node.kwargs))
            return Instruction(node, self._runner(node), args, kwargs, _shape(node), free)
        args = [op.source, [*op.parameters]]
        return Instruction(op.nodes[-1], lambda context, args, _: op.run(context, *args), args, {}, None, free)

    def _runner(self, node: fx.Node) -> Callable[..., Any]:
        """Function that computes the value of a node."""
        op: Any = node.target
        name, per_client = op_name(node), self.graph.per_client
        if node.args and node.args[0] in self._fused_results and overwrites_alone(node):
            # the result of a kernel is a view that its backward pass may need
            op, name = functional_twin(op), name.removesuffix("_")
        if op is operator.getitem:
            return lambda context, args, kwargs: args[0][args[1]]
        rule = RULES.get(name) or (pointwise_rule if is_pointwise(op) else None)
        tags = op.tags if isinstance(op, torch._ops.OpOverload) else ()
        if rule is None and torch.Tag.nondeterministic_seeded in tags and name not in RANDOM_IF_DROPOUT:
            raise UnsupportedModule(f"operation {name}, which draws")
        if node not in per_client:
            return lambda context, args, kwargs: op(*args, **kwargs)
        if not isinstance(op, torch._ops.OpOverload | OpaqueFunction):
            raise UnsupportedModule(f"operation {getattr(op, '__name__', op)}")
        fallback = VmapFallback(op)
        is_random = name in RANDOM_OPS or name in RANDOM_IF_DROPOUT
        if not is_random and per_client.isdisjoint(node.all_input_nodes) and not isinstance(op, OpaqueFunction):
            # the same for all clients, until a later operation writes to it
            return lambda context, args, kwargs: wrap(
                pytree.tree_map_only(Tensor, lambda value: context.stacked(value).clone(), op(*args, **kwargs))
            )

        def run(context: Context, args: Any, kwargs: Any) -> Any:
            result = NotImplemented if rule is None else rule(context, op, *args, **kwargs)
            return fallback(context, args, kwargs) if result is NotImplemented else result

        return run


class VmapFallback:
    """Default batching rule: vmap of one operation, or one call per client if vmap has no rule."""

    def __init__(self, op: Any):
        # the backward pass of a user's function need not be one that vmap can map
        is_opaque = isinstance(op, OpaqueFunction)
        self._op, self._name = op, op.__name__ if is_opaque else op._opname
        self._mutates = not is_opaque and op._schema.is_mutable
        self._use_vmap = not is_opaque
        # vmap has fewer rules for operations in place
        functional = functional_twin(op) if self._mutates else None
        self._functional = None if functional is None else VmapFallback(functional)

    def __call__(self, context: Context, args: Any, kwargs: Any) -> Any:
        if self._functional is not None and self._use_vmap and isinstance(args[0], PerClient):
            args[0].tensor.copy_(self._functional(context, args, kwargs).tensor)
            return args[0]
        stacks = [value.tensor for value in tensor_arguments((args, kwargs)) if isinstance(value, PerClient)]

        def call_client(*tensors: Tensor) -> Any:
            own = iter(tensors)
            client_args, client_kwargs = pytree.tree_map_only(PerClient, lambda _: next(own), (args, kwargs))
            result = self._op(*client_args, **client_kwargs)
            return () if self._mutates else result

        if self._use_vmap:
            try:
                with vmap_fallback_disabled():
                    result = wrap(vmap(call_client)(*stacks))
                return self._mutated(args, kwargs) if self._mutates else result
            except Exception as problem:
                reraise_out_of_memory(problem)
                self._use_vmap = False  # vmap has no rule
        context.unbatched_ops.add(self._name)
        results = [call_client(*(stack[client] for stack in stacks)) for client in range(context.clients)]
        if self._mutates:
            return self._mutated(args, kwargs)
        if isinstance(results[0], Tensor):
            return PerClient(torch.stack(results))
        return tuple(PerClient(torch.stack(parts)) for parts in zip(*results, strict=True))

    def _mutated(self, args: Any, kwargs: Any) -> Any:
        """Operands that were written to, which are the results of an operation in place."""
        targets = written(self._op, args, kwargs)
        return targets[0] if len(self._op._schema.returns) == 1 else tuple(targets)


def _to_plain(value: Any, device: torch.device) -> Any:
    """Arguments of a node with plain lists and dicts for fx's own, and this device for any
    other."""
    if isinstance(value, torch.device):
        return device
    if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        return [_to_plain(item, device) for item in value]
    return {key: _to_plain(item, device) for key, item in value.items()} if isinstance(value, dict) else value


def _lookup(value: Any, values: Mapping[fx.Node, Any]) -> Any:
    """Arguments with the values of nodes."""
    if isinstance(value, fx.Node):
        return values[value]
    if isinstance(value, list):
        return [_lookup(item, values) for item in value]
    return {key: _lookup(item, values) for key, item in value.items()} if isinstance(value, dict) else value


def _shape(node: fx.Node) -> Any:
    """Shape of one client's value, or a list of shapes."""
    return pytree.tree_map(lambda value: value.shape if isinstance(value, Tensor) else None, node.meta.get("val"))
