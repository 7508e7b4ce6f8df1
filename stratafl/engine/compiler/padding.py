"""Proof that a module treats every sample of a batch alone, so that batches may be padded.

Captured graphs, of batches of one, two and more samples, are compared, and the sample axis is
followed from value to value, also where it is merged with other axes. Padding is safe if every
operation is known not to combine samples; an unknown operation counts as one that does. Random
values must have the samples as first axis: then those of a sample do not depend on how many follow.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor, fx

from stratafl.base.errors import reraise_out_of_memory
from stratafl.core.flat_module import FlatModule
from stratafl.data.inputs import map_tensors
from stratafl.engine.batches import ClientBatches
from stratafl.engine.compiler.batching_rules import DIMS, is_pointwise
from stratafl.engine.compiler.graph import RANDOM_OPS, CapturedGraph, capture, node_arguments, op_name
from stratafl.engine.compiler.recurrent_rules import CELLS

DIM_OPS = {
    "softmax", "_softmax", "log_softmax", "_log_softmax", "cumsum", "cumprod", "logcumsumexp", "flip", "roll",
    "transpose", "swapaxes", "swapdims", "select", "slice", "unsqueeze", "squeeze", "narrow",
    "split", "split_with_sizes", "chunk", "unbind", "tensor_split", "unfold", "flatten", "unflatten", "movedim",
    "moveaxis", "cat", "concat", "concatenate", "stack", "gather", "scatter", "scatter_add", "topk", "sort", "argsort",
    "diff", "glu", "diagonal", "repeat_interleave", "cosine_similarity", "kthvalue", "cummax", "cummin",
    "take_along_dim", "linalg_cross", "select_scatter", "slice_scatter", "scatter_reduce", "linalg_matrix_norm",
    "softmin", "split_copy", "fft_fft", "fft_rfft", "fft_ifft", "fft_irfft", "fft_fft2", "fft_ifft2", "fft_rfft2",
    "fft_irfft2", "fft_fftn", "fft_ifftn", "sum", "mean", "amax", "amin", "prod", "any", "all", "argmax", "argmin",
    "var", "std", "logsumexp", "norm", "linalg_vector_norm", "linalg_norm", "max", "min", "var_mean", "std_mean",
    "nansum", "nanmean", "count_nonzero", "median", "aminmax", "mode", "index_select", "index_add", "index_copy",
    "index_fill",
}  # fmt: skip
"""Operations that combine entries only along the axes that they name."""
BATCHED_RANKS = {
    **{f"{kind}_pool{dims}d": dims + 2 for dims in (1, 2, 3) for kind in ("max", "avg")},
    **{f"adaptive_{kind}_pool{dims}d": dims + 2 for dims in (1, 2, 3) for kind in ("max", "avg")},
    **{f"max_pool{dims}d_with_indices": dims + 2 for dims in (1, 2, 3)},
    **{f"{kind}_pad{dims}d": dims + 2 for dims in (1, 2, 3) for kind in ("reflection", "replication")},
    **{f"fractional_max_pool{dims}d": dims + 2 for dims in (2, 3)},
    **{f"upsample_{kind}1d": 3 for kind in ("nearest", "linear")},
    **{f"upsample_{kind}2d": 4 for kind in ("nearest", "bilinear", "bicubic")},
    **{f"upsample_{kind}3d": 5 for kind in ("nearest", "trilinear")},
    "_upsample_nearest_exact2d": 4, "grid_sampler": 4, "grid_sampler_2d": 4, "im2col": 4, "col2im": 3,
    "channel_shuffle": 4, "max_unpool2d": 4, "native_channel_shuffle": 4,
}  # fmt: skip
"""Rank that the input of an operation has if it is a batch; without a batch it is one less."""
FIRST_AXIS_OPS = {"group_norm", "pixel_shuffle", "pixel_unshuffle", *BATCHED_RANKS}
"""Operations besides convolutions that take the first axis as a batch of independent samples."""
SEVERAL_INPUTS = {"grid_sampler", "grid_sampler_2d", "max_unpool2d", *(f"{kind}_cell" for kind in CELLS)}
"""Those of them that have samples in up to three inputs."""
RESHAPE_OPS = {"view", "reshape", "_unsafe_view", "view_as", "reshape_as", "flatten", "unflatten", "unsqueeze", "ravel"}
"""Operations that keep all entries in their order."""
TRANSPOSE_OPS = {
    "permute", "transpose", "swapaxes", "swapdims", "movedim", "moveaxis", "t", "mT", "mH", "numpy_T", "adjoint",
}  # fmt: skip
EXPAND_OPS = {"expand", "expand_as", "broadcast_to", "repeat", "tile"}
OPTIONAL_OPS = {"aten.expand.default", "aten.expand_as.default"}
"""Operations that a module may leave out for a batch of one sample."""
CONSTANT_FACTORIES = {"zeros", "ones", "full", "empty", "new_zeros", "new_ones", "new_full", "new_empty"}
INDEX_FACTORIES = {"arange", "rand", "randn", "randint", "normal"}
"""Operations that create entries in order, so that the first do not depend on how many follow."""
FACTORIES = CONSTANT_FACTORIES | INDEX_FACTORIES
ELEMENTWISE_OPS = {
    "detach", "alias", "clone", "contiguous", "to", "_to_copy", "zeros_like", "ones_like", "full_like", "empty_like",
    "type_as", "prelu", "lift_fresh", "lift_fresh_copy", "zero", "one_hot", "view_as_real", "view_as_complex", "_conj",
    "resolve_conj",
}  # fmt: skip
"""Operations on each entry alone, besides pointwise ones."""
SEVERAL_RESULTS = -1
"""Stands for the axis of an operation with several results."""
SLICE_END = (1 << 63) - 1
WHOLE = (0, SLICE_END, 1)
"""Start, end and step of a slice that keeps all entries."""


def can_pad(flat: FlatModule, batch: ClientBatches, all_outputs: bool = False) -> bool:
    """Whether padding samples provably change no output of the others; `all_outputs`: check the
    module's whole output, not only its scores."""
    length = batch.mask_CB.shape[1]
    if length < 3:
        return False
    try:
        one, two, full = (
            capture(flat, map_tensors(lambda samples_CB: samples_CB[0, :size], batch.inputs_CB), all_outputs)
            for size in (1, 2, length)
        )
    except Exception as problem:
        reraise_out_of_memory(problem)
        return False  # the capture of the program will report the problem
    names_1, names_2 = ([op for op in graph.op_names if op not in OPTIONAL_OPS] for graph in (one, two))
    same_ops = names_1 == names_2 and two.op_names == full.op_names
    same_outputs = len(one.outputs) == len(two.outputs) == len(full.outputs)
    return same_ops and same_outputs and SampleFlow(two, full, length).is_independent()


