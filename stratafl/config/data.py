"""A config's data: prepared, as the model sees it, and divided among the leaves of a tree."""

from __future__ import annotations

import hashlib
import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import numpy as np
from torch import Tensor

from stratafl.base.errors import InvalidInput, unknown_name
from stratafl.base.topology import Tree
from stratafl.base.validation import check_choice, name_and_params
from stratafl.config.own_data import find, is_own, refuse
from stratafl.config.schema import DataConfig
from stratafl.core.client_training import Augment
from stratafl.data.catalog import prepare
from stratafl.data.catalog.storage import StoredDataset
from stratafl.data.catalog.synthetic import synthetic
from stratafl.data.dataset import Given, InMemorySamples, is_per_client, load_dataset, load_per_client
from stratafl.data.inputs import Inputs, Shape, shape_of, tensors_of
from stratafl.data.partition.partition import Labels, Partition, check_partition, like_train, partition
from stratafl.data.transforms import channels_first, flip_and_crop, normalise, rotate
from stratafl.data.user_files import Found, encode_labels


@dataclass(frozen=True)
class PreparedData:
    """A data set as the model sees it, and who holds what."""

    train: Given
    test: Given | None
    classes: tuple[str, ...]
    """Empty where targets are no class numbers."""
    partition: Partition
    augment: Augment | None
    whole: bool = False
    """Whether the data's fingerprint is of the inputs, too: nobody else vouches for them."""
    own_test: Given | None = None
    """Test data of each client's own, with the samples of each."""

    @property
    def inputs(self) -> Inputs:
        """Some samples, or all."""
        return self.train.supply.first(FEW)

    @property
    def shape(self) -> Shape:
        """The shape of a sample, as the model takes it."""
        return shape_of(self.inputs)

    @property
    def outputs(self) -> int:
        """How many numbers a model gives for a sample: one for each class, or for each target."""
        targets = self.train.supply.targets_N
        return len(self.classes) or math.prod(targets.shape[1:])


class Labelled(NamedTuple):
    """A data set's labels, for who wants to see how it is split."""

    name: str
    y_train: np.ndarray
    classes: tuple[str, ...]
    stored: StoredDataset | None
    """The whole, where it is one of the library's own."""


AUGMENT: dict[str, Augment | None] = {"none": None, "flip_and_crop": flip_and_crop}
FEW = 4
"""Samples that stand for all, of a data set that is not held in memory."""
NEED_NO_LABELS = ("iid", "lognormal", "natural")
NO_CLASSES = ("samples",)
"""The one class of data that has none, as its samples are counted."""


def split(config: DataConfig, tree: Tree, seed: int) -> tuple[Labelled, Partition]:
    """A config's data set by its labels, and its split over the tree."""
    if is_own(config.name):
        found = find(config, tree.leaves, seed)
        if found.stored is None:
            data = _own(config, found, tree, seed)
            if not data.classes:
                raise InvalidInput("data.name", config.name, "has no classes to show the split of")
            labels = data.train.supply.targets_N.numpy()
            return Labelled(config.name, labels, data.classes, None), data.partition
        dataset, parts = found.stored, _divided(config, found.stored, tree, seed)
    else:
        dataset, parts = _stored(config, tree, seed)
    return Labelled(dataset.name, dataset.y_train, dataset.classes, dataset), parts


def prepared(config: DataConfig, tree: Tree, seed: int) -> PreparedData:
    """The data as the model sees it, and its split over the tree."""
    if not is_own(config.name):
        refuse(config, "is for data of your own; see docs/data.md", "arguments", "columns", "test", "lazy")
        return _seen(config, *_stored(config, tree, seed), seed)
    found = find(config, tree.leaves, seed)
    if found.stored is None:
        return _own(config, found, tree, seed)
    return replace(_seen(config, found.stored, _divided(config, found.stored, tree, seed), seed), whole=True)


def _stored(config: DataConfig, tree: Tree, seed: int) -> tuple[StoredDataset, Partition]:
    """Load a prepared data set, or make a synthetic one, and split it over the tree."""
    if config.name == "synthetic":
        if config.partition:
            raise InvalidInput("data.partition", config.partition, "synthetic data is made for each client")
        return _synthetic(config, tree, seed)
    dataset = prepare.load(config.name)
    return dataset, _divided(config, dataset, tree, seed)


