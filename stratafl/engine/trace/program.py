"""A plain module as a program over all clients at once.

The module is traced, and each of its operations is given a form in which every value has an axis of clients in
front: what a client's module calls (B, F) is (C, B, F) here. Clients share nothing, so the gradients of all of them
come from one backward pass of the sum of their losses. Samples must share nothing either: an operation that mixes
those of a batch is refused, since batches are padded.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from stratafl.engine import layers
from stratafl.engine.lowering import BATCH, NOWHERE, Frame, Lowering, Run, Sinks, Unsupported
from stratafl.engine.ops import PLAIN, Compute, Table
from stratafl.flat import Flat
from stratafl.models import Recurrent


class _Tracer(fx.Tracer):
    proxy_buffer_attributes = True  # what is computed from buffers alone is no constant: clients have their own

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, Recurrent) or super().is_leaf_module(m, module_qualified_name)


class _Shapes(fx.Interpreter):
    """Leaves each node's value, without data, where the lowering looks for it."""

    def run_node(self, n: fx.Node) -> Any:
        n.meta["value"] = super().run_node(n)
        return n.meta["value"]


class Program:
    """The steps of a module; calling it gives all clients' outputs, (C, B, ...)."""

    def __init__(self, flat: Flat, inputs: Tensor):
        """`inputs` are samples of the kind the module will see: only their shape and type matter."""
        root, graph = _traced(flat.module, inputs)
        lowering = Lowering(root)
        self._steps: list[tuple[fx.Node, Run]] = []
        self._input: fx.Node | None = None
        for node in graph.nodes:
            if node.op == "placeholder":
                if self._input is not None and node.users:
                    raise Unsupported("more than one input")
                self._input = self._input or node
                lowering.note(node)
            elif node.op == "output":
                self._output = lowering.fetch(node.args[0])
                if node.args[0] not in lowering.batched:
                    raise Unsupported("an output that does not depend on the input")
            else:
                self._steps.append((node, layers.lower(lowering, node)))
                lowering.note(node)
        self.filters = lowering.filters & set(flat.names)
        """The parameters that convolutions take as filters."""
        self._own = {**dict(flat.module.named_parameters()), **dict(flat.module.named_buffers())}

    def __call__(
        self,
        named: Mapping[str, Tensor],
        inputs_CB: Tensor,
        ops: Table = PLAIN,
        compute: Compute = "fp32",
        sinks: Sinks = NOWHERE,
        scale: float = 1.0,
    ) -> tuple[Tensor, set[str]]:
        """The outputs, and a set that a backward pass fills with the names of the parameters whose gradients it writes
        to `sinks` itself.

        `named` are the clients' own parameters and buffers, (C, *shape); the rest is the module's, for all alike.
        `scale` says how much larger than they are the outputs' gradients will come.
        """
        shared = {name: own.expand(len(inputs_CB), *own.shape) for name, own in self._own.items() if name not in named}
        assert self._input is not None
        frame = Frame({self._input: inputs_CB}, {**shared, **named}, ops, compute, sinks, scale)
        for node, run in self._steps:
            frame.values[node] = run(frame)
        return self._output(frame), frame.sunk


def _traced(module: nn.Module, inputs: Tensor) -> tuple[nn.Sequential, fx.Graph]:
    """A copy of the module and its graph, whose nodes know their shapes."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    if any(getattr(part, kind) for part in module.modules() for kind in hooks):
        raise Unsupported("hooks")
    # tracing leaves constants on the module it is given, and does not see the whole of it as a layer
    root = nn.Sequential(copy.deepcopy(module))
    try:
        graph = _Tracer().trace(root)
        empty = copy.deepcopy(root).to("meta")
        for name, value in vars(empty).items():
            if isinstance(value, Tensor):
                setattr(empty, name, value.to("meta"))
        sample = torch.empty(BATCH, *inputs.shape[1:], dtype=inputs.dtype, device="meta")
        _Shapes(fx.GraphModule(empty, graph), garbage_collect_values=False).run(sample)
    except Exception as problem:
        raise Unsupported(f"cannot be traced: {str(problem).strip().partition(chr(10))[0]}") from problem
    return root, graph
