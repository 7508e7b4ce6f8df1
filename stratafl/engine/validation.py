"""Checks of model, loss, labels and augmentation before the first round."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from stratafl.base.errors import InvalidInput, convert_errors, describe_exception, invalid_input, pass_on_no_room
from stratafl.base.rng import preserve_rng
from stratafl.core.client_training import Augment
from stratafl.core.flat_module import FlatModule
from stratafl.core.losses import WANTED, Loss, describe_outputs, find_scores, ignore_index, output_bytes, takes_classes
from stratafl.data.dataset import Classes
from stratafl.data.inputs import Inputs, Pair, map_tensors, shape_of, tensors_of
from stratafl.metrics.evaluation import CHUNK, WHOLE, evaluate
from stratafl.metrics.metrics import Metric, has_classes, is_classification, metric_directions
from stratafl.metrics.objective import Objective, stops_at

ARGUMENTS = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")


class EmbeddingRangeCheck(TorchFunctionMode):
    """While it is on, notes of every lookup whether a code lay beyond its table, and takes the
    first entry for it."""

    def __init__(self) -> None:
        super().__init__()
        self.beyond: list[Tensor] = []
        self.sizes: list[int] = []
        """Of the tables."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is not F.embedding:
            return func(*args, **(kwargs or {}))
        given = dict(zip(ARGUMENTS, args, strict=False)) | (kwargs or {})
        codes, size = given["input"], len(given["weight"])
        outside = (codes < 0) | (codes >= size)
        self.beyond.append(outside.any())
        self.sizes.append(size)
        return func(**given | {"input": torch.where(outside, 0, codes)})

    @staticmethod
    def check(beyond: Sequence[Tensor]) -> None:
        """Complain, as the library does of one client's lookup, if any code was beyond its
        table."""
        if beyond and bool(torch.stack([each.any() for each in beyond]).any()):
            raise IndexError("index out of range: a code lies beyond an embedding's vocabulary")

    @staticmethod
    def mark(g_CP: Tensor, beyond: Sequence[Tensor]) -> Tensor:
        """The same without waiting for the device, which a step that is captured must not do: the
        gradients of whoever had such a code are no numbers, by which its update is refused."""
        return g_CP.masked_fill_(torch.stack(list(beyond)).any(dim=0)[:, None], torch.nan) if beyond else g_CP


class ModelUnderTest(NamedTuple):
    """A model and its loss, where a run begins."""

    flat: FlatModule
    x_P: Tensor
    b_B: Tensor
    loss: Loss

    @property
    def kind(self) -> str:
        return type(self.flat.module).__name__

    def outputs(self, inputs: Inputs) -> Any:
        """What the model makes of a copy of these, in the mode it is in; nothing else is
        changed."""
        with preserve_rng(self.x_P.device):
            return self.flat.call(self.x_P, self.b_B.clone(), inputs.clone())

    def gradient(self, inputs: Inputs, targets: Tensor) -> None:
        """Try a step's gradient on copies of these."""
        self.flat.train()
        own = self.flat.source_module()
        before = [] if own is None else [(parameter, parameter.grad) for parameter in own.parameters()]
        for parameter, _ in before:
            parameter.grad = None
        try:
            with preserve_rng(self.x_P.device):
                self.flat.gradient(self.x_P.clone(), self.b_B.clone(), inputs.clone(), targets.clone(), self.loss)
            if any(parameter.grad is not None for parameter, _ in before):
                told = "something in it calls the module it is a copy of: keep no function made of `self`, but a method"
                raise InvalidInput("model", self.kind, told)
        finally:
            for parameter, gradient in before:
                parameter.grad = gradient


