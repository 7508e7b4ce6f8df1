"""Numbers of samples per class that clients of a run from Python have, and their fingerprint."""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from torch import Tensor

from stratafl.config.data import NO_CLASSES, LabelCounts
from stratafl.data.dataset import FEW_SAMPLES, InMemorySamples, SampleSource
from stratafl.data.inputs import tensors_of
from stratafl.runs.python.describe import digest
from stratafl.simulation.simulation import Simulation

MOST_CLASSES = 1000
"""With labels of this size or above, samples are counted whatever their labels."""


def label_counts(simulation: Simulation) -> LabelCounts:
    """The label counts of the whole tree; all ranks must call this. Of targets that are no classes,
    only the number is counted."""
    training, ranks = simulation.engine.training, simulation.ranks
    targets = training.samples.targets_N.cpu()
    classes = _classes(targets)
    here = []
    for part in training.clients:
        mine = part.cpu()
        counts = targets[mine].bincount(minlength=len(classes)).tolist() if classes else [len(mine)]
        here.append([counts, digest(mine.to(torch.int64))])
    leaves = [leaf for rank in ranks.all_gather(here) for leaf in rank]
    whole = [digest(targets), *_inputs(training.samples), *(part for _, part in leaves)]
    labels = np.array([counts for counts, _ in leaves], dtype=np.int64)
    return LabelCounts(classes or NO_CLASSES, labels, hashlib.sha256(" ".join(whole).encode()).hexdigest())


def _inputs(supply: SampleSource) -> list[str]:
    """Digests of the inputs: of all samples that are held, and of a few where they are read anew
    for every batch."""
    inputs = supply.inputs_N if isinstance(supply, InMemorySamples) else supply.head(FEW_SAMPLES)
    return [f"{name} {digest(each)}" for name, each in tensors_of(inputs).items()]


def _classes(targets: Tensor) -> tuple[str, ...]:
    """Names of the classes; none where targets are no classes."""
    if targets.dim() != 1 or targets.is_floating_point() or targets.is_complex() or targets.numel() == 0:
        return ()
    least, most = int(targets.min()), int(targets.max())
    return tuple(map(str, range(most + 1))) if least >= 0 and most < MOST_CLASSES else ()
