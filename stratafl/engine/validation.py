"""Checks of model, loss, labels and augmentation before the first round."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from stratafl.base.errors import InvalidInput, convert_errors, describe_exception, invalid_input, reraise_out_of_memory
from stratafl.base.rng import preserve_rng
from stratafl.core.client_training import Augment
from stratafl.core.flat_module import FlatModule
from stratafl.core.losses import (
    WANTED,
    Loss,
    describe_outputs,
    find_scores,
    ignore_index,
    output_bytes,
    takes_classes,
    target_of_no,
)
from stratafl.data.dataset import BinaryTargets, Classes
from stratafl.data.inputs import Inputs, Pair, map_tensors, shape_of, tensors_of
from stratafl.metrics.evaluation import CHUNK, WHOLE, evaluate
from stratafl.metrics.metrics import Metric, has_classes, is_classification, metric_directions
from stratafl.metrics.objective import Objective, parse_stop_goals

EMBEDDING_ARGUMENTS = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")


class IndexRangeCheck(TorchFunctionMode):
    """Mode that records out-of-range indices of embedding lookups and of one-hot vectors, and takes
    index 0 for them.

    On a GPU, and under `torch.func.vmap`, PyTorch does not check all of these.
    """

    def __init__(self) -> None:
        super().__init__()
        self.out_of_range: list[Tensor] = []
        """Whether an index was out of range, for each call."""
        self.table_sizes: list[int] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.embedding:
            arguments = dict(zip(EMBEDDING_ARGUMENTS, args, strict=False)) | kwargs
            valid = self._valid(arguments["input"], len(arguments["weight"]))
            return func(**arguments | {"input": valid})
        if func is F.one_hot:
            arguments = dict(zip(("input", "num_classes"), args, strict=False)) | kwargs
            indices, size = arguments["input"], arguments.get("num_classes", -1)
            return func(indices if size < 0 else self._valid(indices, size), size)
        return func(*args, **kwargs)

    def _valid(self, indices: Tensor, size: int) -> Tensor:
        """Record indices that are out of range, and replace them by 0."""
        outside = (indices < 0) | (indices >= size)
        self.out_of_range.append(outside.any())
        self.table_sizes.append(size)
        return torch.where(outside, 0, indices)

    @staticmethod
    def raise_if_out_of_range(out_of_range: Sequence[Tensor]) -> None:
        """Raise the error that torch raises for a single client."""
        if out_of_range and bool(torch.stack([lookup.any() for lookup in out_of_range]).any()):
            raise IndexError("index out of range: a code lies beyond an embedding's vocabulary or the one-hot classes")

    @staticmethod
    def mark(g_CP: Tensor, out_of_range: Sequence[Tensor]) -> Tensor:
        """Fill the gradients of clients with an out-of-range index with NaN, so that their updates
        are rejected.

        An error would wait for the device, which a captured step must not do.
        """
        if not out_of_range:
            return g_CP
        return g_CP.masked_fill_(torch.stack(list(out_of_range)).any(dim=0)[:, None], torch.nan)


class ModelUnderTest(NamedTuple):
    """Model, initial values and loss of a run."""

    flat: FlatModule
    x_P: Tensor
    b_B: Tensor
    loss: Loss

    @property
    def kind(self) -> str:
        return type(self.flat.module).__name__

    def outputs(self, inputs: Inputs) -> Any:
        """Outputs of the model for a copy of these inputs, in its current mode."""
        with preserve_rng(self.x_P.device):
            return self.flat.call(self.x_P, self.b_B.clone(), inputs.clone())

    def gradient(self, inputs: Inputs, targets: Tensor) -> None:
        """Compute a gradient on copies of these samples, only to see whether it fails."""
        self.flat.train()
        module = self.flat.source_module()
        before = [] if module is None else [(parameter, parameter.grad) for parameter in module.parameters()]
        for parameter, _ in before:
            parameter.grad = None
        try:
            with preserve_rng(self.x_P.device):
                self.flat.gradient(self.x_P.clone(), self.b_B.clone(), inputs.clone(), targets.clone(), self.loss)
            if any(parameter.grad is not None for parameter, _ in before):
                advice = "keep no function made of `self`, but a method"
                raise InvalidInput("model", self.kind, f"something in it calls the module it is a copy of: {advice}")
        finally:
            for parameter, gradient in before:
                parameter.grad = gradient


def check_forward(
    field: str, subject: ModelUnderTest, inputs: Inputs, targets: Tensor, classification: bool = False
) -> Classes | BinaryTargets | None:
    """Try the model on two samples, so that a mismatch is a one-line error before round 1.

    Returns which labels the loss accepts, where that is known: the classes that the model scores,
    or the two answers of a binary loss. All labels must be among them. classification: whether
    outputs that are no scores of classes, and targets that are no labels, are errors, since no loss
    was named.
    """
    subject.flat.eval()
    loss = subject.loss
    lookups = IndexRangeCheck()
    try:
        with torch.no_grad(), lookups:
            outputs = subject.outputs(inputs[:2])
            if lookups.table_sizes:
                subject.outputs(inputs[_extremes(inputs)])
    except (Exception, SystemExit) as problem:
        reason = f"cannot take {field} inputs of shape {shape_of(inputs)}: {describe_exception(problem)}"
        if any(samples.dtype == torch.uint8 for samples in tensors_of(inputs).values()):
            reason += "; they are bytes, and layers take floats: give inputs.float() / 255"
        raise invalid_input("model", subject.kind, reason, problem) from problem
    if any(bool(lookup) for lookup in lookups.out_of_range):
        codes = [samples for samples in tensors_of(inputs).values() if not samples.is_floating_point()]
        low, high = min(int(code.min()) for code in codes), max(int(code.max()) for code in codes)
        reason = (
            f"the model looks up a code beyond its embedding of {min(lookups.table_sizes)} entries, or one-hot classes"
        )
        raise InvalidInput(f"{field} inputs", f"values from {low} to {high}", reason)
    scores = find_scores(outputs)
    if scores is not None and (classification or takes_classes(loss)):
        _check_label_type(field, scores, targets)
    if classification:
        _check_classification(field, outputs, scores, targets)
    accepted: Classes | BinaryTargets | None = None
    if takes_classes(loss) and scores is not None and is_classification(scores, targets[:2]):
        accepted = Classes(scores.shape[1], ignore_index(loss))
        accepted.check(field, targets)
    try:
        value = loss(outputs, targets[:2].clone())
        scalar = isinstance(value, Tensor) and value.numel() == 1 and value.is_floating_point()
    except (Exception, SystemExit) as problem:
        raise invalid_input("loss", getattr(loss, "__name__", loss), describe_exception(problem), problem) from problem
    if not scalar:
        raise InvalidInput("loss", getattr(loss, "__name__", loss), "must give one number")
    no = target_of_no(loss)
    if no is not None:
        accepted = BinaryTargets(no)
        accepted.check(field, targets)
    return accepted


def _check_label_type(field: str, scores: Tensor, targets: Tensor) -> None:
    """Raise an error for class labels that are floating; a probability of every class is no
    label."""
    if targets.is_floating_point() and targets.ndim < scores.ndim:
        kind = str(targets.dtype).removeprefix("torch.")
        reason = 'classes are whole numbers, such as y.long(); for other targets give a loss, such as "mse"'
        raise InvalidInput(f"{field} labels", kind, reason)


def _check_classification(field: str, outputs: Any, scores: Tensor | None, targets: Tensor) -> None:
    """Raise an error for outputs without scores of classes, and targets that are no class
    indices."""
    if scores is None:
        raise InvalidInput("model output", describe_outputs(outputs), f"{WANTED}; or give a loss of your own")
    if not is_classification(scores, targets[:2]):
        raise InvalidInput(
            "model output",
            tuple(scores.shape[1:]),
            f"must hold one score per class for {field} labels that are whole numbers, "
            f"here of shape {tuple(targets.shape[1:])} and type {targets.dtype}; or give a loss of your own",
        )


def _extremes(inputs: Inputs) -> Tensor:
    """Indices of the samples with the smallest and the largest value of each input."""
    indices = []
    for samples in tensors_of(inputs).values():
        values = samples.flatten(1) if samples.dim() > 1 else samples[:, None]
        indices += [values.amin(dim=1).argmin(), values.amax(dim=1).argmax()]
    return torch.stack(indices)


def check_backward(
    subject: ModelUnderTest, inputs: Inputs, targets: Tensor, augment: Augment | None, seed: int
) -> None:
    """Compute a gradient on a few samples of one client, with and without `augment`.

    It may fail where an evaluation does not, or not exist.
    """
    if len(inputs) == 1:  # `check_single_sample_batches` finds out whether one sample is enough
        inputs = map_tensors(lambda samples: torch.cat([samples, samples]), inputs)
        targets = torch.cat([targets, targets])
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
        reason = "has no gradient: it is detached, under no_grad, or depends on no parameter"
        raise InvalidInput("model output", kind, reason)
    with convert_errors("model", kind, "cannot be trained"):
        subject.gradient(inputs, targets)
    if augment is not None:
        changed = check_augmentation(augment, inputs, seed)
        name = getattr(augment, "__name__", augment)
        tensors = [f"{key} {tuple(x.shape)} of {x.dtype}".strip() for key, x in tensors_of(changed).items()]
        with convert_errors("data.augment", name, f"the model fails with its {', '.join(tensors)}"):
            subject.gradient(changed, targets)


def build_objective(
    subject: ModelUnderTest, metrics: tuple[Metric, ...], test: Pair | None, stop_when: Any
) -> Objective:
    """Objective of a run.

    Its metrics are tried on some of the test data, since they would fail after the first round.
    """
    names = [metric.name for metric in metrics]
    if test is None:
        if names:
            raise InvalidInput("evaluation.metrics", names, "there is no test data to measure them on")
        return Objective(subject.loss, goals=parse_stop_goals(stop_when, {}))
    inputs, targets = test
    subject.flat.eval()
    with torch.no_grad():
        outputs = subject.outputs(inputs[:2])
    scores, needing_all = find_scores(outputs), [metric.name for metric in metrics if not metric.is_additive]
    if needing_all and output_bytes(outputs if scores is None else scores) * len(inputs) > WHOLE * min(2, len(inputs)):
        reason = "needs all outputs at once, and these are more than 1 GiB: give an object with update and compute"
        raise InvalidInput(f"evaluation.metrics.{needing_all[0]}", needing_all[0], reason)
    additive = [metric.name for metric in metrics if metric.is_additive]
    if scores is None and additive:
        reason = f"needs scores: a model's output {WANTED}"
        raise InvalidInput(f"evaluation.metrics.{additive[0]}", describe_outputs(outputs), reason)
    if metrics:
        with convert_errors("evaluation.metrics", names):
            evaluate(subject.outputs, subject.loss, inputs[:CHUNK], targets[:CHUNK], metrics=metrics)
    better = metric_directions(metrics, accuracy=scores is not None and has_classes(scores, targets[:2]))
    return Objective(subject.loss, metrics, better, parse_stop_goals(stop_when, better))


def check_augmentation(augment: Augment, inputs: Inputs, seed: int) -> Inputs:
    """Augmented inputs of the first client's first batch; `augment` must not change their number or
    device."""
    name = getattr(augment, "__name__", augment)
    if not callable(augment):
        raise InvalidInput("data.augment", name, "must be a function (inputs, seed, client, step) -> inputs")
    with convert_errors("data.augment", name):
        changed = augment(inputs.clone(), seed, 0, 0)
    if not isinstance(changed, Inputs):
        raise InvalidInput("data.augment", name, f"must give a tensor, not {type(changed).__name__}")
    for samples in tensors_of(changed).values():
        if samples.shape[:1] != (len(inputs),) or samples.device != inputs.device:
            result = f"of {len(inputs)} on {inputs.device} it makes {tuple(samples.shape)} on {samples.device}"
            raise InvalidInput("data.augment", name, f"must give as many inputs, on the same device: {result}")
    return changed


def check_single_sample_batches(
    subject: ModelUnderTest, inputs: Inputs, targets: Tensor, batch: int | None, sampling: str, sizes: Mapping[str, int]
) -> None:
    """Raise an error for clients with a batch of one sample, if the model cannot train on one.

    Batch norm, for example, needs two. sizes: number of samples of each client, by name.
    """

    def with_single_samples(batch: int | None) -> list[str]:
        """Clients that have a batch of one sample at this batch size."""

        def smallest(size: int) -> int:
            longest = size if batch is None else min(size, batch)
            return (size % longest or longest) if sampling == "shuffle" else longest

        return [name for name, size in sizes.items() if smallest(size) == 1]

    clients = with_single_samples(batch)
    if not clients:
        return
    try:
        subject.gradient(inputs[:1], targets[:1])
    except Exception as problem:
        reraise_out_of_memory(problem)
        near = sorted(range(2, 2 * (batch or 1) + 16), key=lambda other: (abs(other - (batch or 1)), other))
        better = next((other for other in near if not with_single_samples(other)), None)
        advice = "give each client at least two samples" if better is None else f"{better} would not"
        few = ", ".join(clients[:3]) + (f" and {len(clients) - 3} more" if len(clients) > 3 else "")
        problem_line = describe_exception(problem)
        reason = f"leaves {few} a batch of one sample, on which the model cannot train ({advice}): {problem_line}"
        raise InvalidInput("client.batch_size", batch, reason) from problem