def check_forward(
    field: str, subject: ModelUnderTest, inputs: Inputs, targets: Tensor, classification: bool = False
) -> Classes | None:
    """Try the model on two samples, so that a misfit is one line now and not a traceback in round
    1; and hold all labels against the classes that it scores, which are returned where the loss
    asks for classes.

    classification: refuse outputs and targets that are none, since no loss was named.
    """
    subject.flat.eval()
    loss = subject.loss
    vocabulary = EmbeddingRangeCheck()
    try:
        with torch.no_grad(), vocabulary:
            outputs = subject.outputs(inputs[:2])
            if vocabulary.sizes:
                subject.outputs(inputs[_extremes(inputs)])
    except (Exception, SystemExit) as problem:
        told = f"cannot take {field} inputs of shape {shape_of(inputs)}: {describe_exception(problem)}"
        if any(each.dtype == torch.uint8 for each in tensors_of(inputs).values()):
            told += "; they are bytes, and layers take floats: give inputs.float() / 255"
        raise invalid_input("model", subject.kind, told, problem) from problem
    if any(bool(beyond) for beyond in vocabulary.beyond):
        codes = [each for each in tensors_of(inputs).values() if not each.is_floating_point()]
        low, high = min(int(each.min()) for each in codes), max(int(each.max()) for each in codes)
        told = f"the model looks up a code beyond its embedding of {min(vocabulary.sizes)} entries"
        raise InvalidInput(f"{field} inputs", f"values from {low} to {high}", told)
    scores = find_scores(outputs)
    if classification:
        _classifies(field, outputs, scores, targets)
    classes = None
    if takes_classes(loss) and scores is not None and is_classification(scores, targets[:2]):
        classes = Classes(scores.shape[1], ignore_index(loss))
        classes.check(field, targets)
    try:
        value = loss(outputs, targets[:2].clone())
        scalar = isinstance(value, Tensor) and value.numel() == 1 and value.is_floating_point()
    except (Exception, SystemExit) as problem:
        raise invalid_input("loss", getattr(loss, "__name__", loss), describe_exception(problem), problem) from problem
    if not scalar:
        raise InvalidInput("loss", getattr(loss, "__name__", loss), "must give one number")
    return classes


def _classifies(field: str, outputs: Any, scores: Tensor | None, targets: Tensor) -> None:
    """Refuse outputs that hold no scores of classes, and targets that are no class numbers."""
    if scores is None:
        raise InvalidInput("model output", describe_outputs(outputs), f"{WANTED}; or give a loss of your own")
    if targets.is_floating_point() and targets.ndim < scores.ndim:
        kind = str(targets.dtype).removeprefix("torch.")
        told = 'classes are whole numbers, such as y.long(); for other targets give a loss, such as "mse"'
        raise InvalidInput(f"{field} labels", kind, told)
    if not is_classification(scores, targets[:2]):
        raise InvalidInput(
            "model output",
            tuple(scores.shape[1:]),
            f"must hold one score per class for {field} labels that are whole numbers, "
            f"here of shape {tuple(targets.shape[1:])} and type {targets.dtype}; or give a loss of your own",
        )


def _extremes(inputs: Inputs) -> Tensor:
    """The samples that hold the smallest and the largest value of each input."""
    found = []
    for each in tensors_of(inputs).values():
        values = each.flatten(1) if each.dim() > 1 else each[:, None]
        found += [values.amin(dim=1).argmin(), values.amax(dim=1).argmax()]
    return torch.stack(found)


def check_backward(
    subject: ModelUnderTest, inputs: Inputs, targets: Tensor, augment: Augment | None, seed: int
) -> None:
    """Try a gradient on a few samples of one client, with and without `augment`: it may fail where
    an evaluation does not, and there may be none."""
    if len(inputs) == 1:  # whether one is enough is another question
        inputs, targets = map_tensors(lambda each: torch.cat([each, each]), inputs), torch.cat([targets, targets])
    subject.flat.train()
    kind, loss = subject.kind, subject.loss
    with convert_errors("model", kind, "cannot be trained"), torch.enable_grad():
        outputs = subject.outputs(inputs)
        value = loss(outputs, targets.clone())
    if not value.requires_grad:
        scores = find_scores(outputs)
        if scores is not None and scores.requires_grad:
            name = getattr(loss, "__name__", loss)
            raise InvalidInput("loss", name, "has no gradient: nothing in it depends on the model's output")
        told = "has no gradient: it is detached, under no_grad, or depends on no parameter"
        raise InvalidInput("model output", kind, told)
    with convert_errors("model", kind, "cannot be trained"):
        subject.gradient(inputs, targets)
    if augment is not None:
        changed = check_augmentation(augment, inputs, seed)
        name = getattr(augment, "__name__", augment)
        kinds = [f"{key} {tuple(each.shape)} of {each.dtype}".strip() for key, each in tensors_of(changed).items()]
        with convert_errors("augment", name, f"the model fails with its {', '.join(kinds)}"):
            subject.gradient(changed, targets)