def _divided(config: DataConfig, dataset: StoredDataset, tree: Tree, seed: int) -> Partition:
    return _partition(config, dataset.y_train, dataset.owner_train, tree, seed)


def _partition(config: DataConfig, labels: np.ndarray, owner: np.ndarray | None, tree: Tree, seed: int) -> Partition:
    levels = config.partition or [{"name": "iid"}] * tree.depth
    try:
        return partition(labels, tree.parents, levels, seed, owner=owner, rotation=config.rotation)
    except InvalidInput as error:
        field = error.field.replace("levels", "partition", 1)
        raise InvalidInput(f"data.{field}", error.value, error.allowed) from None


def _seen(config: DataConfig, dataset: StoredDataset, parts: Partition, seed: int) -> PreparedData:
    """A data set of the library's own: turned where asked for, channels first, normalised."""
    augment = augment_of(config)
    if dataset.kind != "image" and (config.rotation is not None or config.augment != "none"):
        raise InvalidInput("data.name", config.name, "rotation and augment are for images")
    arrays = dataset.tensors()
    x_train = arrays.x_train
    if parts.angles is not None:
        for angle, mine in zip(parts.angles, parts.leaves, strict=True):
            x_train[mine] = rotate(x_train[mine], float(angle))

    def seen(x: Tensor) -> Tensor:
        return normalise(channels_first(x), dataset.mean, dataset.std) if dataset.kind == "image" else x

    train = Given(InMemorySamples(seen(x_train), arrays.y_train))
    test = Given(InMemorySamples(seen(arrays.x_test), arrays.y_test))
    own = None
    if wants_own_test(config):
        labels = Labels(dataset.y_train, dataset.y_test, dataset.owner_train, dataset.owner_test)
        own_parts, x = like_train(labels, parts.leaves, seed), arrays.x_test.clone()
        for leaf, angle in enumerate(() if parts.angles is None else parts.angles):
            x[own_parts[leaf]] = rotate(x[own_parts[leaf]], float(angle))
        own = Given(InMemorySamples(seen(x), arrays.y_test), own_parts)
    return PreparedData(train, test, dataset.classes, parts, augment, own_test=own)


def wants_own_test(config: DataConfig) -> bool:
    """Whether each client is to have test data like its training data."""
    return config.test_partition is not None and bool(
        check_choice("data.test_partition", config.test_partition, ("like_train",))
    )


def _own_like_train(config: DataConfig, found: Found, train: Given, test: Given | None, parts: Partition) -> Given:
    """A user's own test data, divided as the training data is."""
    if test is None or test.parts is not None:
        told = "the test data comes divided among the clients already" if test else "there is no test data"
        raise InvalidInput("data.test_partition", config.test_partition, told)
    targets = train.supply.targets_N.numpy(), test.supply.targets_N.numpy()
    owner, others = found.owner if found.owner is not None else train.owner, test.owner
    labels = Labels(*targets)
    if owner is not None and others is not None:
        labels = Labels(*targets, *np.split(encode_labels("owner", [*owner, *others])[0], [len(owner)]))
    return test._replace(parts=like_train(labels, parts.leaves, parts.seed))


def _own(config: DataConfig, found: Found, tree: Tree, seed: int) -> PreparedData:
    """A user's own, as it is; divided by whoever gave it, or as the config says."""
    if config.rotation is not None:
        raise InvalidInput("data.rotation", dict(config.rotation), "is for images of the library's own, or in folders")
    columns = config.columns or None

    def made(field: str, data: object, lazy: bool = False) -> Given:
        read = load_per_client if is_per_client(data) else load_dataset
        return read(field, data, columns=columns, lazy=lazy, seed=seed)

    train = made("data", found.train, config.lazy)
    test = None if found.test is None else made("test", found.test)
    numbers = _classes(train, test)
    classes = found.classes or numbers
    parts = found.partition if found.partition is not None else train.parts
    if parts is None:
        divided = _split_own(config, found, train, tree, seed)
    elif config.partition:
        raise InvalidInput("data.partition", config.partition, "the data comes divided among the clients already")
    elif isinstance(parts, Partition):
        divided = parts
    else:
        leaves = check_partition(cast(Sequence[Any], parts), tree, len(train.supply.targets_N))
        divided = Partition(tuple(leaf.numpy() for leaf in leaves), 0, ("as it was given",) * tree.depth, seed)
    own = _own_like_train(config, found, train, test, divided) if wants_own_test(config) else None
    return PreparedData(train, test, classes, divided, augment_of(config), whole=True, own_test=own)


