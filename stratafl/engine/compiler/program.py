"""A recording of a module as a program over all clients at once.

Every operation that has to do with a client's values is done once for all clients, by its batching
rule or by `torch.func.vmap` of this operation alone; where that has no rule, it is called for one
client after another, and the program says so. What no step changes, such as a mask of the future,
is computed once.

A program runs where its inputs are. A module may make a tensor on the host and move it; here it is
made where it will be needed, since a step that waits for the host cannot become a CUDA graph.
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

from stratafl.base.errors import pass_on_no_room
from stratafl.base.rng import PROCESS
from stratafl.core.flat_module import FlatModule
from stratafl.core.losses import map_outputs
from stratafl.data.inputs import Inputs, tensors_of
from stratafl.engine import kernels
from stratafl.engine.compiler.batching_rules import BATCHING_RULES, RANDOM_RULES, is_pointwise, pointwise
from stratafl.engine.compiler.capture import OpaqueFunction, UnsupportedModule
from stratafl.engine.compiler.fusion import (
    FusedOp,
    functional_twin,
    fuse,
    is_pointwise_node,
    out_of_place,
    overwrites_alone,
)
from stratafl.engine.compiler.graph import RANDOM_IF_DROPOUT, capture, op_name
from stratafl.engine.compiler.recurrent_rules import RECURRENT_RULES
from stratafl.engine.compiler.values import Context, GradientPlaces, PerClient, tensor_arguments, wrap
from stratafl.engine.module_profile import written
from stratafl.engine.precision import Precision
from stratafl.engine.random_streams import RandomSource


@contextmanager
def vmap_fallback_disabled() -> Iterator[None]:
    """What the library has no rule for is refused, rather than done one by one with a warning."""
    functorch: Any = torch._C._functorch
    with PROCESS:
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
"""What is right for images that lie channels-last, besides what treats numbers one by one: of some
others, such as instance norm of one sample, the library's own gradients are wrong then."""


class ValueRef(NamedTuple):
    """The value of an earlier step, in the arguments of a later one."""

    node: fx.Node


class Instruction(NamedTuple):
    """One operation."""

    node: fx.Node
    run: Callable[[Context, Any, Any], Any]
    args: Any
    kwargs: Any
    shape: Any
    done: list[fx.Node]
    """Whose values nobody needs afterwards."""


