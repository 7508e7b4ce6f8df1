"""A config's data: prepared, as the model sees it, and divided among the leaves of a tree."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
from torch import Tensor

from stratafl.base.errors import InvalidInput, unknown_name
from stratafl.base.topology import Tree
from stratafl.base.validation import check_choice, name_and_params
from stratafl.config.own_data import is_own, load_user_data, refuse
from stratafl.config.schema import DataConfig
from stratafl.core.client_training import Augment
from stratafl.data.catalog import prepare
from stratafl.data.catalog.storage import StoredDataset
from stratafl.data.catalog.synthetic import synthetic
from stratafl.data.dataset import ClientIndex, FederatedData, InMemorySamples
from stratafl.data.inputs import tensors_of
from stratafl.data.partition.partition import Labels, Partition, like_train, partition
from stratafl.data.transforms import channels_first, flip_and_crop, normalise, rotate
from stratafl.data.user_files import encode_labels

AUGMENT: dict[str, Augment | None] = {"none": None, "flip_and_crop": flip_and_crop}
NEED_NO_LABELS = ("iid", "lognormal", "natural")
NO_CLASSES = ("samples",)
"""The one class of data that has none, as its samples are counted."""


def split(config: DataConfig, tree: Tree, seed: int) -> tuple[FederatedData, StoredDataset | None]:
    """Load a config's data set and divide it among the clients.

    The second value is the same data set as it is stored, if the library stores it or it is a
    folder of images. Its samples are then not yet rotated and normalised.
    """
    if is_own(config.name):
        data, stored = load_user_data(config, tree, seed), None
        if isinstance(data, FederatedData):
            return _divide_user_data(config, data, tree, seed), None
        stored = data
        divided = _divide(config, stored.y_train, stored.owner_train, tree, seed)
    elif config.name == "synthetic":
        if config.partition:
            raise InvalidInput("data.partition", config.partition, "synthetic data is made for each client")
        stored, divided = _synthetic(config, tree, seed)
    else:
        stored = prepare.load(config.name)
        divided = _divide(config, stored.y_train, stored.owner_train, tree, seed)
    arrays = stored.tensors()
    data = FederatedData(
        samples=InMemorySamples(arrays.x_train, arrays.y_train),
        test=FederatedData(samples=InMemorySamples(arrays.x_test, arrays.y_test)),
        classes=stored.classes,
        is_users=is_own(config.name),
        **_fields_of(divided),
    )
    return data, stored


def prepared(config: DataConfig, tree: Tree, seed: int) -> FederatedData:
    """A config's data as the model takes them, divided among the clients of a tree."""
    if not is_own(config.name):
        refuse(config, "is for data of your own; see docs/data.md", "arguments", "columns", "test", "lazy")
    data, stored = split(config, tree, seed)
    augment = augment_of(config)
    data = replace(data, augment=augment)
    if stored is not None:
        return _for_model(config, data, stored, seed)
    return replace(data, client_test=_test_like_train(config, data, seed)) if wants_own_test(config) else data


def _fields_of(divided: Partition) -> dict[str, Any]:
    return {
        "clients": ClientIndex.from_lists(divided.leaves),
        "angles": divided.angles,
        "partition_notes": divided.methods,
    }


def _divide(config: DataConfig, labels: np.ndarray, owners: np.ndarray | None, tree: Tree, seed: int) -> Partition:
    levels = config.partition or [{"name": "iid"}] * tree.depth
    try:
        return partition(labels, tree.parents, levels, seed, owner=owners, rotation=config.rotation)
    except InvalidInput as error:
        field = error.field.replace("levels", "partition", 1)
        raise InvalidInput(f"data.{field}", error.value, error.allowed) from None


def _for_model(config: DataConfig, data: FederatedData, stored: StoredDataset, seed: int) -> FederatedData:
    """Rotate images where asked for, put their channels first and normalise them."""
    if stored.kind != "image" and (config.rotation is not None or config.augment != "none"):
        raise InvalidInput("data.name", config.name, "rotation and augment are for images")
    assert data.clients is not None and data.test is not None
    x_train, x_test = cast(Tensor, data.inputs), cast(Tensor, data.test.inputs)

    def samples(x: Tensor, targets_N: Tensor) -> InMemorySamples:
        is_image = stored.kind == "image"
        return InMemorySamples(normalise(channels_first(x), stored.mean, stored.std) if is_image else x, targets_N)

    for client, angle in enumerate(() if data.angles is None else data.angles):
        x_train[data.clients[client]] = rotate(x_train[data.clients[client]], float(angle))
    client_test = None
    if wants_own_test(config):
        labels = Labels(stored.y_train, stored.y_test, stored.owner_train, stored.owner_test)
        clients = ClientIndex.from_lists(like_train(labels, data.clients.numpy(), seed))
        rotated = x_test.clone()
        for client, angle in enumerate(() if data.angles is None else data.angles):
            rotated[clients[client]] = rotate(rotated[clients[client]], float(angle))
        client_test = FederatedData(samples=samples(rotated, data.test.samples.targets_N), clients=clients)
    return replace(
        data,
        samples=samples(x_train, data.samples.targets_N),
        test=FederatedData(samples=samples(x_test, data.test.samples.targets_N)),
        client_test=client_test,
    )