def _split_own(config: DataConfig, found: Found, train: Given, tree: Tree, seed: int) -> Partition:
    labels = train.supply.targets_N.numpy()
    if not _are_labels(labels):
        methods = [name_and_params(f"data.partition[{m}]", spec)[0] for m, spec in enumerate(config.partition)]
        for m, method in enumerate(methods):
            if method not in NEED_NO_LABELS:
                allowed = f"the targets are no class numbers: one of {', '.join(NEED_NO_LABELS)}"
                raise InvalidInput(f"data.partition[{m}]", method, allowed)
        labels = np.zeros(len(labels), dtype=np.int64)
    owner = found.owner if found.owner is not None else train.owner
    return _partition(config, labels, None if owner is None else encode_labels("owner", owner)[0], tree, seed)


def _are_labels(targets: np.ndarray) -> bool:
    return targets.ndim == 1 and targets.dtype.kind in "iu" and targets.min() >= 0


def _classes(train: Given, test: Given | None) -> tuple[str, ...]:
    """The numbers of the classes there are; none where the targets to train on are something
    else."""
    parts = [part.supply.targets_N for part in (train, test) if part is not None]
    if parts[0].numpy().dtype.kind not in "iu":
        return ()
    if parts[-1].is_floating_point():
        told = "must be whole numbers, as the targets to train on are: make both alike"
        raise InvalidInput("test targets", str(parts[-1].dtype), told)
    return tuple(map(str, range(1 + max(int(each.max()) for each in parts))))


def augment_of(config: DataConfig) -> Augment | None:
    """What is done to every training batch, by its name."""
    if config.augment not in AUGMENT:
        raise unknown_name("data.augment", config.augment, AUGMENT)
    return AUGMENT[config.augment]


def _synthetic(config: DataConfig, tree: Tree, seed: int) -> tuple[StoredDataset, Partition]:
    known = set(inspect.signature(synthetic).parameters) - {"parents", "seed"}
    for key in config.synthetic:
        if key not in known:
            raise unknown_name("data.synthetic key", key, known)
    options = {"samples": 100, **config.synthetic}
    try:
        dataset, leaves = synthetic(tree.parents, seed=seed, **options)
    except InvalidInput as error:
        raise InvalidInput(f"data.synthetic.{error.field}", error.value, error.allowed) from None
    return dataset, Partition(tuple(leaves), 0, ("one distribution per client",) * tree.depth, seed)


@dataclass(frozen=True, eq=False)
class LabelCounts:
    """What each client holds, in numbers."""

    classes: tuple[str, ...]
    """`NO_CLASSES` where targets are no class numbers."""
    labels: np.ndarray
    """Clients x classes: how many samples of each."""
    fingerprint: str
    """A digest of who holds which samples with which labels: two runs with the same one train on
    the same split."""

    def without(self, clients: Sequence[int]) -> LabelCounts:
        """The counts without those of these clients, who have data of their own that nobody else
        can count."""
        labels = self.labels.copy()
        labels[list(clients)] = 0
        return replace(self, labels=labels)

    @staticmethod
    def of(data: PreparedData) -> LabelCounts:
        targets = data.train.supply.targets_N
        labels = targets.reshape(len(targets), -1).numpy()
        digest = hashlib.sha256(labels.tobytes())
        if data.whole:
            for name, each in tensors_of(data.inputs).items():
                digest.update(name.encode() + np.ascontiguousarray(each.numpy()).tobytes())
        classes = data.classes if _are_labels(targets.numpy()) else NO_CLASSES
        counts = np.zeros((len(data.partition.leaves), len(classes)), dtype=np.int64)
        for client, mine in enumerate(data.partition.leaves):
            if classes is data.classes:
                counts[client] = np.bincount(labels[mine].ravel(), minlength=len(classes))
            else:
                counts[client] = len(mine)
            digest.update(len(mine).to_bytes(8, "little") + np.ascontiguousarray(mine, dtype=np.int64).tobytes())
        return LabelCounts(classes, counts, digest.hexdigest())