class BatchedProgram:
    """The steps of a module on batches of one length; calling it gives all clients' outputs."""

    def __init__(
        self,
        flat: FlatModule,
        inputs: Inputs,
        whole: bool = False,
        apart: bool = False,
        table: kernels.Backend | None = None,
        filters: Collection[str] | None = None,
    ):
        """`inputs`: a batch of one client; `whole`: all that the module returns is wanted, not only
        the scores in it; `apart`: functions whose gradient is their own are one operation each;
        `table`: the kernels that take the place of operations, if any; `filters`: the parameters
        that may lie channels-last, None for all."""
        self.recording = capture(flat, inputs, whole, apart)
        self._table = kernels.TORCH_BACKEND if table is None else table
        fused = [] if table is None else fuse(self.recording, flat.names, table, filters)
        self._fused = {op.nodes[0]: op for op in fused}
        within = {node for op in fused for node in op.nodes[1:]}
        self._results = {op.nodes[-1] for op in fused}
        self.filters = {str(op.names[0]) for op in fused if op.kernel.startswith("conv2d")}
        """The parameters that kernels take as filters."""
        by_kernels = {op.source for op in fused if op.parameters}
        self.casts_inputs = all(node in by_kernels and len(node.users) == 1 for node in self.recording.inputs)
        """Whether only kernels see the inputs, which take 16 bits as well."""
        self.mapped: set[str] = set()
        """Operations that were called for one client after another."""
        names = {op_name(node) for node in self.recording.nodes if not is_pointwise_node(node)}
        self._is_last = bool(self.filters) or ("max_pool2d" in names and names <= CHANNELS_LAST_SAFE)
        """Whether images lie channels-last: kernels leave them so, and a CPU's library pools them
        several times as fast."""
        self._device = inputs.device
        fixed = [node for node in self.recording.nodes if node in self.recording.fixed]
        others = [node for node in self.recording.nodes if node not in self.recording.fixed and node not in within]
        wanted = [*self.recording.outputs, *self.recording.replaced.values()]
        ends = _last_uses(others, wanted)
        self._steps = [self._step(node, ends.get(node, [])) for node in others]
        self._fixed: dict[fx.Node, Any] = {
            node: value.to(self._device) for node, value in self.recording.constants.items()
        }
        wanted += [each for node in others for each in node.all_input_nodes]
        ends = _last_uses(fixed, wanted)
        with torch.no_grad():
            for node in fixed:
                _execute(self._step(node, ends.get(node, [])), Context(0, None), self._fixed)

    def __call__(
        self,
        named: Mapping[str, Tensor],
        shared: Mapping[str, Tensor],
        inputs_CB: Inputs,
        source: RandomSource | None,
        compute: Precision = "fp32",
        places: GradientPlaces | None = None,
    ) -> Any:
        """What the module returns, with the clients in front of every tensor in it. `named`: every
        client's own, (C, *shape), of which buffers that change are changed; `shared`: what all
        clients have alike; `compute`: in what kernels hold their operands; `places`: where they
        write gradients."""
        given, on_cpu = tensors_of(inputs_CB), self._device.type == "cpu"
        frame = Context(
            len(inputs_CB), source, mapped=self.mapped, channels_last=on_cpu and self._is_last, table=self._table,
            compute=compute, places=places,
        )  # fmt: skip
        values = dict(self._fixed)
        for node, name in self.recording.given.items():
            values[node] = PerClient(named[name]) if name in named else shared[name]
        for node, name in self.recording.inputs.items():
            values[node] = PerClient(given[name])
        for step in self._steps:
            _execute(step, frame, values)
        with torch.no_grad():
            for name, node in self.recording.replaced.items():
                if name not in named:
                    raise UnsupportedModule(f"{name}, which training changes and which is in no row")
                named[name].copy_(frame.expanded(values[node]))
        outputs = iter(self.recording.outputs)
        return map_outputs(self.recording.form, lambda _: frame.expanded(values[next(outputs)]))

    def _step(self, node: fx.Node, done: list[fx.Node]) -> Instruction:
        op = self._fused.get(node)
        if op is not None:
            inputs = ValueRef(op.source), [None if each is None else ValueRef(each) for each in op.parameters]
            shape = _shape(op.nodes[-1].meta.get("val"))
            return Instruction(op.nodes[-1], _fused_runner(op), [*inputs], {}, shape, done)
        args, kwargs = (fx.node.map_arg(each, ValueRef) for each in (list(node.args), dict(node.kwargs)))
        args, kwargs = (_normalise_arguments(each, self._device) for each in (args, kwargs))
        return Instruction(node, self._runner(node), args, kwargs, _shape(node.meta.get("val")), done)

    def _runner(self, node: fx.Node) -> Callable[[Context, Any, Any], Any]:
        op: Any = node.target
        if node.args and node.args[0] in self._results and overwrites_alone(node):
            op = out_of_place(node)  # a kernel's result is a view, and may be needed on the way back
        if op is operator.getitem:
            return lambda frame, args, kwargs: args[0][args[1]]
        if isinstance(op, OpaqueFunction) and node in self.recording.stacked:
            return VmapFallback(op)
        if not isinstance(op, torch._ops.OpOverload):
            if node in self.recording.stacked:
                raise UnsupportedModule(f"operation {getattr(op, '__name__', op)}")
            return lambda frame, args, kwargs: op(*args, **kwargs)
        form = RULES.get(_overload_name(op)) or (pointwise if is_pointwise(op) else None)
        if form is None and torch.Tag.nondeterministic_seeded in op.tags and op_name(node) not in RANDOM_IF_DROPOUT:
            raise UnsupportedModule(f"operation {op_name(node)}, which draws")
        if node not in self.recording.stacked:
            return lambda frame, args, kwargs: op(*args, **kwargs)
        fallback = VmapFallback(op)
        alike = not any(each in self.recording.stacked for each in node.all_input_nodes)
        makes = alike and op_name(node) not in RANDOM_RULES and op_name(node) not in RANDOM_IF_DROPOUT

        def run(frame: Context, args: Any, kwargs: Any) -> Any:
            if makes:
                # all clients' alike, but each will be written to
                return wrap(
                    pytree.tree_map_only(Tensor, lambda each: frame.expanded(each).clone(), op(*args, **kwargs))
                )
            if form is not None:
                result = form(frame, op, *args, **kwargs)
                if result is not NotImplemented:
                    return result
            return fallback(frame, args, kwargs)

        return run


