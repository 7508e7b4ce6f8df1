"""A plain module as a program over all clients at once.

The module is traced, and each of its operations is given a form in which every value has an axis of
clients in
front: what a client's module calls (B, F) is (C, B, F) here. Clients share nothing, so the
gradients of all of them come from one backward pass of the sum of their losses. Samples must share
nothing either: an operation that mixes those of a batch is refused, since batches are padded.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from stratafl.base.errors import pass_on_no_room
from stratafl.core.flat_module import FlatModule
from stratafl.core.losses import _scores_entry
from stratafl.data.inputs import Inputs, tensors_of
from stratafl.engine.compiler.capture import UnsupportedModule
from stratafl.engine.kernels import TORCH_BACKEND, Backend
from stratafl.engine.precision import Precision
from stratafl.engine.random_streams import RandomSource
from stratafl.engine.trace import layers
from stratafl.engine.trace.lowering import BATCH, NOWHERE, Frame, Lowering, Run, Sinks
from stratafl.models.networks import Recurrent


class _Tracer(fx.Tracer):
    proxy_buffer_attributes = True  # what is computed from buffers alone is no constant: clients have their own

    def __init__(self, keywords: tuple[str, ...]) -> None:
        """keywords: the inputs' names, where they have any."""
        super().__init__()
        self._keywords = keywords

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> tuple[Any, list[Any]]:
        if not self._keywords:
            return super().create_args_for_root(root_fn, is_module, concrete_args)
        proxies = [self.create_proxy("placeholder", name, (), {}) for name in self._keywords]

        def call(root: nn.Sequential, *given: Any) -> Any:
            return root[0](**dict(zip(self._keywords, given, strict=True)))

        return call, [self.root, *proxies]

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, Recurrent) or super().is_leaf_module(m, module_qualified_name)


class _Shapes(fx.Interpreter):
    """Leaves each node's value, without data, where the lowering looks for it."""

    def run_node(self, n: fx.Node) -> Any:
        n.meta["value"] = super().run_node(n)
        return n.meta["value"]


class TracedProgram:
    """The steps of a module; calling it gives all clients' scores, (C, B, ...)."""

    def __init__(self, flat: FlatModule, inputs: Inputs):
        """`inputs` are samples of the kind the module will see: only their shape and type
        matter."""
        flat.train()
        root, graph = _traced(flat.module, inputs)
        lowering = Lowering(root)
        self._steps: list[tuple[fx.Node, Run]] = []
        unnamed = iter(tensors_of(inputs))
        self._inputs: dict[fx.Node, str] = {}
        """The nodes that stand for the inputs, with their names."""
        self.gives_more = False
        """Whether the module returns something that holds the scores, and not these alone."""
        for node in graph.nodes:
            if node.op == "placeholder":
                name = next(unnamed, None)
                if name is None and node.users:
                    raise UnsupportedModule("more than one input")
                if name is not None:
                    self._inputs[node] = name
                lowering.note(node)
            elif node.op == "output":
                scores = _scores(node.args[0])
                self.gives_more = scores is not node.args[0]
                self._output = lowering.fetch(scores)
                if scores not in lowering.batched:
                    raise UnsupportedModule("an output that does not depend on the input")
            elif not _is_record(node):
                self._steps.append((node, layers.lower(lowering, node)))
                lowering.note(node)
        values = [node.meta.get("value") for node in graph.nodes]
        of_samples = [each for each in values if isinstance(each, Tensor) and each.dim() and len(each) == BATCH]
        self.sample_bytes = max((each.nbytes for each in of_samples), default=0) // BATCH
        """Of one sample in the largest value."""
        self.filters = lowering.filters & set(flat.names)
        """The parameters that convolutions take as filters."""
        self._own = {**dict(flat.module.named_parameters()), **dict(flat.module.named_buffers())}

    def __call__(
        self,
        named: Mapping[str, Tensor],
        inputs_CB: Inputs,
        ops: Backend = TORCH_BACKEND,
        compute: Precision = "fp32",
        sinks: Sinks = NOWHERE,
        scale: float = 1.0,
        source: RandomSource | None = None,
    ) -> tuple[Tensor, set[str]]:
        """The outputs, and a set that a backward pass fills with the names of the parameters whose
        gradients it writes to `sinks` itself.

        `named` are the clients' own parameters and buffers, (C, *shape); the rest is the module's,
        for all alike. `scale` says how much larger than they are the outputs' gradients will
        come, and from `source` comes what is drawn.
        """
        shared = {name: own.expand(len(inputs_CB), *own.shape) for name, own in self._own.items() if name not in named}
        given = tensors_of(inputs_CB)
        values: dict[fx.Node, Any] = {node: given[name] for node, name in self._inputs.items()}
        frame = Frame(values, {**shared, **named}, ops, compute, sinks, scale, source)
        for node, run in self._steps:
            frame.values[node] = run(frame)
        return self._output(frame), frame.sunk


def _is_record(node: fx.Node) -> bool:
    """Whether it makes a data class or named tuple of what the module returns."""
    is_kind = dataclasses.is_dataclass(node.target) or hasattr(node.target, "_fields")
    return is_kind and node.op == "call_function" and all(user.op == "output" for user in node.users)


def _scores(returned: Any) -> Any:
    """The node of the scores, in what the module returns."""
    if not isinstance(returned, fx.Node):
        return _scores_entry(returned)
    if not _is_record(returned):
        return returned
    # a data class is made of keywords and a named tuple of what stands in its order
    return _scores_entry(dict(returned.kwargs) or returned.target(*returned.args))  # type: ignore[operator]


def _traced(module: nn.Module, inputs: Inputs) -> tuple[nn.Sequential, fx.Graph]:
    """A copy of the module and its graph, whose nodes know their shapes."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    if any(getattr(part, kind) for part in module.modules() for kind in hooks):
        raise UnsupportedModule("hooks")
    # tracing leaves constants on the module it is given, and does not see the whole of it as a
    # layer
    root = nn.Sequential(copy.deepcopy(module))
    try:
        samples = tensors_of(inputs)
        graph = _Tracer(tuple(filter(None, samples))).trace(root)
        empty = copy.deepcopy(root).to("meta")
        for name, value in vars(empty).items():
            if isinstance(value, Tensor):
                setattr(empty, name, value.to("meta"))
        empties = [torch.empty(BATCH, *each.shape[1:], dtype=each.dtype, device="meta") for each in samples.values()]
        _Shapes(fx.GraphModule(empty, graph), garbage_collect_values=False).run(*empties)
    except Exception as problem:
        pass_on_no_room(problem)
        raise UnsupportedModule(f"cannot be traced: {str(problem).strip().partition(chr(10))[0]}") from problem
    return root, graph
