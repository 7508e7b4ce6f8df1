"""Losses by name, import path or function, and the scores in a model's outputs."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stratafl.base.errors import InvalidInput, UserCodeError, convert_errors, unknown_name
from stratafl.base.rng import ALIKE, seeded_rng
from stratafl.base.tracebacks import definition_frame
from stratafl.base.user_code import load_attribute
from stratafl.base.validation import find_name, name_and_params

LOGITS = "logits"

WANTED = f"must be a tensor of scores, a table or an object with {LOGITS!r}, or a tuple whose first entry is one"


def find_scores(outputs: Any) -> Tensor | None:
    """The scores in a model's outputs, or None."""
    scores = outputs
    if isinstance(outputs, Mapping):
        scores = outputs.get(LOGITS)
    elif hasattr(outputs, LOGITS):
        scores = getattr(outputs, LOGITS)
    elif isinstance(outputs, tuple | list) and outputs:
        scores = outputs[0]
    return scores if isinstance(scores, Tensor) else None


def require_scores(outputs: Any) -> Tensor:
    """The scores in a model's outputs; raises TypeError if there are none."""
    scores = find_scores(outputs)
    if scores is None:
        raise TypeError(f"{describe_outputs(outputs)} holds no scores: a model's output {WANTED}")
    return scores


def describe_outputs(outputs: Any) -> str:
    """The type and keys of a model's outputs, for errors."""
    keys = f" of {', '.join(map(str, list(outputs)[:5]))}" if isinstance(outputs, Mapping) else ""
    return f"{type(outputs).__name__}{keys}"


class NotConcatenable(Exception):
    """A model's outputs for several batches cannot be concatenated."""


def concatenate_outputs(parts: Sequence[Any], lengths: Sequence[int]) -> Any:
    """Concatenate a model's outputs for several batches of these lengths.

    Raises NotConcatenable if a tensor does not have one entry per sample.
    """

    def concatenate(tensors: Sequence[Tensor]) -> Tensor:
        if any(tensor.shape[:1] != (length,) for tensor, length in zip(tensors, lengths, strict=True)):
            raise NotConcatenable
        return torch.cat(list(tensors))

    return _map_structure(concatenate, parts)


