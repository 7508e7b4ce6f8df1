"""What the client-batched form of a traced operation is written with (see `layers` for the
operations).

Every value has an axis of clients in front of the module's own axes, and an image may lie
channels-last: (C, B, H, W, K) for what the module calls (B, K, H, W).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from stratafl.engine.compiler.capture import UnsupportedModule
from stratafl.engine.kernels import Backend
from stratafl.engine.kernels.reference import REFERENCE_OPS, GradientBuffers
from stratafl.engine.precision import Precision
from stratafl.engine.random_streams import RandomSource

BATCH = 8191
"""Samples in the shapes a module is traced with: a number that no layer has by chance."""
IMAGE = 4
"""The rank of a batch of images."""


class Sinks(NamedTuple):
    """What a backward pass is to leave behind."""

    gradients: Mapping[str, Tensor]
    """Where the parameters' gradients are wanted, by name."""
    corrections: Mapping[str, Tensor]
    """What is to be added to them."""
    squares: list[Tensor] | None
    """Collects parts (C, n) of the sums of squares of what was written."""

    def of(self, w: str | None, b: str | None) -> GradientBuffers:
        """Where the gradients of a layer's two parameters go."""
        views: list[Any] = [where.get(name or "") for where in (self.gradients, self.corrections) for name in (w, b)]
        return GradientBuffers(*views)._replace(squared_norms=self.squares)


NOWHERE = Sinks({}, {}, None)


@dataclass
class Frame:
    """What one call of a program computes with."""

    values: dict[fx.Node, Any]
    named: Mapping[str, Tensor]
    """Parameters and buffers, (C, *shape)."""
    ops: Backend
    compute: Precision
    sinks: Sinks
    scale: float = 1.0
    """How much larger than they are the gradients of activations arrive."""
    source: RandomSource | None = None
    """Where draws come from."""
    sunk: set[str] = field(default_factory=set)
    """The parameters whose gradients the backward pass, as far as it has come, has written to where
    they are wanted."""


Run = Callable[[Frame], Any]


class LayerParameters(NamedTuple):
    """A layer's own parameters: their names in the row, None for those it lacks."""

    w: str | None
    b: str | None
    uses: Counter[str]

    def of(self, frame: Frame) -> tuple[Any, Any]:
        w, b = (None if name is None else frame.named[name] for name in (self.w, self.b))
        return w, b

    def call(self, frame: Frame, op: str, *args: Any) -> Tensor:
        """The operation, told where its parameters' gradients go if it can write them there
        itself."""
        names = [name for name in (self.w, self.b) if name is not None]
        trained = [name for name in names if name in frame.sinks.gradients]
        if op not in frame.ops.writes_gradients or not trained:
            return frame.ops.ops[op](*args)
        if len(trained) < len(names) or any(self.uses[name] > 1 for name in names):
            # two uses of a parameter would overwrite each other's gradient; without a sink torch
            # adds them up
            return REFERENCE_OPS[op](*args)
        sink = frame.sinks.of(self.w, self.b)
        y = frame.ops.ops[op](*args, gradient_buffers=sink, loss_scale=frame.scale)
        # what comes out may be unused, or cut off from the loss: its gradients are written only if
        # it is reached (a hook that knew the frame would keep all its values, the result among
        # them, until somebody looks for cycles)
        sunk = frame.sunk
        y.register_hook(lambda _: sunk.update(names))
        return y


class Lowering:
    """A traced module on its way to a program: what is known of each node before anything runs."""

    def __init__(self, root: nn.Sequential):
        """`root` holds the module, and nothing else."""
        self.root = root
        own = [*root[0].named_parameters(), *root[0].named_buffers()]
        # a tied parameter has one name in the row, its first
        self._names = {id(tensor): name for name, tensor in reversed(own)}
        self._uses: Counter[str] = Counter()
        self.last: set[fx.Node] = set()
        """Images that lie channels-last."""
        self.batched: set[fx.Node] = set()
        """Values with an entry for each sample of the batch."""
        self.fused: dict[fx.Node, fx.Node] = {}
        """Nodes that an earlier one has already done."""
        self.filters: set[str] = set()
        """The parameters that convolutions take as filters."""

    def module(self, node: fx.Node) -> nn.Module:
        return self.root.get_submodule(str(node.target))

    def shape(self, node: fx.Node) -> torch.Size:
        return node.meta["value"].shape

    def rank(self, node: fx.Node) -> int:
        return len(self.shape(node))

    def is_tensor(self, given: Any) -> bool:
        return isinstance(given, fx.Node) and isinstance(given.meta["value"], Tensor)

    def tensor(self, given: Any) -> fx.Node:
        if not self.is_tensor(given):
            raise UnsupportedModule(f"{given} where a tensor is expected")
        return given

    def plain(self, *given: Any) -> None:
        """Refuse values that are known only when the module runs, such as the length of its
        batch."""
        for each in given:
            if isinstance(each, fx.Node):
                raise UnsupportedModule(f"the value of {each} as an argument")

    def fetch(self, given: Any, rank: int = 0, last: bool = False) -> Run:
        """A tensor at the time of the call, with axes of one put in front of its own up to
        `rank`."""
        node = self.tensor(given)
        missing = max(rank - self.rank(node), 0)
        lies_last = node in self.last

        def run(frame: Frame) -> Tensor:
            x = frame.values[node]
            if missing:
                x = x[(slice(None), *[None] * missing)]
            if last and not lies_last:
                return x.movedim(2, -1)
            return x.movedim(-1, 2) if lies_last and not last else x

        return run

    def parameter(self, tensor: Tensor) -> Run:
        """A parameter or buffer of the traced module, for all clients."""
        name = self._name(tensor)
        return lambda frame: frame.named[name]

    def weights(self, w: Tensor | None, b: Tensor | None) -> LayerParameters:
        """A layer's own parameters."""
        w_name, b_name = (None if each is None else self._name(each) for each in (w, b))
        return LayerParameters(w_name, b_name, self._uses)

    def _name(self, tensor: Tensor) -> str:
        if id(tensor) not in self._names:
            raise UnsupportedModule("a tensor that is neither a parameter nor a buffer")
        name = self._names[id(tensor)]
        self._uses[name] += 1
        return name

    def axis(self, given: Any, dim: Any) -> int:
        """A module's dimension counted with the clients' axis in front."""
        node = self.tensor(given)
        if not isinstance(dim, int):
            raise UnsupportedModule(f"dimension {dim}")
        dim = dim + self.rank(node) if dim < 0 else dim
        if dim == 0 and node in self.batched:
            raise UnsupportedModule(f"{node} mixed over the samples of a batch")
        return dim + 1

    def axes(self, given: Any, dims: Any) -> list[int]:
        listed = dims if isinstance(dims, Sequence) else [dims]
        return [self.axis(given, dim) for dim in listed]

    def sole_user(self, node: fx.Node) -> fx.Node | None:
        users = list(node.users)
        return users[0] if len(users) == 1 else None

    def once(self, given: Any) -> None:
        """Refuse to change in place what something else may read."""
        if self.sole_user(self.tensor(given)) is None:
            raise UnsupportedModule(f"{given} changed in place and used elsewhere")

    def note(self, node: fx.Node) -> None:
        """Follow the axis of samples through a node that has been given its form."""
        sources = [each for each in node.all_input_nodes if each in self.batched]
        if node.op == "placeholder" or sources:
            self.batched.add(node)
            if self.is_tensor(node) and self.shape(node)[:1] != (BATCH,):
                raise UnsupportedModule(f"{node}, whose first axis is not the batch")