class VmapFallback:
    """One operation mapped over the clients: by vmap, or, where that has no rule for it either, by
    one call for each."""

    def __init__(self, op: Any):
        # a gradient of one's own need not be one that can be mapped
        owned = isinstance(op, OpaqueFunction)
        self._op, self._name = op, op.__name__ if owned else op._opname
        self._writes = not owned and op._schema.is_mutable
        self._maps = not owned
        # vmap has fewer rules for what writes
        self._twin = functional_twin(op) if self._writes else None

    def __call__(self, frame: Context, args: Any, kwargs: Any) -> Any:
        op = self._op
        if self._twin is not None and self._maps and isinstance(args[0], PerClient):
            result = VmapFallback(self._twin)(Context(frame.clients, frame.source, mapped=frame.mapped), args, kwargs)
            args[0].t.copy_(result.t)
            return args[0]
        stacks = [each.t for each in tensor_arguments((args, kwargs)) if isinstance(each, PerClient)]

        def one(*own: Tensor) -> Any:
            values = iter(own)
            result = op(*_substitute(args, values), **_substitute(kwargs, values))
            return () if self._writes else result

        if self._maps:
            try:
                with vmap_fallback_disabled():
                    result = wrap(vmap(one)(*stacks))
                return self._targets(args, kwargs) if self._writes else result
            except Exception as problem:
                pass_on_no_room(problem)
                self._maps = False  # the library has no rule for it
        frame.mapped.add(self._name)
        results = [one(*(each[client] for each in stacks)) for client in range(frame.clients)]
        if self._writes:
            return self._targets(args, kwargs)
        if isinstance(results[0], Tensor):
            return PerClient(torch.stack(results))
        return tuple(PerClient(torch.stack(parts)) for parts in zip(*results, strict=True))

    def _targets(self, args: Any, kwargs: Any) -> Any:
        """What was written to, which is the result."""
        targets = written(self._op, args, kwargs)
        return targets[0] if len(self._op._schema.returns) == 1 else tuple(targets)


def _fused_runner(op: FusedOp) -> Callable[[Context, Any, Any], Any]:
    return lambda frame, args, kwargs: op.run(frame, *args)


def _overload_name(op: torch._ops.OpOverload) -> str:
    return op._opname if op._namespace == "aten" else str(op)


def _substitute(value: Any, own: Any) -> Any:
    """The same arguments with the next of these in the place of every stack."""
    if isinstance(value, PerClient):
        return next(own)
    if isinstance(value, tuple | list):
        return type(value)(_substitute(each, own) for each in value)
    if isinstance(value, dict):
        return {key: _substitute(each, own) for key, each in value.items()}
    return value


def _last_uses(nodes: list[fx.Node], kept: list[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """The nodes behind which nobody needs a value any more, with those whose values they are."""
    last = {each: node for node in nodes for each in node.all_input_nodes}
    for node in kept:
        last.pop(node, None)
    ends: dict[fx.Node, list[fx.Node]] = {}
    for node, end in last.items():
        ends.setdefault(end, []).append(node)
    return ends


def _execute(step: Instruction, frame: Context, values: dict[fx.Node, Any]) -> None:
    """One step, of values that come before it."""
    frame.shape = step.shape
    values[step.node] = step.run(frame, _lookup(step.args, values), _lookup(step.kwargs, values))
    for node in step.done:
        del values[node]


def _normalise_arguments(value: Any, device: torch.device) -> Any:
    """Ordinary lists and tables for those that a graph holds, and this device for any other."""
    if isinstance(value, ValueRef):
        return value
    if isinstance(value, torch.device):
        return device
    if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        return [_normalise_arguments(each, device) for each in value]
    return (
        {key: _normalise_arguments(each, device) for key, each in value.items()} if isinstance(value, dict) else value
    )


def _lookup(value: Any, values: Mapping[fx.Node, Any]) -> Any:
    if isinstance(value, ValueRef):
        return values[value.node]
    if isinstance(value, list):
        return [_lookup(each, values) for each in value]
    return {key: _lookup(each, values) for key, each in value.items()} if isinstance(value, dict) else value


def _shape(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape
    return [_shape(each) for each in value] if isinstance(value, tuple | list) else None
