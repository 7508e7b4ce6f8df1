"""Losses by name, import path or function, and the scores in what a model returns."""

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
from stratafl.base.validation import name_and_params

LOGITS = "logits"

WANTED = f"must be a tensor of scores, a table or an object with {LOGITS!r}, or a tuple whose first entry is one"


def _scores_entry(outputs: Any) -> Any:
    """What should be the scores, in what a model returned that is no tensor; None where nothing
    should."""
    if isinstance(outputs, Mapping):
        return outputs.get(LOGITS)
    if hasattr(outputs, LOGITS):
        return getattr(outputs, LOGITS)
    return outputs[0] if isinstance(outputs, tuple | list) and outputs else None


def find_scores(outputs: Any) -> Tensor | None:
    """The scores in what a model returned; None where there are none."""
    found = outputs if isinstance(outputs, Tensor) else _scores_entry(outputs)
    return found if isinstance(found, Tensor) else None


def require_scores(outputs: Any) -> Tensor:
    """The scores in what a model returned, or the complaint."""
    found = find_scores(outputs)
    if found is None:
        raise TypeError(f"{describe_outputs(outputs)} holds no scores: a model's output {WANTED}")
    return found


def describe_outputs(outputs: Any) -> str:
    """What a model returned, in words."""
    keys = f" of {', '.join(map(str, list(outputs)[:5]))}" if isinstance(outputs, Mapping) else ""
    return f"{type(outputs).__name__}{keys}"


class NotConcatenable(Exception):
    """What a model returned for some samples cannot be put together with what it did for others."""


def concatenate_outputs(parts: Sequence[Any], lengths: Sequence[int]) -> Any:
    """What a model would have returned for all samples at once, from what it did for some at a
    time; `Apart` where something in it has no entry for each sample."""

    def together(tensors: Sequence[Tensor]) -> Tensor:
        if any(each.shape[:1] != (length,) for each, length in zip(tensors, lengths, strict=True)):
            raise NotConcatenable
        return torch.cat(list(tensors))

    return _merged(together, parts)