class SampleAxis(NamedTuple):
    """Position of the samples in a value."""

    axis: int
    outer: int = 1
    """Repetitions of the batch along the axis, if an axis in front was merged with it."""
    inner: int = 1
    """Entries of the axis that belong to one sample."""


class SamplesMix(Exception):
    """An operation is not known to treat every sample alone."""


Sources = Mapping[fx.Node, SampleAxis]
"""Inputs of an operation that contain samples."""
Rule = Callable[["SampleFlow", fx.Node, Sources], bool]
"""Whether an operation treats every sample alone."""


class SampleFlow:
    """Propagates the sample axis through a captured graph of two samples, with the help of the
    shapes in a graph of `length` samples."""

    def __init__(self, two: CapturedGraph, more: CapturedGraph, length: int):
        self._graph, self._length = two, length
        self._other: dict[fx.Node, fx.Node] = {}
        """Nodes of the other graph."""
        for nodes in ("nodes", "parameters", "inputs", "constants"):
            self._other |= dict(zip(getattr(two, nodes), getattr(more, nodes), strict=True))
        self._samples: dict[fx.Node, SampleAxis | None] = {}
        self._positions: set[fx.Node] = set()
        """Nodes whose values are the positions 0, 1, ... of the samples in the batch."""

    def is_independent(self) -> bool:
        """Whether no sample of the outputs depends on other samples of the inputs."""
        graph = self._graph
        if graph.mutated_buffers:
            return False
        try:
            self._samples |= dict.fromkeys([*graph.parameters, *graph.constants])
            for node in graph.inputs:
                self._samples[node] = SampleAxis(0) if self._batch_axis(node) == 0 else None
            for node in graph.nodes:
                self._samples[node] = self._propagate(node)
        except SamplesMix:
            return False
        return all(self._samples[output] == SampleAxis(0) for output in graph.outputs)

    def _propagate(self, node: fx.Node) -> SampleAxis | None:
        """Position of the samples in the value of a node."""
        name = str(op_name(node)).removesuffix("_")
        sources = {source: at for source in node.all_input_nodes if (at := self._samples[source]) is not None}
        if node.target is operator.getitem:
            return self._propagate_part(node)
        self._require(self._has_same_arguments(node, name))
        axis = self._batch_axis(node) if isinstance(node.meta.get("val"), Tensor) else SEVERAL_RESULTS
        if axis is None or not (sources or name in FACTORIES | EXPAND_OPS):
            self._require(axis in (None, SEVERAL_RESULTS) and (not sources or name in CONSTANT_FACTORIES))
            return None
        if name in FACTORIES or not sources:
            self._require(name not in INDEX_FACTORIES or axis == 0)
            if name == "arange" and [arg for arg in node.args if arg != 2] in ([], [0], [0, 1]):
                self._positions.add(node)
            return self._check(node, SampleAxis(axis, 1, _shape(node)[axis] // 2))
        self._require(self._treats_alone(node, name, sources))
        source = node.all_input_nodes[0]
        if name in RESHAPE_OPS | ELEMENTWISE_OPS and source in self._positions and not name.endswith("like"):
            self._positions.add(node)
        if name in RESHAPE_OPS:
            # as many entries are in front of the samples as before
            before = math.prod(_shape(source)[: sources[source].axis]) * sources[source].outer
            outer, rest = divmod(before, math.prod(_shape(node)[:axis]))
            self._require(rest == 0 and outer > 0)
            return self._check(node, SampleAxis(axis, outer, _shape(node)[axis] // (2 * outer)))
        kinds = {at._replace(axis=axis) for at in sources.values()}
        self._require(len(kinds) == 1)
        return kinds.pop() if axis == SEVERAL_RESULTS else self._check(node, kinds.pop())

    def _propagate_part(self, node: fx.Node) -> SampleAxis | None:
        """Position of the samples in one of an operation's results."""
        at, axis = self._samples[node.all_input_nodes[0]], self._batch_axis(node)
        self._require((at is None) == (axis is None) or not node.users)
        return None if at is None or axis is None else self._check(node, at._replace(axis=axis))

    def _require(self, condition: bool) -> None:
        if not condition:
            raise SamplesMix

    def _batch_axis(self, node: fx.Node) -> int | None:
        """Axis whose size depends on the number of samples."""
        sizes, others = _shape(node), _shape(self._other[node])
        self._require(len(sizes) == len(others))
        differing = [axis for axis, size in enumerate(sizes) if size != others[axis]]
        self._require(len(differing) < 2)
        return differing[0] if differing else None

    def _check(self, node: fx.Node, at: SampleAxis) -> SampleAxis:
        """The position, if it explains the sizes of the axis in both graphs."""
        entries = at.outer * at.inner
        sizes = _shape(node)[at.axis], _shape(self._other[node])[at.axis]
        self._require(sizes == (2 * entries, self._length * entries))
        return at

    def _has_same_arguments(self, node: fx.Node, name: str) -> bool:
        """Whether the numbers among the arguments are the same in both graphs, except for sizes."""
        sized = name in RESHAPE_OPS | EXPAND_OPS | FACTORIES
        pairs = [*zip(_numbers(node), _numbers(self._other[node]), strict=True)]
        if name == "arange" and self._batch_axis(node) is not None:
            del pairs[min(len(node.args) - 1, 1)]  # its end
        return all(number == other or (isinstance(number, list) and sized) for number, other in pairs)

    # -- knowledge of operations -------------------------------------------------------------------

    def _treats_alone(self, node: fx.Node, name: str, sources: Sources) -> bool:
        """Whether an operation treats every sample alone."""
        if name in RESHAPE_OPS | TRANSPOSE_OPS:
            return node.all_input_nodes[0] in sources
        if name in DIM_OPS:
            return self._names_other_dims(node, name, sources)
        if f"{name}_" in RANDOM_OPS or name in RANDOM_OPS:
            in_front = all(at.axis == 0 and at.outer == 1 for at in sources.values())
            return in_front and name not in ("randperm", "multinomial") and self._are_aligned(sources)
        if name in RULES:
            return RULES[name](self, node, sources)
        if name.startswith("conv") or name in FIRST_AXIS_OPS:
            return self._first_axis(node, sources)
        if name in ELEMENTWISE_OPS:
            return True
        return self._are_aligned(sources) and (name in EXPAND_OPS or is_pointwise(node.target))

    def _trailing(self, node: fx.Node, sources: Sources) -> int:
        """Number of axes behind that of the samples."""
        return len(_shape(node)) - 1 - sources[node].axis

    def _are_aligned(self, sources: Sources) -> bool:
        """Whether the sample axes of all inputs broadcast against each other."""
        return len({self._trailing(source, sources) for source in sources}) == 1

    def _first_axis(self, node: fx.Node, sources: Sources) -> bool:
        """Whether samples are the first axis of the inputs in front of the parameters, and are in
        no parameter."""
        name, (first, *others) = str(op_name(node)), node.all_input_nodes
        rank = len(_shape(others[0])) if name.startswith("conv") else BATCHED_RANKS.get(name.removesuffix("_"))
        inputs = {first, *others[:2]} if name in SEVERAL_INPUTS else {first}
        has_batch = first in sources and (rank is None or len(_shape(first)) == rank)
        return has_batch and set(sources) <= inputs and all(at.axis == 0 for at in sources.values())

    def _names_other_dims(self, node: fx.Node, name: str, sources: Sources) -> bool:
        """Whether the axes that an operation names are not that of the samples."""
        arguments = node_arguments(node)
        named = [value for key, value in arguments.items() if key in DIMS]
        dims = [dim for value in named for dim in (value if isinstance(value, list | tuple) else [value])]
        ranks, axes = {len(_shape(source)) for source in sources}, {at.axis for at in sources.values()}
        if not dims or len(axes) > 1 or len(ranks) > 1 or not all(isinstance(dim, int) for dim in dims):
            return False
        (axis,), (rank,) = axes, ranks
        if name == "slice" and (arguments["start"] or 0, arguments["end"] or SLICE_END, arguments["step"]) == WHOLE:
            return True
        return name == "stack" or all(dim % rank != axis for dim in dims)

    def _is_product_alone(self, left: Any, right: Any, sources: Sources) -> bool:
        """Whether the sample axis of a matrix product is not summed over, and is in front of the
        matrices if both operands have it."""
        trailing = [self._trailing(operand, sources) if operand in sources else None for operand in (left, right)]
        if trailing[0] is not None:
            return trailing[0] >= 1 if trailing[1] is None else trailing[0] == trailing[1] >= 2
        return trailing[1] is not None and trailing[1] != 1 and len(_shape(right)) > 1


def _shape(node: Any) -> Any:
    return node.meta["val"].shape if isinstance(node.meta.get("val"), Tensor) else ()


def _numbers(node: fx.Node) -> list[Any]:
    """Arguments of a node with None in place of tensors."""
    no_tensor: Callable[[fx.Node], None] = lambda tensor: None  # noqa: E731
    values = [fx.node.map_arg(value, no_tensor) for value in (*node.args, *node.kwargs.values())]
    return [list(value) if isinstance(value, list | tuple) else value for value in values]


def _last_axes(count: Callable[[Any], int]) -> Rule:
    """Rule of an operation on the last axes of its first input; `count`: arguments -> how many."""

    def rule(flow: SampleFlow, node: fx.Node, sources: Sources) -> bool:
        first = node.all_input_nodes[0]
        return set(sources) == {first} and flow._trailing(first, sources) >= count(node.args)

    return rule


def _product(flow: SampleFlow, node: fx.Node, sources: Sources) -> bool:
    return flow._is_product_alone(node.args[0], node.args[1], sources)


def _added_product(flow: SampleFlow, node: fx.Node, sources: Sources) -> bool:
    added, left, right = node.all_input_nodes[:3]
    if len(set(node.all_input_nodes)) < 3 or not flow._is_product_alone(left, right, sources):
        return False
    return added not in sources or sources[added].axis == flow._batch_axis(node)


def _einsum(flow: SampleFlow, node: fx.Node, sources: Sources) -> bool:
    """Samples have one letter, which is in the result."""
    equation, operands = node.args[:2]
    left, arrow, right = str(equation).replace(" ", "").partition("->")
    if not arrow or "." in left + right:
        return False
    pairs: Any = zip(left.split(","), operands, strict=True)  # type: ignore[arg-type]
    letters = {letters[sources[operand].axis] for letters, operand in pairs if operand in sources}
    return len(letters) == 1 and letters <= set(right)


def _attention(flow: SampleFlow, node: fx.Node, sources: Sources) -> bool:
    drops = len(node.args) > 4 and bool(node.args[4])
    if drops and any(at.axis != 0 or at.outer != 1 for at in sources.values()):
        return False
    query_key_value = node.all_input_nodes[:3]
    has_all = set(query_key_value) <= set(sources)
    return has_all and flow._are_aligned(sources) and flow._trailing(query_key_value[0], sources) >= 2


def _recurrent(flow: SampleFlow, node: fx.Node, sources: Sources) -> bool:
    """Batches come first, and nothing drops out between layers."""
    x, _, _, _, layers, dropout, train, _, *batch_first = node.args
    drops = dropout and train and isinstance(layers, int) and layers > 1
    is_first = bool(batch_first and batch_first[0]) and isinstance(x, fx.Node) and sources.get(x) == SampleAxis(0)
    return is_first and len(_shape(x)) == 3 and not drops


def _index(flow: SampleFlow, node: fx.Node, sources: Sources) -> bool:
    """Indices into another axis of each sample, by shared indices or its own, or indices of samples
    into a shared value."""
    x: Any = node.args[0]
    indices: Any = node.args[1]
    axes = [axis for axis, index in enumerate(indices) if index is not None]
    if x not in sources:
        return flow._are_aligned(sources)
    if sources[x] == SampleAxis(0) and indices[0] in flow._positions:
        return flow._are_aligned({index: sources[index] for index in indices if index in sources})
    adjacent = axes == [*range(axes[0], axes[-1] + 1)]
    return set(sources) == {x} and sources[x].axis not in axes and adjacent


RULES: dict[str, Rule] = {
    **dict.fromkeys(CELLS, _recurrent),
    **{f"{kind}_cell": SampleFlow._first_axis for kind in CELLS},
    **dict.fromkeys(("linear", "cdist"), _last_axes(lambda args: 1)),
    **dict.fromkeys(("layer_norm", "rms_norm"), _last_axes(lambda args: len(args[1]))),
    "pad": _last_axes(lambda args: len(args[1]) // 2),
    **dict.fromkeys(("matmul", "mm", "bmm"), _product),
    **dict.fromkeys(("addmm", "baddbmm"), _added_product),
    # gradients scaled by the frequency of a code depend on the whole batch
    "embedding": lambda flow, node, sources: node.args[0] not in sources and not (node.args[3:4] or [False])[0],
    "einsum": _einsum,
    "scaled_dot_product_attention": _attention,
    "index": _index,
    # alone only with statistics that are not updated, or not kept
    "batch_norm": lambda flow, node, sources: not node.args[5] and flow._first_axis(node, sources),
    "instance_norm": lambda flow, node, sources: node.args[3] is None and flow._first_axis(node, sources),
}
