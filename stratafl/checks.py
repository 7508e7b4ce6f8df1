"""What a user's data, partition and model must be, said in one line when they are not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from stratafl.engine.habits import as_before
from stratafl.errors import InvalidInput, unknown, whole
from stratafl.flat import Flat
from stratafl.metrics import IGNORED, Loss, is_classification
from stratafl.tree import Tree
from stratafl.vocabulary import Lookups


def tensors(field: str, data: object) -> tuple[Tensor, Tensor]:
    """Inputs and targets, from a pair of arrays or a map-style data set of pairs."""
    wanted = "must be (inputs, targets) or a map-style data set of such pairs"
    if isinstance(data, Dataset) and hasattr(data, "__len__"):
        pairs = [data[i] for i in range(len(data))]
        if not pairs or any(not isinstance(p, Sequence) or len(p) != 2 for p in pairs):
            raise InvalidInput(field, type(data).__name__, wanted)
        data = [torch.stack([torch.as_tensor(pair[i]) for pair in pairs]) for i in range(2)]
    if not isinstance(data, Sequence) or len(data) != 2:
        raise InvalidInput(field, type(data).__name__, wanted)
    try:
        inputs, targets = (torch.as_tensor(part) for part in data)
    except (TypeError, ValueError, RuntimeError):
        raise InvalidInput(field, [type(part).__name__ for part in data], "must be arrays of numbers") from None
    if inputs.ndim == 0 or targets.ndim == 0 or len(inputs) != len(targets) or len(inputs) == 0:
        shapes = tuple(inputs.shape), tuple(targets.shape)
        raise InvalidInput(f"{field} shapes", shapes, "needs as many targets as inputs, at least one")
    return inputs, targets


def partition(given: Sequence, tree: Tree, samples: int) -> list[Tensor]:
    """Index tensors in leaf order: one per leaf, none empty, no sample twice or beyond the data."""
    if not hasattr(given, "__len__"):
        raise InvalidInput("partition", given, "must be a list of sample numbers for each leaf")
    if len(given) != tree.leaves:
        raise InvalidInput("partition", f"{len(given)} lists", f"needs one per leaf of the tree, {tree.leaves} of them")
    owner = np.full(samples, -1)
    parts = []
    for leaf, indices in enumerate(given):
        name = tree.names[-1][leaf]
        try:
            mine = np.asarray(indices)
        except ValueError:
            raise InvalidInput(f"partition[{leaf}]", indices, "must be a list of whole numbers") from None
        if mine.size == 0:
            raise InvalidInput(f"partition[{leaf}]", [], f"client {name} has no samples")
        if mine.ndim != 1 or mine.dtype.kind not in "iu":
            raise InvalidInput(f"partition[{leaf}]", indices, "must be a list of whole numbers")
        if mine.min() < 0 or mine.max() >= samples:
            outside = mine[(mine < 0) | (mine >= samples)][0]
            raise InvalidInput(f"partition[{leaf}]", int(outside), f"sample numbers go from 0 to {samples - 1}")
        values, counts = np.unique(mine, return_counts=True)
        taken = values[(owner[values] >= 0) | (counts > 1)]
        if taken.size:
            other = owner[taken[0]] if owner[taken[0]] >= 0 else leaf
            raise InvalidInput(
                f"partition[{leaf}]",
                int(taken[0]),
                f"each sample may be used once; client {tree.names[-1][other]} has it already",
            )
        owner[mine] = leaf
        parts.append(torch.as_tensor(mine.astype(np.int64)))
    return parts


def levels(field: str, given: Sequence[int], depth: int) -> list[int]:
    if not isinstance(given, Sequence):
        raise InvalidInput(field, given, "must be a list of levels")
    return [whole(field, level, at_least=0, at_most=depth) for level in given]


def batching(batch: int | None, sampling: str) -> int | None:
    if sampling not in ("epochs", "replacement"):
        raise unknown("sampling", sampling, ("epochs", "replacement"))
    return None if batch is None else whole("batch", batch, at_least=1)


def place(device: str | torch.device) -> torch.device:
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, TypeError) as problem:
        raise InvalidInput("device", device, first_line(problem)) from None


def model_fits(
    field: str,
    flat: Flat,
    x_P: Tensor,
    b_B: Tensor,
    inputs: Tensor,
    targets: Tensor,
    loss: Loss,
    classes: bool,
) -> None:
    """Try the model on two samples, so that a misfit is one line now and not a traceback in round 1."""
    flat.eval()
    kind = type(flat.module).__name__

    def see(codes: Tensor, table: Tensor) -> Tensor:
        _check_codes(field, inputs, codes, len(table))
        return codes

    try:
        with torch.no_grad(), as_before(x_P.device), Lookups(see):
            outputs = flat.call(x_P, b_B.clone(), inputs[:2].clone())
    except InvalidInput:
        raise
    except (RuntimeError, IndexError, ValueError, TypeError) as problem:
        raise InvalidInput(
            "model",
            kind,
            f"cannot take {field} inputs of shape {tuple(inputs.shape[1:])}: {first_line(problem)}",
        ) from None
    if classes:
        if not isinstance(outputs, Tensor) or not is_classification(outputs, targets[:2]):
            shape = tuple(outputs.shape[1:]) if isinstance(outputs, Tensor) else type(outputs).__name__
            raise InvalidInput(
                "model output",
                shape,
                f"must hold one score per class for {field} labels that are whole numbers, "
                f"here of shape {tuple(targets.shape[1:])} and type {targets.dtype}; or give a loss of your own",
            )
        labels = targets[targets != IGNORED]
        low, high = (int(labels.min()), int(labels.max())) if len(labels) else (0, 0)
        if low < 0 or high >= outputs.shape[1]:
            raise InvalidInput(
                "model output",
                f"{outputs.shape[1]} classes",
                f"{field} labels go from {low} to {high}, so {high + 1} classes are needed",
            )
    try:
        value = loss(outputs, targets[:2].clone())
        scalar = isinstance(value, Tensor) and value.numel() == 1
    except (RuntimeError, IndexError, ValueError, TypeError) as problem:
        raise InvalidInput("loss", getattr(loss, "__name__", loss), first_line(problem)) from None
    if not scalar:
        raise InvalidInput("loss", getattr(loss, "__name__", loss), "must give one number")


def _check_codes(field: str, inputs: Tensor, codes: Tensor, vocabulary: int) -> None:
    """Where a model looks its inputs up as they are, ask whether all of them, and not only those tried, are there."""
    few = inputs[: len(codes)]
    if codes.shape != few.shape or not torch.equal(codes, few.to(codes.dtype)):
        return
    low, high = (int(each) for each in inputs.aminmax())
    if low < 0 or high >= vocabulary:
        raise InvalidInput(
            f"{field} inputs",
            f"codes from {low} to {high}",
            f"the model's embedding has {vocabulary} entries, for codes from 0 to {vocabulary - 1}",
        )


def model_trains(flat: Flat, x_P: Tensor, b_B: Tensor, inputs: Tensor, targets: Tensor, loss: Loss) -> None:
    """Try a gradient on a few samples of one client, which may fail where an evaluation does not."""
    problem = _training_problem(flat, x_P, b_B, inputs, targets, loss)
    if problem is not None and len(inputs) > 1:
        raise InvalidInput(
            "model", type(flat.module).__name__, f"cannot be trained: {first_line(problem)}"
        ) from problem


def batches_of_one(
    flat: Flat,
    x_P: Tensor,
    b_B: Tensor,
    inputs: Tensor,
    targets: Tensor,
    loss: Loss,
    batch: int | None,
    sampling: str,
    clients: Mapping[str, Tensor],
) -> None:
    """Refuse batches that leave a client a single sample, where the model cannot train on one: batch norm needs two."""

    def alone(batch: int | None) -> list[str]:
        def smallest(size: int) -> int:
            most = size if batch is None else min(size, batch)
            return (size % most or most) if sampling == "epochs" else most

        return [name for name, mine in clients.items() if smallest(len(mine)) == 1]

    named = alone(batch)
    problem = _training_problem(flat, x_P, b_B, inputs[:1], targets[:1], loss) if named else None
    if problem is None:
        return
    near = sorted(range(2, 2 * (batch or 1) + 16), key=lambda other: (abs(other - (batch or 1)), other))
    better = next((other for other in near if not alone(other)), None)
    advice = "give each client at least two samples" if better is None else f"{better} would not"
    few = ", ".join(named[:3]) + (f" and {len(named) - 3} more" if len(named) > 3 else "")
    raise InvalidInput(
        "batch",
        batch,
        f"leaves {few} a batch of one sample, on which the model cannot train ({advice}): {first_line(problem)}",
    ) from problem


def _training_problem(
    flat: Flat, x_P: Tensor, b_B: Tensor, inputs: Tensor, targets: Tensor, loss: Loss
) -> Exception | None:
    flat.train()
    try:
        with as_before(x_P.device):
            flat.gradient(x_P.clone(), b_B.clone(), inputs.clone(), targets.clone(), loss)
    except (RuntimeError, IndexError, ValueError, TypeError) as problem:
        return problem
    return None


def first_line(problem: BaseException) -> str:
    return str(problem).strip().partition("\n")[0]