def map_outputs(outputs: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """A model's outputs with every tensor in them replaced. What is neither a table, a tuple, a
    data class nor something with scores is left as it is."""
    return _merged(lambda tensors: function(tensors[0]), [outputs], keeps=True)


def output_tensors(outputs: Any) -> list[Tensor]:
    """The tensors that `replaced` replaces, in its order."""
    found: list[Tensor] = []

    def noted(each: Tensor) -> Tensor:
        found.append(each)
        return each

    map_outputs(outputs, noted)
    return found


def _merged(function: Callable[[Sequence[Tensor]], Tensor], parts: Sequence[Any], keeps: bool = False) -> Any:
    """What several models' outputs are together, by a function of the tensors that stand in the
    same place; keeps: whether what is not known to hold tensors is the first's, and not `Apart`."""
    first = parts[0]
    if isinstance(first, Tensor):
        return function(parts)
    if isinstance(first, MutableMapping):
        made = copy.copy(first)
        for key in first:
            made[key] = _merged(function, [part[key] for part in parts], keeps)
        return made
    if isinstance(first, tuple | list):
        entries = [_merged(function, entry, keeps) for entry in zip(*parts, strict=True)]
        return type(first)(*entries) if hasattr(first, "_fields") else type(first)(entries)
    if first is None or isinstance(first, bool | int | float | str):
        if any(part != first for part in parts):
            raise NotConcatenable
        return first
    if not (dataclasses.is_dataclass(first) or hasattr(first, LOGITS)):
        if keeps:
            return first
        raise NotConcatenable
    made = copy.copy(first)
    for name in vars(first):
        object.__setattr__(made, name, _merged(function, [getattr(part, name) for part in parts], keeps))
    return made


def output_bytes(outputs: Any) -> int:
    """Bytes of all tensors in what a model returned."""
    if isinstance(outputs, Tensor):
        return outputs.nbytes
    if isinstance(outputs, Mapping):
        inside: Any = outputs.values()
    elif isinstance(outputs, tuple | list):
        inside = outputs
    else:
        inside = vars(outputs).values() if hasattr(outputs, "__dict__") else ()
    return sum(map(output_bytes, inside))


Loss = Callable[[Any, Tensor], Tensor]
"""(what a model returned, targets) -> one number with a gradient."""

LossLike = str | Mapping[str, Any] | Loss
"""A name or an import path, a table of one with its parameters, or the function itself."""


IGNORED = -100
"""The label that the library's losses pass over, unless they are told of another."""

OF_CLASSES = (
    *(F.cross_entropy, F.nll_loss, F.multi_margin_loss),
    *(nn.CrossEntropyLoss.forward, nn.NLLLoss.forward, nn.MultiMarginLoss.forward),
)
"""Losses whose whole-number targets are classes; of modules what they do, which a user's own kind
may do otherwise."""

OF_VALUES = (
    *(F.mse_loss, F.l1_loss, F.huber_loss, F.smooth_l1_loss, F.poisson_nll_loss, F.kl_div, F.soft_margin_loss),
    *(nn.MSELoss.forward, nn.L1Loss.forward, nn.HuberLoss.forward, nn.SmoothL1Loss.forward),
    *(nn.PoissonNLLLoss.forward, nn.KLDivLoss.forward, nn.SoftMarginLoss.forward),
)
"""Losses of outputs and targets of one shape, which spread others over each other."""


@dataclass(frozen=True)
class LossOnScores:
    """A loss of tensors, given the scores in whatever a model returned."""

    loss: Callable[[Tensor, Tensor], Tensor]

    def __call__(self, outputs: Any, targets: Tensor) -> Tensor:
        values = outputs if isinstance(outputs, Tensor) else require_scores(outputs)
        if _is_one_of(self, OF_VALUES):
            values, targets = match_shapes(values, targets)
        return self.loss(values, targets)

    @property
    def __name__(self) -> str:
        loss = _called(self.loss)
        return str(getattr(loss, "__name__", loss))


def unwrap_loss(loss: Loss) -> Loss:
    """The loss itself, without what hands it the scores."""
    return loss.loss if isinstance(loss, LossOnScores) else loss


def check_loss_value(loss: Loss, value: object) -> Tensor:
    """What a loss gave, if there is a gradient of it: one that was tried on a few samples may still
    give something else on others."""
    if isinstance(value, Tensor) and value.numel() == 1 and value.requires_grad:
        return value
    given = type(value).__name__
    if isinstance(value, Tensor):
        given = "a number without a gradient" if value.numel() == 1 else f"a tensor of shape {tuple(value.shape)}"
    told = f"gave {given} for some samples, and must give one number with a gradient for all"
    raise UserCodeError("loss", getattr(loss, "__name__", loss), told, definition_frame(unwrap_loss(loss)))


def is_additive(loss: Loss) -> bool:
    """Whether the losses of parts give that of the whole, each weighted by its labels that are not
    ignored."""
    return unwrap_loss(loss) is F.cross_entropy


def takes_classes(loss: Loss) -> bool:
    """Whether it is one of PyTorch's losses whose whole-number targets are classes, as its function
    or its module, with parameters or without."""
    return _is_one_of(loss, OF_CLASSES)


def target_of_no(loss: Loss) -> int | None:
    """The target that stands for no in one of PyTorch's losses of yes or no, 0 or -1; None for any
    other loss. That of yes is 1."""
    return 0 if _is_one_of(loss, OF_SHARES) else -1 if _is_one_of(loss, OF_SIGNS) else None


def _is_one_of(loss: Loss, known: Collection[Callable[..., Any]]) -> bool:
    """Whether it comes down to one of these functions, or does what one of these modules does."""
    loss = _called(loss)
    own = getattr(type(loss), "forward", None) if isinstance(loss, nn.Module) else loss
    return any(own is each for each in known)


def ignore_index(loss: Loss) -> int:
    """The label a loss passes over."""
    own = unwrap_loss(loss)
    given = own.keywords if isinstance(own, functools.partial) else {}
    label = given.get("ignore_index", getattr(_called(loss), "ignore_index", IGNORED))
    return label if isinstance(label, int) else IGNORED


def _called(loss: Loss) -> Callable[..., Any]:
    """The function or module that a loss comes down to, without its parameters."""
    loss = unwrap_loss(loss)
    called = loss.func if isinstance(loss, functools.partial) else loss
    owner = getattr(called, "__self__", None)
    return owner if isinstance(owner, nn.Module) and called == owner.forward else called


def match_shapes(values: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Predicted values and targets of one shape and type: a model's single column of values is for
    targets without one, which the library would spread over each other."""
    if values.shape == (*targets.shape, 1):
        values = values.squeeze(-1)
    if values.shape != targets.shape:
        shapes = f"{tuple(values.shape)} and {tuple(targets.shape)}"
        raise ValueError(f"outputs and targets must be of one shape, and are of {shapes}")
    return values, targets.to(values.dtype)


def _of_values(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A loss of values and targets that must be of one shape."""

    @functools.wraps(loss)
    def matching(values: Tensor, targets: Tensor, **params: Any) -> Tensor:
        return loss(*match_shapes(values, targets), **params)

    return matching


def _bce_with_logits(values: Tensor, targets: Tensor, pos_weight: float | None = None) -> Tensor:
    """Binary cross entropy of yes-or-no scores; pos_weight: what a yes counts for."""
    weight = None if pos_weight is None else torch.as_tensor(pos_weight).to(values)
    return F.binary_cross_entropy_with_logits(*match_shapes(values, targets), pos_weight=weight)


OF_SHARES = (
    *(_bce_with_logits, F.binary_cross_entropy_with_logits, F.binary_cross_entropy, F.multilabel_soft_margin_loss),
    *(nn.BCEWithLogitsLoss.forward, nn.BCELoss.forward, nn.MultiLabelSoftMarginLoss.forward),
)
"""Losses of yes or no whose targets are 0 and 1, or lie between."""

OF_SIGNS = (
    *(F.soft_margin_loss, F.hinge_embedding_loss),
    *(nn.SoftMarginLoss.forward, nn.HingeEmbeddingLoss.forward),
)
"""Losses of yes or no whose targets are -1 and 1."""

LOSSES: dict[str, Callable[..., Tensor]] = {
    "cross_entropy": F.cross_entropy,
    "nll": F.nll_loss,
    "bce_with_logits": _bce_with_logits,
    "mse": _of_values(F.mse_loss),
    "l1": _of_values(F.l1_loss),
    "huber": _of_values(F.huber_loss),
    "smooth_l1": _of_values(F.smooth_l1_loss),
    "poisson_nll": _of_values(F.poisson_nll_loss),
}

PARAMETERS = {
    "cross_entropy": ("label_smoothing", "ignore_index"),
    "nll": ("ignore_index",),
    "bce_with_logits": ("pos_weight",),
    "huber": ("delta",),
    "smooth_l1": ("beta",),
    "poisson_nll": ("log_input", "full"),
}


def parse_loss(given: LossLike | None, field: str = "loss") -> Loss:
    """The loss that a user gave, cross-entropy unless they gave one."""
    if given is None:
        return LossOnScores(F.cross_entropy)
    if not isinstance(given, str | Mapping):
        if not callable(given):
            raise InvalidInput(field, given, "must be a name, a table with one, or a function (outputs, targets)")
        if inspect.isclass(given):
            raise InvalidInput(field, given.__name__, f"is a class: give an object of it, {given.__name__}()")
        return LossOnScores(given) if _is_library(given) else given
    name, params = name_and_params(field, given)
    if ":" in name:
        return parse_loss(load_user_object(field, name, params), field)
    if name not in LOSSES:
        raise unknown_name(field, name, LOSSES)
    allowed = PARAMETERS.get(name, ())
    for key in params:
        if key not in allowed:
            raise unknown_name(f"{field} key", key, allowed)
    return LossOnScores(functools.partial(LOSSES[name], **params) if params else LOSSES[name])


def load_user_object(field: str, path: str, params: Mapping[str, Any]) -> Any:
    """What an import path names, with its parameters: a class is made with them, a function called
    with them."""
    found = load_attribute(field, path)
    with convert_errors(field, path, "does not say what it takes"):
        takes = inspect.signature(found)
    try:
        takes.bind_partial(**params)
    except TypeError as problem:
        raise InvalidInput(field, path, f"cannot be made: {problem}") from None
    if inspect.isclass(found):
        with convert_errors(field, path, "cannot be made"), seeded_rng(ALIKE):
            return found(**params)
    return functools.partial(found, **params) if params else found


def _is_library(loss: object) -> bool:
    """Whether it is PyTorch's own, which takes tensors only."""
    while isinstance(loss, functools.partial):
        loss = loss.func
    where = type(loss).__module__ if isinstance(loss, nn.Module) else getattr(loss, "__module__", None)
    return isinstance(where, str) and where.partition(".")[0] == "torch"
