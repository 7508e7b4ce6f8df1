"""Whether a module treats every sample of a batch alone, so that batches may be padded.

Two recordings of different length are laid side by side, and the samples are followed from value to
value: which axis they are on, and what has been merged into that axis with them. Padding is safe
where every operation is known not to look beyond a sample. One that is not known here is taken to
do so. What is drawn must have the samples in front: then a sample's draws do not depend on how many
follow it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor, fx

from stratafl.base.errors import pass_on_no_room
from stratafl.core.flat_module import FlatModule
from stratafl.data.inputs import map_tensors
from stratafl.engine.batches import ClientBatches
from stratafl.engine.compiler.batching_rules import DIMS, RANDOM_RULES, bind_arguments, is_pointwise
from stratafl.engine.compiler.graph import CapturedGraph, capture, op_name
from stratafl.engine.compiler.recurrent_rules import CELLS

BY_AXIS = {
    "softmax", "_softmax", "log_softmax", "_log_softmax", "cumsum", "cumprod", "logcumsumexp", "flip", "roll",
    "transpose", "swapaxes", "swapdims", "select", "slice", "unsqueeze", "unsqueeze_", "squeeze", "squeeze_", "narrow",
    "split", "split_with_sizes", "chunk", "unbind", "tensor_split", "unfold", "flatten", "unflatten", "movedim",
    "moveaxis", "cat", "concat", "concatenate", "stack", "gather", "scatter", "scatter_", "scatter_add", "scatter_add_",
    "topk", "sort", "argsort", "diff", "glu", "diagonal", "repeat_interleave", "cosine_similarity", "kthvalue",
    "cummax", "cummin", "take_along_dim", "linalg_cross", "select_scatter", "slice_scatter", "scatter_reduce",
    "scatter_reduce_", "linalg_matrix_norm", "softmin", "transpose_", "split_copy", "fft_fft", "fft_rfft", "fft_ifft",
    "fft_irfft", "fft_fft2", "fft_ifft2", "fft_rfft2", "fft_irfft2", "fft_fftn", "fft_ifftn",
}  # fmt: skip
REDUCING = {
    "sum", "mean", "amax", "amin", "prod", "any", "all", "argmax", "argmin", "var", "std", "logsumexp", "norm",
    "linalg_vector_norm", "linalg_norm", "max", "min", "var_mean", "std_mean", "nansum", "nanmean", "count_nonzero",
    "median", "aminmax", "mode",
}  # fmt: skip
BY_INDEX = ("index_select", "index_add", "index_add_", "index_copy", "index_copy_", "index_fill", "index_fill_")
"""What names the axes or places that it looks along."""
POOLS = ("max", "avg", "adaptive_avg", "adaptive_max")


BATCHED = {
    **{f"{kind}_pool{axes}d": axes + 2 for axes in (1, 2, 3) for kind in POOLS},
    **{f"max_pool{axes}d_with_indices": axes + 2 for axes in (1, 2, 3)},
    **{f"{kind}_pad{axes}d": axes + 2 for axes in (1, 2, 3) for kind in ("reflection", "replication")},
    **{f"fractional_max_pool{axes}d": axes + 2 for axes in (2, 3)},
    **{f"upsample_{kind}1d": 3 for kind in ("nearest", "linear")},
    **{f"upsample_{kind}2d": 4 for kind in ("nearest", "bilinear", "bicubic")},
    **{f"upsample_{kind}3d": 5 for kind in ("nearest", "trilinear")},
    "_upsample_nearest_exact2d": 4, "grid_sampler": 4, "grid_sampler_2d": 4, "im2col": 4, "col2im": 3,
    "channel_shuffle": 4, "max_unpool2d": 4, "native_channel_shuffle": 4,
}  # fmt: skip
"""Operations, and how many axes a batch of samples has there."""
RESHAPE_OPS = {"view", "reshape", "_unsafe_view", "view_as", "reshape_as", "flatten", "unflatten", "unsqueeze", "ravel"}
"""What keeps all values in their order."""
TRANSPOSE_OPS = {
    "permute", "transpose", "swapaxes", "swapdims", "movedim", "moveaxis", "t", "mT", "mH", "numpy_T", "adjoint",
}  # fmt: skip
ONE_AS_MANY = {"aten.expand.default", "aten.expand_as.default"}
"""What a module may leave out for a batch of one sample."""
EXPAND_OPS = {"expand", "expand_as", "broadcast_to", "repeat", "tile"}
CONSTANT_FACTORIES = {"zeros", "ones", "full", "empty", "new_zeros", "new_ones", "new_full", "new_empty"}
INDEX_FACTORIES = {"arange", "rand", "randn", "randint", "normal"}
"""What makes values one after another, so that the first of them do not depend on how many
follow."""
ELEMENTWISE_OPS = {
    "detach", "alias", "clone", "contiguous", "to", "_to_copy", "zeros_like", "ones_like", "full_like", "empty_like",
    "type_as", "prelu", "lift_fresh", "lift_fresh_copy", "zero", "one_hot", "view_as_real", "view_as_complex", "_conj",
    "resolve_conj",
}  # fmt: skip
"""What treats each number alone."""
FIRST_AXIS = {"group_norm", "pixel_shuffle", "pixel_unshuffle", "grid_sampler", "grid_sampler_2d", *BATCHED}
"""What takes a batch by its first axis, and treats each entry of it alone."""
SEVERAL_INPUTS = {"grid_sampler", "grid_sampler_2d", "max_unpool2d", *(f"{kind}_cell" for kind in CELLS)}
"""What has samples in others of its inputs, too."""
SEVERAL = -1
"""In the place of an axis, where an operation has several results."""
END = (1 << 63) - 1
"""Where a slice ends that leaves nothing out."""


def can_pad(flat: FlatModule, batch: ClientBatches, whole: bool = False) -> bool:
    """Whether padded batches give what batches of their own length do; `whole`: in all that the
    module returns."""
    most = batch.mask_CB.shape[1]
    if most < 3:
        return False
    try:
        one, two, all_of_them = (
            capture(flat, map_tensors(lambda each: each[0, :length], batch.inputs_CB), whole) for length in (1, 2, most)
        )
    except Exception as problem:
        pass_on_no_room(problem)
        return False  # what is wrong is said where it is tried in earnest
    # one sample may be left as it is where several are made of it
    told = [[op for op in each.signature if op not in ONE_AS_MANY] for each in (one, two)]
    alike = told[0] == told[1] and two.signature == all_of_them.signature
    alike = alike and len(one.outputs) == len(two.outputs) == len(all_of_them.outputs)
    return alike and SampleFlow(two, all_of_them, most).alone()


class SampleAxis(NamedTuple):
    """Where the samples are in a value."""

    axis: int
    outer: int = 1
    """How often all of them follow on each other within the axis: more than once where another
    axis was merged with theirs in front of it."""
    inner: int = 1
    """Entries of the axis that belong to one sample."""


class SamplesMix(Exception):
    """An operation that is not known to treat every sample alone."""


Sources = Mapping[fx.Node, SampleAxis]
"""An operation's inputs that hold samples."""