def wants_own_test(config: DataConfig) -> bool:
    """Whether each client is to have test data like its training data."""
    return config.test_partition is not None and bool(
        check_choice("data.test_partition", config.test_partition, ("like_train",))
    )


def _test_like_train(config: DataConfig, data: FederatedData, seed: int) -> FederatedData:
    """A user's own test data, divided as the training data are."""
    test = data.test
    if test is None or test.clients is not None:
        allowed = "the test data comes divided among the clients already" if test else "there is no test data"
        raise InvalidInput("data.test_partition", config.test_partition, allowed)
    assert data.clients is not None
    targets = data.samples.targets_N.numpy(), test.samples.targets_N.numpy()
    labels = Labels(*targets)
    if data.owners is not None and test.owners is not None:
        owners = encode_labels("owner", [*data.owners, *test.owners])[0]
        labels = Labels(*targets, *np.split(owners, [len(data.owners)]))
    return replace(test, clients=ClientIndex.from_lists(like_train(labels, data.clients.numpy(), seed)))


def _divide_user_data(config: DataConfig, data: FederatedData, tree: Tree, seed: int) -> FederatedData:
    """A user's own data with their classes and the samples of each client: as they came, or as the
    config says."""
    if config.rotation is not None:
        raise InvalidInput("data.rotation", dict(config.rotation), "is for images of the library's own, or in folders")
    data = replace(data, classes=data.classes or _class_numbers(data), is_users=True)
    if data.clients is None:
        return replace(data, **_fields_of(_split_user_data(config, data, tree, seed)))
    if config.partition:
        raise InvalidInput("data.partition", config.partition, "the data comes divided among the clients already")
    return data


def _split_user_data(config: DataConfig, data: FederatedData, tree: Tree, seed: int) -> Partition:
    labels = data.samples.targets_N.numpy()
    if not _are_labels(labels):
        methods = [name_and_params(f"data.partition[{m}]", spec)[0] for m, spec in enumerate(config.partition)]
        for m, method in enumerate(methods):
            if method not in NEED_NO_LABELS:
                allowed = f"the targets are no class numbers: one of {', '.join(NEED_NO_LABELS)}"
                raise InvalidInput(f"data.partition[{m}]", method, allowed)
        labels = np.zeros(len(labels), dtype=np.int64)
    owners = None if data.owners is None else encode_labels("owner", data.owners)[0]
    return _divide(config, labels, owners, tree, seed)


def _are_labels(targets: np.ndarray) -> bool:
    return targets.ndim == 1 and targets.dtype.kind in "iu" and targets.min() >= 0


def _class_numbers(data: FederatedData) -> tuple[str, ...]:
    """Numbers of all classes as names; none where the targets to train on are something else."""
    targets = [part.samples.targets_N for part in (data, data.test) if part is not None]
    if targets[0].numpy().dtype.kind not in "iu":
        return ()
    if targets[-1].is_floating_point():
        told = "must be whole numbers, as the targets to train on are: make both alike"
        raise InvalidInput("test targets", str(targets[-1].dtype), told)
    return tuple(map(str, range(1 + max(int(each.max()) for each in targets))))


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
    def of(data: FederatedData) -> LabelCounts:
        targets_N, clients = data.samples.targets_N, data.clients
        assert clients is not None
        labels = targets_N.reshape(len(targets_N), -1).numpy()
        digest = hashlib.sha256(labels.tobytes())
        if data.is_users:
            for name, inputs in tensors_of(data.inputs).items():
                digest.update(name.encode() + np.ascontiguousarray(inputs.numpy()).tobytes())
        classes = data.classes if _are_labels(targets_N.numpy()) else NO_CLASSES
        counts = np.zeros((len(clients), len(classes)), dtype=np.int64)
        for client, numbers in enumerate(clients.numpy()):
            if classes is data.classes:
                counts[client] = np.bincount(labels[numbers].ravel(), minlength=len(classes))
            else:
                counts[client] = len(numbers)
            digest.update(len(numbers).to_bytes(8, "little") + np.ascontiguousarray(numbers, dtype=np.int64).tobytes())
        return LabelCounts(classes, counts, digest.hexdigest())