def map_outputs(outputs: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Replace every tensor in a model's outputs. Objects of unknown structure are left as they
    are."""
    return _map_structure(lambda tensors: function(tensors[0]), [outputs], keep_unknown=True)


def output_tensors(outputs: Any) -> list[Tensor]:
    """The tensors that `map_outputs` replaces, in the same order."""
    tensors: list[Tensor] = []

    def collect(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return tensor

    map_outputs(outputs, collect)
    return tensors


def _map_structure(
    function: Callable[[Sequence[Tensor]], Tensor], parts: Sequence[Any], keep_unknown: bool = False
) -> Any:
    """Outputs of the same structure as all parts, with `function` of the corresponding tensors.

    keep_unknown: whether an object of unknown structure is copied from the first part instead of
    raising NotConcatenable.
    """
    first = parts[0]
    if isinstance(first, Tensor):
        return function(parts)
    if isinstance(first, MutableMapping):
        table = copy.copy(first)
        for key in first:
            table[key] = _map_structure(function, [part[key] for part in parts], keep_unknown)
        return table
    if isinstance(first, tuple | list):
        entries = [_map_structure(function, entry, keep_unknown) for entry in zip(*parts, strict=True)]
        return type(first)(*entries) if hasattr(first, "_fields") else type(first)(entries)
    if first is None or isinstance(first, bool | int | float | str):
        if any(part != first for part in parts):
            raise NotConcatenable
        return first
    if not (dataclasses.is_dataclass(first) or hasattr(first, LOGITS)):
        if keep_unknown:
            return first
        raise NotConcatenable
    mapped = copy.copy(first)
    for name in vars(first):
        attributes = [getattr(part, name) for part in parts]
        object.__setattr__(mapped, name, _map_structure(function, attributes, keep_unknown))
    return mapped


def output_bytes(outputs: Any) -> int:
    """Size in bytes of all tensors in a model's outputs."""
    if isinstance(outputs, Tensor):
        return outputs.nbytes
    if isinstance(outputs, tuple | list):
        return sum(map(output_bytes, outputs))
    table = outputs if isinstance(outputs, Mapping) else getattr(outputs, "__dict__", {})
    return sum(map(output_bytes, table.values()))


Loss = Callable[[Any, Tensor], Tensor]
"""(outputs of the model, targets) -> one number with a gradient."""

LossLike = str | Mapping[str, Any] | Loss
"""A name or import path, a table of one with its parameters, or a function."""


IGNORED = -100
"""Label that PyTorch's losses ignore by default."""

OF_CLASSES = (
    *(F.cross_entropy, F.nll_loss, F.multi_margin_loss),
    *(nn.CrossEntropyLoss.forward, nn.NLLLoss.forward, nn.MultiMarginLoss.forward),
)
"""Losses whose integer targets are classes; modules by their `forward`, which a user's subclass may
override."""

OF_VALUES = (
    *(F.mse_loss, F.l1_loss, F.huber_loss, F.smooth_l1_loss, F.poisson_nll_loss, F.kl_div, F.soft_margin_loss),
    *(nn.MSELoss.forward, nn.L1Loss.forward, nn.HuberLoss.forward, nn.SmoothL1Loss.forward),
    *(nn.PoissonNLLLoss.forward, nn.KLDivLoss.forward, nn.SoftMarginLoss.forward),
)
"""Losses of outputs and targets of the same shape, which would broadcast others."""


@dataclass(frozen=True)
class LossOnScores:
    """A loss of tensors, called with the scores in a model's outputs."""

    loss: Callable[[Tensor, Tensor], Tensor]

    def __call__(self, outputs: Any, targets: Tensor) -> Tensor:
        values = outputs if isinstance(outputs, Tensor) else require_scores(outputs)
        if _is_one_of(self, OF_VALUES):
            values, targets = match_shapes(values, targets)
        return self.loss(values, targets)

    @property
    def __name__(self) -> str:
        loss = _base_loss(self.loss)
        return str(getattr(loss, "__name__", loss))


def unwrap_loss(loss: Loss) -> Loss:
    """The loss inside a `LossOnScores`, or the loss itself."""
    return loss.loss if isinstance(loss, LossOnScores) else loss


def check_loss_value(loss: Loss, value: object) -> Tensor:
    """Return the value of a loss; raises UserCodeError unless it is one number with a gradient.

    The dry run of a loss on a few samples does not show its values for others.
    """
    if isinstance(value, Tensor) and value.numel() == 1 and value.requires_grad:
        return value
    description = type(value).__name__
    if isinstance(value, Tensor):
        is_number = value.numel() == 1
        description = "a number without a gradient" if is_number else f"a tensor of shape {tuple(value.shape)}"
    text = f"gave {description} for some samples, and must give one number with a gradient for all"
    raise UserCodeError("loss", getattr(loss, "__name__", loss), text, definition_frame(unwrap_loss(loss)))


def is_additive(loss: Loss) -> bool:
    """Whether the loss of a data set is the mean of its parts' losses, weighted by their numbers of
    labels that are not ignored."""
    return unwrap_loss(loss) is F.cross_entropy


def takes_classes(loss: Loss) -> bool:
    """Whether the loss is one of PyTorch's functions or modules whose integer targets are
    classes."""
    return _is_one_of(loss, OF_CLASSES)


def target_of_no(loss: Loss) -> int | None:
    """Target of the negative class in PyTorch's binary losses, 0 or -1; None for other losses. The
    target of the positive class is 1."""
    return 0 if _is_one_of(loss, OF_SHARES) else -1 if _is_one_of(loss, OF_SIGNS) else None


def _is_one_of(loss: Loss, functions: Collection[Callable[..., Any]]) -> bool:
    """Whether a loss without its parameters is one of these functions, or a module with one of
    these as its `forward`."""
    loss = _base_loss(loss)
    function = getattr(type(loss), "forward", None) if isinstance(loss, nn.Module) else loss
    return any(function is candidate for candidate in functions)


def ignore_index(loss: Loss) -> int:
    """The label that a loss ignores."""
    unwrapped = unwrap_loss(loss)
    params = unwrapped.keywords if isinstance(unwrapped, functools.partial) else {}
    label = params.get("ignore_index", getattr(_base_loss(loss), "ignore_index", IGNORED))
    return label if isinstance(label, int) else IGNORED


def _base_loss(loss: Loss) -> Callable[..., Any]:
    """The function or module of a loss without its parameters."""
    loss = unwrap_loss(loss)
    while isinstance(loss, functools.partial):
        loss = loss.func
    owner = getattr(loss, "__self__", None)
    return owner if isinstance(owner, nn.Module) and loss == owner.forward else loss


def match_shapes(values: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Predicted values and targets with the same shape and type.

    Values of shape (N, 1) match targets of shape (N,); other shapes raise, where PyTorch would
    broadcast.
    """
    if values.shape == (*targets.shape, 1):
        values = values.squeeze(-1)
    if values.shape != targets.shape:
        shapes = f"{tuple(values.shape)} and {tuple(targets.shape)}"
        raise ValueError(f"outputs and targets must be of one shape, and are of {shapes}")
    return values, targets.to(values.dtype)


def _bce_with_logits(values: Tensor, targets: Tensor, pos_weight: float | None = None) -> Tensor:
    """Binary cross-entropy of scores; pos_weight: weight of the positive class."""
    weight = None if pos_weight is None else torch.as_tensor(pos_weight).to(values)
    return F.binary_cross_entropy_with_logits(*match_shapes(values, targets), pos_weight=weight)


OF_SHARES = (
    *(_bce_with_logits, F.binary_cross_entropy_with_logits, F.binary_cross_entropy, F.multilabel_soft_margin_loss),
    *(nn.BCEWithLogitsLoss.forward, nn.BCELoss.forward, nn.MultiLabelSoftMarginLoss.forward),
)
"""Binary losses with targets from 0 to 1."""

OF_SIGNS = (
    *(F.soft_margin_loss, F.hinge_embedding_loss),
    *(nn.SoftMarginLoss.forward, nn.HingeEmbeddingLoss.forward),
)
"""Binary losses with targets -1 and 1."""

LOSSES: dict[str, tuple[Callable[..., Tensor], tuple[str, ...]]] = {
    "cross_entropy": (F.cross_entropy, ("label_smoothing", "ignore_index")),
    "nll": (F.nll_loss, ("ignore_index",)),
    "bce_with_logits": (_bce_with_logits, ("pos_weight",)),
    "mse": (F.mse_loss, ()),
    "l1": (F.l1_loss, ()),
    "huber": (F.huber_loss, ("delta",)),
    "smooth_l1": (F.smooth_l1_loss, ("beta",)),
    "poisson_nll": (F.poisson_nll_loss, ("log_input", "full")),
}
"""Losses by name, and the parameters that each of them takes."""


def parse_loss(loss: LossLike | None, field: str = "loss") -> Loss:
    """Parse a loss; None is cross-entropy."""
    if loss is None:
        return LossOnScores(F.cross_entropy)
    if not isinstance(loss, str | Mapping):
        if not callable(loss):
            raise InvalidInput(field, loss, "must be a name, a table with one, or a function (outputs, targets)")
        if inspect.isclass(loss):
            raise InvalidInput(field, loss.__name__, f"is a class: give an object of it, {loss.__name__}()")
        return LossOnScores(loss) if _is_from_torch(loss) else loss
    name, params = name_and_params(field, loss)
    if ":" in name:
        return parse_loss(load_user_object(field, name, params), field)
    function, allowed = LOSSES[find_name(field, name, LOSSES)]
    for key in params:
        if key not in allowed:
            raise unknown_name(f"{field} key", key, allowed)
    return LossOnScores(functools.partial(function, **params) if params else function)


def load_user_object(field: str, path: str, params: Mapping[str, Any]) -> Any:
    """Load an object by its import path: an instance of a class, or a function with the parameters
    bound."""
    target = load_attribute(field, path)
    with convert_errors(field, path, "does not say what it takes"):
        signature = inspect.signature(target)
    try:
        signature.bind_partial(**params)
    except TypeError as problem:
        raise InvalidInput(field, path, f"cannot be made: {problem}") from None
    if inspect.isclass(target):
        with convert_errors(field, path, "cannot be made"), seeded_rng(ALIKE):
            return target(**params)
    return functools.partial(target, **params) if params else target


def _is_from_torch(loss: Loss) -> bool:
    """Whether the loss is PyTorch's own, which takes tensors only."""
    loss = _base_loss(loss)
    module = type(loss).__module__ if isinstance(loss, nn.Module) else getattr(loss, "__module__", None)
    return isinstance(module, str) and module.partition(".")[0] == "torch"
