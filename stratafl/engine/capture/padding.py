"""Whether a module treats every sample of a batch alone, so that batches may be padded.

Two recordings of different length are laid side by side. Padding is safe where every value either
does not depend on the length at all or has the samples as its first axis and nothing else that
depends on it, and where no operation on such a value is known to look beyond a sample. An operation
that is not known here is taken to do so. What is drawn must have the samples in front, too: then a
sample's draws do not depend on how many follow it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from torch import Tensor, fx

from stratafl.core.flat import Flat
from stratafl.data.inputs import mapped
from stratafl.engine.capture.forms import axes, lookups, random, recurrent, samples
from stratafl.engine.capture.graph import Recording, packet, recorded
from stratafl.engine.method.differentiate import Batch

SHAPING = {"view", "reshape", "_unsafe_view", "expand", "expand_as", "view_as", "reshape_as", "unflatten", "repeat"}
MAKING = {
    "zeros", "ones", "full", "empty", "arange", "new_zeros", "new_ones", "new_full", "new_empty", "rand", "randn",
    "randint", "normal",
}  # fmt: skip
PLAIN = {
    "detach", "alias", "clone", "contiguous", "to", "_to_copy", "zeros_like", "ones_like", "full_like", "empty_like",
    "type_as", "lift_fresh", "lift_fresh_copy", "zero", "one_hot", "embedding", "group_norm", "view_as_real",
    "view_as_complex",
}  # fmt: skip
"""What treats each number, or each sample, alone."""
NEVER = {"randperm", "multinomial"}


def pads(flat: Flat, batch: Batch, whole: bool = False) -> bool:
    """Whether padded batches give what batches of their own length do; `whole`: in all that the
    module returns."""
    most = batch.mask_CB.shape[1]
    if most < 3:
        return False
    try:
        one, two, all_of_them = (
            recorded(flat, mapped(lambda each: each[0, :length], batch.inputs_CB), whole) for length in (1, 2, most)
        )
    except Exception:
        return False  # what is wrong is said where it is tried in earnest
    alike = one.signature == two.signature == all_of_them.signature
    alike = alike and len(one.outputs) == len(two.outputs) == len(all_of_them.outputs)
    return alike and _Compared(two, all_of_them, most).alone()


class _Compared:
    """A recording with batches of two samples, and one with more."""

    def __init__(self, two: Recording, more: Recording, length: int):
        self._recording, self._length = two, length
        pairs = [*zip(two.nodes, more.nodes, strict=True)]
        pairs += [*zip(two.given, more.given, strict=True), *zip(two.inputs, more.inputs, strict=True)]
        pairs += [*zip(two.constants, more.constants, strict=True)]
        self._other = dict(pairs)

    def alone(self) -> bool:
        """Whether nothing looks beyond a sample."""
        if self._recording.written or not all(self.batched(each) is True for each in self._recording.outputs):
            return False
        return all(self._fine(node) for node in self._recording.nodes)

    def batched(self, node: Any) -> bool | None:
        """Whether a value has the samples as its first axis; None where its shape depends on their
        number in another way."""
        ours: Any = node.meta.get("val")
        theirs: Any = self._other[node].meta.get("val")
        if not isinstance(ours, Tensor):
            parts = ours if isinstance(ours, tuple | list) else ()
            others = theirs if isinstance(theirs, tuple | list) else ()
            kinds = {_kind(a, b, self._length) for a, b in zip(parts, others, strict=False)}
            return kinds.pop() if len(kinds) == 1 else None if kinds else False
        return _kind(ours, theirs, self._length)

    def _fine(self, node: fx.Node) -> bool:
        name, sources = packet(node), node.all_input_nodes
        if name in recurrent.CELLS:
            return self._recurrent(node)
        if name == "zeros" and all(packet(user) in recurrent.CELLS for user in node.users):
            return True
        if node.target is operator.getitem:
            return True if not node.users or packet(sources[0]) in recurrent.CELLS else self.batched(node) is not None
        kind = self.batched(node)
        if kind is None or not self._same_arguments(node):
            return False
        of_samples = [each for each in sources if self.batched(each)]
        if not kind:
            return not of_samples or name in MAKING
        if any(self.batched(each) is None for each in sources):
            return False
        return not of_samples or self._each_alone(node, str(name).removesuffix("_"), of_samples)

    def _same_arguments(self, node: fx.Node) -> bool:
        """Whether numbers among the arguments are the same, but for sizes."""
        name, other = packet(node), self._other[node]
        for ours, theirs in zip(_numbers(node), _numbers(other), strict=True):
            if ours != theirs and not (isinstance(ours, list) and name in SHAPING | MAKING) and name != "arange":
                return False
        return True

    def _each_alone(self, node: fx.Node, name: str, of_samples: list[fx.Node]) -> bool:
        rank = node.meta["val"].dim() if isinstance(node.meta["val"], Tensor) else 0
        ranks = {each.meta["val"].dim() for each in of_samples}
        first = node.all_input_nodes[0]
        op: Any = node.target
        if name in NEVER:
            return False
        if name in axes.BY_AXIS or name in axes.REDUCING or name in lookups.BY_INDEX:
            return self._dims(node, min(ranks)) and all(self.batched(each) is not None for each in node.all_input_nodes)
        if axes.is_pointwise(op):
            return ranks == {rank}
        if name in SHAPING | PLAIN | MAKING or f"{name}_" in random.FORMS or name in random.FORMS:
            return True
        if name == "linear":
            return of_samples == [first] and ranks == {rank} and rank >= 2
        if name in ("matmul", "bmm"):
            return ranks == {rank} and rank >= (3 if of_samples != [first] else 2)
        if name.startswith("conv") or name in samples.BATCHED:
            return of_samples == [first] and rank == (samples.BATCHED.get(name) or rank) and ranks == {rank}
        if name in ("layer_norm", "rms_norm"):
            shape: Any = node.args[1]
            return of_samples == [first] and rank > len(shape)
        if name == "scaled_dot_product_attention":
            return ranks == {rank} and rank >= 3 and set(node.all_input_nodes[:3]) <= set(of_samples)
        return False

    def _dims(self, node: fx.Node, rank: int) -> bool:
        """Whether the axes that an operation names are others than that of the samples."""
        op: Any = node.target
        given = axes.bound(op, node.args, node.kwargs)
        named = [value for name, value in given.items() if name in axes.DIMS]
        dims = [dim for value in named for dim in (value if isinstance(value, list | tuple) else [value])]
        new = 1 if packet(node) in ("unsqueeze", "unsqueeze_", "stack") else 0
        return bool(dims) and all(isinstance(dim, int) and dim % (rank + new) != 0 for dim in dims)

    def _recurrent(self, node: fx.Node) -> bool:
        x, _, _, _, count, dropout, train, _, *first = node.args
        draws = dropout and train and isinstance(count, int) and count > 1
        return bool(self.batched(x)) and x.meta["val"].dim() == 3 and bool(first and first[0]) and not draws  # type: ignore[union-attr]


def _kind(ours: Tensor, theirs: Tensor, length: int) -> bool | None:
    if ours.shape == theirs.shape:
        return False
    fits = ours.shape[1:] == theirs.shape[1:] and (ours.shape[0], theirs.shape[0]) == (2, length)
    return True if fits else None


def _numbers(node: fx.Node) -> list[Any]:
    """What an operation is given besides tensors."""
    found: list[Any] = []
    blank: Callable[[fx.Node], None] = lambda each: None  # noqa: E731
    for value in (*node.args, *node.kwargs.values()):
        plain = fx.node.map_arg(value, blank)
        found.append(list(plain) if isinstance(plain, list | tuple) else plain)
    return found