def build_objective(
    subject: ModelUnderTest, metrics: tuple[Metric, ...], test: Pair | None, stop_at: Any, stop_when: Any
) -> Objective:
    """What a run is after, with its metrics tried on some of the test data: what goes wrong there
    would do so after the first round."""
    names = [metric.name for metric in metrics]
    if test is None:
        if names:
            raise InvalidInput("metrics", names, "there is no test data to measure them on")
        return Objective(subject.loss, goals=stops_at(stop_at, stop_when, {}))
    inputs, targets = test
    subject.flat.eval()
    with torch.no_grad():
        outputs = subject.outputs(inputs[:2])
    found, whole = find_scores(outputs), [metric.name for metric in metrics if not metric.is_additive]
    if whole and output_bytes(outputs if found is None else found) * len(inputs) > WHOLE * min(2, len(inputs)):
        told = "needs all outputs at once, and these are more than 1 GiB: give an object with update and compute"
        raise InvalidInput(f"metrics.{whole[0]}", whole[0], told)
    adding = [metric.name for metric in metrics if metric.is_additive]
    if found is None and adding:
        raise InvalidInput(
            f"metrics.{adding[0]}", describe_outputs(outputs), f"needs scores: a model's output {WANTED}"
        )
    if metrics:
        with convert_errors("metrics", names):
            evaluate(subject.outputs, subject.loss, inputs[:CHUNK], targets[:CHUNK], metrics=metrics)
    better = metric_directions(metrics, accuracy=found is not None and has_classes(found, targets[:2]))
    return Objective(subject.loss, metrics, better, stops_at(stop_at, stop_when, better))


def check_augmentation(augment: Augment, inputs: Inputs, seed: int) -> Inputs:
    """What a transform makes of the first client's first batch, which must be as many inputs."""
    name = getattr(augment, "__name__", augment)
    if not callable(augment):
        raise InvalidInput("augment", name, "must be a function (inputs, seed, client, step) -> inputs")
    with convert_errors("augment", name):
        changed = augment(inputs.clone(), seed, 0, 0)
    if not isinstance(changed, Inputs):
        raise InvalidInput("augment", name, f"must give a tensor, not {type(changed).__name__}")
    for each in tensors_of(changed).values():
        if each.shape[:1] != (len(inputs),) or each.device != inputs.device:
            found = f"of {len(inputs)} on {inputs.device} it makes {tuple(each.shape)} on {each.device}"
            raise InvalidInput("augment", name, f"must give as many inputs, on the same device: {found}")
    return changed


def check_single_sample_batches(
    subject: ModelUnderTest, inputs: Inputs, targets: Tensor, batch: int | None, sampling: str, sizes: Mapping[str, int]
) -> None:
    """Refuse batches that leave a client a single sample, where the model cannot train on one:
    batch norm needs two."""

    def alone(batch: int | None) -> list[str]:
        def smallest(size: int) -> int:
            most = size if batch is None else min(size, batch)
            return (size % most or most) if sampling == "epochs" else most

        return [name for name, size in sizes.items() if smallest(size) == 1]

    named = alone(batch)
    if not named:
        return
    try:
        subject.gradient(inputs[:1], targets[:1])
    except Exception as problem:
        pass_on_no_room(problem)
        near = sorted(range(2, 2 * (batch or 1) + 16), key=lambda other: (abs(other - (batch or 1)), other))
        better = next((other for other in near if not alone(other)), None)
        advice = "give each client at least two samples" if better is None else f"{better} would not"
        few = ", ".join(named[:3]) + (f" and {len(named) - 3} more" if len(named) > 3 else "")
        reason = describe_exception(problem)
        told = f"leaves {few} a batch of one sample, on which the model cannot train ({advice}): {reason}"
        raise InvalidInput("batch", batch, told) from problem