class SampleFlow:
    """The samples' way through a recording with batches of two samples, held against one with
    more."""

    def __init__(self, two: CapturedGraph, more: CapturedGraph, length: int):
        self._recording, self._length = two, length
        pairs = [*zip(two.nodes, more.nodes, strict=True)]
        pairs += [*zip(two.given, more.given, strict=True), *zip(two.inputs, more.inputs, strict=True)]
        pairs += [*zip(two.constants, more.constants, strict=True)]
        self._other = dict(pairs)
        self._at: dict[fx.Node, SampleAxis | None] = {}
        self._numbers: set[fx.Node] = set()
        """Nodes whose values are the samples' own numbers."""

    def alone(self) -> bool:
        """Whether nothing looks beyond a sample."""
        known = self._recording
        if known.written:
            return False
        try:
            self._at |= dict.fromkeys([*known.given, *known.constants])
            for node in known.inputs:
                self._at[node] = SampleAxis(0) if self._axis(node) == 0 else None
            for node in known.nodes:
                self._at[node] = self._through(node)
        except SamplesMix:
            return False
        return all(self._at[each] == SampleAxis(0) for each in known.outputs)

    def _through(self, node: fx.Node) -> SampleAxis | None:
        """Where an operation leaves the samples."""
        name = str(op_name(node)).removesuffix("_")
        sources = {each: at for each in node.all_input_nodes if (at := self._at[each]) is not None}
        if node.target is operator.getitem:
            return self._part(node)
        self._demand(self._has_same_arguments(node, name))
        axis = self._axis(node) if isinstance(node.meta.get("val"), Tensor) else SEVERAL
        if axis is None or not (sources or name in CONSTANT_FACTORIES | INDEX_FACTORIES | EXPAND_OPS):
            self._demand(axis in (None, SEVERAL) and (not sources or name in CONSTANT_FACTORIES))
            return None
        if name in CONSTANT_FACTORIES | INDEX_FACTORIES or not sources:
            self._demand(name not in INDEX_FACTORIES or axis == 0)
            if name == "arange" and [each for each in node.args if each != 2] in ([], [0], [0, 1]):
                self._numbers.add(node)
            return self._checked(node, SampleAxis(axis, 1, _shape(node)[axis] // 2))
        self._demand(self._is_alone(node, name, sources))
        if (
            name in RESHAPE_OPS | ELEMENTWISE_OPS
            and node.all_input_nodes[0] in self._numbers
            and not name.endswith("like")
        ):
            self._numbers.add(node)
        if name in RESHAPE_OPS:
            return self._viewed(node, axis)
        kinds = {at._replace(axis=axis) for at in sources.values()}
        self._demand(len(kinds) == 1)
        return kinds.pop() if axis == SEVERAL else self._checked(node, kinds.pop())

    def _part(self, node: fx.Node) -> SampleAxis | None:
        """Where the samples are in one of an operation's several results."""
        of_all, axis = self._at[node.all_input_nodes[0]], self._axis(node)
        self._demand((of_all is None) == (axis is None) or not node.users)
        return None if of_all is None or axis is None else self._checked(node, of_all._replace(axis=axis))

    def _demand(self, is_so: bool) -> None:
        if not is_so:
            raise SamplesMix

    def _axis(self, node: fx.Node) -> int | None:
        """The axis whose length goes with the number of samples."""
        ours, theirs = _shape(node), _shape(self._other[node])
        self._demand(len(ours) == len(theirs))
        differing = [axis for axis, sizes in enumerate(zip(ours, theirs, strict=True)) if sizes[0] != sizes[1]]
        self._demand(len(differing) < 2)
        return differing[0] if differing else None

    def _checked(self, node: fx.Node, at: SampleAxis) -> SampleAxis:
        """This, if it explains the shapes."""
        own = at.outer * at.inner
        sizes = _shape(node)[at.axis], _shape(self._other[node])[at.axis]
        self._demand(sizes == (2 * own, self._length * own))
        return at

    def _viewed(self, node: fx.Node, axis: int) -> SampleAxis:
        """As many values lie in front of the samples as before."""
        given = node.all_input_nodes[0]
        at = self._at[given]
        assert at is not None
        outer, rest = divmod(math.prod(_shape(given)[: at.axis]) * at.outer, math.prod(_shape(node)[:axis]))
        self._demand(rest == 0 and outer > 0)
        return self._checked(node, SampleAxis(axis, outer, _shape(node)[axis] // (2 * outer)))

    def _has_same_arguments(self, node: fx.Node, name: str) -> bool:
        """Whether numbers among the arguments are the same, but for sizes."""
        sized = name in RESHAPE_OPS | EXPAND_OPS | CONSTANT_FACTORIES | INDEX_FACTORIES
        pairs = [*zip(_numbers(node), _numbers(self._other[node]), strict=True)]
        if name == "arange" and self._axis(node) is not None:
            del pairs[min(len(node.args) - 1, 1)]  # where it ends
        return all(ours == theirs or (isinstance(ours, list) and sized) for ours, theirs in pairs)

    # -- what is known of operations ---------------------------------------------------------------

    def _is_alone(self, node: fx.Node, name: str, sources: Sources) -> bool:
        """Whether an operation treats every sample alone."""
        op: Any = node.target
        if name in RESHAPE_OPS | TRANSPOSE_OPS:
            return node.all_input_nodes[0] in sources
        if name in BY_AXIS or name in REDUCING or name in BY_INDEX:
            return self._by_axis(node, name, sources)
        if f"{name}_" in RANDOM_RULES or name in RANDOM_RULES:
            in_front = all(at.axis == 0 and at.outer == 1 for at in sources.values())
            return in_front and name not in ("randperm", "multinomial") and self._aligned(node, sources)
        if name in RULES:
            return RULES[name](self, node, sources)
        if name.startswith("conv") or name in FIRST_AXIS:
            return self._first_axis(node, sources, BATCHED.get(name))
        return name in ELEMENTWISE_OPS or (self._aligned(node, sources) and (name in EXPAND_OPS or is_pointwise(op)))

    def _right(self, node: fx.Node, sources: Sources) -> int:
        """How many axes stand behind that of the samples."""
        return len(_shape(node)) - 1 - sources[node].axis

    def _aligned(self, node: fx.Node, sources: Sources) -> bool:
        """Whether samples meet themselves where shapes are brought together."""
        return len({self._right(each, sources) for each in sources}) == 1

    def _first_axis(self, node: fx.Node, sources: Sources, rank: int | None = None) -> bool:
        """Whether samples are on the first axis of the inputs that come before the parameters, and
        in no parameter."""
        first, *others = node.all_input_nodes
        if str(op_name(node)).startswith("conv"):
            rank, others = len(_shape(others[0])), []
        known = {first, *others[:2]} if str(op_name(node)) in SEVERAL_INPUTS else {first}
        right_rank = rank is None or len(_shape(first)) == rank
        return (
            first in sources and right_rank and set(sources) <= known and all(at.axis == 0 for at in sources.values())
        )

    def _by_axis(self, node: fx.Node, name: str, sources: Sources) -> bool:
        """Whether the axes that an operation names are others than that of the samples."""
        op: Any = node.target
        given = bind_arguments(op, node.args, node.kwargs)
        named = [value for key, value in given.items() if key in DIMS]
        dims = [dim for value in named for dim in (value if isinstance(value, list | tuple) else [value])]
        ranks = {len(_shape(each)) for each in sources}
        places = {at.axis for at in sources.values()}
        if not dims or len(places) > 1 or len(ranks) > 1 or not all(isinstance(dim, int) for dim in dims):
            return False
        (place,), (rank,) = places, ranks
        if name == "stack":
            return True
        if name == "slice" and (given["start"] or 0, given["end"] or END, given["step"]) == (0, END, 1):
            return True
        return all(dim % rank != place for dim in dims)

    def _product(self, left: Any, right: Any, sources: Sources) -> bool:
        """Of matrices: samples are no axis that is summed over, and in both they are in front of
        the matrices."""
        places = [self._right(each, sources) if each in sources else None for each in (left, right)]
        if places[0] is not None and places[1] is not None:
            return places[0] == places[1] >= 2
        if places[0] is not None:
            return places[0] >= 1
        return places[1] is not None and places[1] != 1 and len(_shape(right)) > 1

    def _added_product(self, node: fx.Node, sources: Sources) -> bool:
        added, left, right = node.all_input_nodes[:3]
        if len(set(node.all_input_nodes)) < 3 or not self._product(left, right, sources):
            return False
        return added not in sources or sources[added].axis == self._axis(node)

    def _einsum(self, node: fx.Node, sources: Sources) -> bool:
        equation: Any = node.args[0]
        left, arrow, out = equation.replace(" ", "").partition("->")
        operands: Any = node.args[1]
        if not arrow or "." in equation:
            return False
        letters = {
            part[sources[each].axis] for part, each in zip(left.split(","), operands, strict=True) if each in sources
        }
        return len(letters) == 1 and letters <= set(out)

    def _attention(self, node: fx.Node, sources: Sources) -> bool:
        given = node.all_input_nodes
        draws = len(node.args) > 4 and bool(node.args[4])
        if draws and any(at.axis != 0 or at.outer != 1 for at in sources.values()):
            return False
        return set(given[:3]) <= set(sources) and self._aligned(node, sources) and self._right(given[0], sources) >= 2

    def _recurrent(self, node: fx.Node, sources: Sources) -> bool:
        x, _, _, _, count, dropout, train, _, *first = node.args
        draws = dropout and train and isinstance(count, int) and count > 1
        is_first = bool(first and first[0]) and isinstance(x, fx.Node) and sources.get(x) == SampleAxis(0)
        return is_first and len(_shape(x)) == 3 and not draws

    def _indexed(self, node: fx.Node, sources: Sources) -> bool:
        """From an axis of every sample by places that all share or that are its own, or from what
        all share by places of each sample."""
        x: Any = node.args[0]
        indices: Any = node.args[1]
        places = [number for number, each in enumerate(indices) if each is not None]
        if x not in sources:
            return self._aligned(node, sources)
        if sources[x] == SampleAxis(0) and indices[0] in self._numbers:
            return self._aligned(node, {each: sources[each] for each in indices if each in sources})
        adjacent = places == [*range(places[0], places[-1] + 1)]
        return set(sources) == {x} and sources[x].axis not in places and adjacent


def _shape(node: Any) -> Any:
    return node.meta["val"].shape if isinstance(node.meta.get("val"), Tensor) else ()


def _numbers(node: fx.Node) -> list[Any]:
    """What an operation is given besides tensors."""
    found: list[Any] = []
    blank: Callable[[fx.Node], None] = lambda each: None  # noqa: E731
    for value in (*node.args, *node.kwargs.values()):
        plain = fx.node.map_arg(value, blank)
        found.append(list(plain) if isinstance(plain, list | tuple) else plain)
    return found


def _behind(count: Callable[[fx.Node], int]) -> Callable[[SampleFlow, fx.Node, Sources], bool]:
    """Of an operation on so many axes at the end of its first input."""

    def rule(followed: SampleFlow, node: fx.Node, sources: Sources) -> bool:
        first = node.all_input_nodes[0]
        return set(sources) == {first} and followed._right(first, sources) >= count(node)

    return rule


def _evaluating(followed: SampleFlow, node: fx.Node, sources: Sources) -> bool:
    """A norm by statistics that it keeps and does not change."""
    return not node.args[5] and followed._first_axis(node, sources)


def _by_instance(followed: SampleFlow, node: fx.Node, sources: Sources) -> bool:
    return node.args[3] is None and followed._first_axis(node, sources)


RULES: dict[str, Callable[[SampleFlow, fx.Node, Sources], bool]] = {
    **dict.fromkeys(CELLS, SampleFlow._recurrent),
    **{f"{kind}_cell": SampleFlow._first_axis for kind in CELLS},
    **dict.fromkeys(("linear", "cdist"), _behind(lambda _: 1)),
    **dict.fromkeys(
        ("matmul", "mm", "bmm"), lambda the, node, sources: the._product(node.args[0], node.args[1], sources)
    ),
    **dict.fromkeys(("addmm", "baddbmm"), SampleFlow._added_product),
    **dict.fromkeys(("layer_norm", "rms_norm"), _behind(lambda node: len(node.args[1]))),  # type: ignore[arg-type]
    "pad": _behind(lambda node: len(node.args[1]) // 2),  # type: ignore[arg-type]
    # gradients divided by how often a code stands in the batch are not a sample's own
    "embedding": lambda the, node, sources: node.args[0] not in sources and not (node.args[3:4] or [False])[0],
    "einsum": SampleFlow._einsum,
    "scaled_dot_product_attention": SampleFlow._attention,
    "index": SampleFlow._indexed,
    "batch_norm": _evaluating,
    "instance_norm": _by_instance,
}
