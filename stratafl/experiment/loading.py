"""Data and model of an experiment: loaded, divided among the clients, and as the run needs them."""

from __future__ import annotations

import copy
import hashlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
from torch import Tensor, nn

from stratafl.base.errors import InvalidInput, unknown_name
from stratafl.base.topology import Topology
from stratafl.base.user_code import load_module
from stratafl.base.validation import check_choice, name_and_params
from stratafl.core import flat_module
from stratafl.core.client_training import Augment
from stratafl.data.catalog import prepare
from stratafl.data.catalog.storage import StoredDataset
from stratafl.data.catalog.synthetic import synthetic
from stratafl.data.dataset import ClientIndex, FederatedData, InMemorySamples, LazySamples
from stratafl.data.inputs import Shape, tensors_of
from stratafl.data.loading import DataColumns, check_class_names, is_per_client, load_dataset, load_per_client
from stratafl.data.partition.methods import PartitionMethod
from stratafl.data.partition.partition import (
    Labels,
    Partition,
    check_partition,
    check_sample_numbers,
    like_train,
    partition,
)
from stratafl.data.transforms import ByteScale, channels_first, flip_and_crop, normalise, rotate
from stratafl.data.user_files import are_tables, encode_labels
from stratafl.experiment.sections import Data, Model
from stratafl.experiment.user_data import is_own, load_objects, load_user_data, refuse
from stratafl.models.lora import adapters
from stratafl.models.registry import build

AUGMENT: dict[str, Augment | None] = {"none": None, "flip_and_crop": flip_and_crop}
NEED_NO_LABELS = ("iid", "lognormal", "natural")
NO_CLASSES = ("samples",)
"""The one class of data without classes, whose samples are counted."""
MAX_CLASSES = 100_000
"""Largest number of classes of targets without names; with more, samples are counted whatever their
target is."""
LORA = ("targets", "rank", "alpha", "train")
"""Keys of `model.lora`."""


def import_plugins(paths: Sequence[str]) -> None:
    """Import the user's files, which register rules and models."""
    for path in paths:
        load_module("plugins", Path(path))


# -- data ------------------------------------------------------------------------------------------


def load_data(section: Data, tree: Topology, seed: int) -> FederatedData:
    """The samples as the model gets them, divided among the clients of a tree."""
    augment = augment_of(section)
    if not isinstance(section.source, str | Path):
        return replace(_scaled(section, _from_objects(section, tree, seed)), augment=augment)
    if not is_own(str(section.source)):
        refuse(section, "is for data of your own; see docs/data.md", "columns", "test", "lazy")
        if section.source != "synthetic":
            refuse(section, "is for a function, the synthetic data or a set of Hugging Face", "arguments")
    data, stored = load_stored(section, tree, seed)
    data = replace(data, augment=augment)
    if stored is not None:
        refuse(section, "images of the library and in folders always are standardised: leave it out", "scale")
        return _for_model(section, data, stored, seed)
    return _scaled(section, _with_client_test(section, data, tree, seed))


def _scaled(section: Data, data: FederatedData) -> FederatedData:
    """The data with scaled bytes, where this is asked for; test data with the training data's
    statistics."""
    if section.scale == "none":
        return data
    if section.lazy and section.scale == "standard":
        told = 'needs the statistics of all samples, and lazy data are not held: "unit" divides by 255'
        raise InvalidInput("data.scale", section.scale, told)
    scale = ByteScale.of(data.inputs, is_standard=section.scale == "standard")
    done: dict[int, InMemorySamples | LazySamples] = {}

    def scaled(part: FederatedData | None) -> FederatedData | None:
        if part is None:
            return None
        samples = part.samples
        if id(samples) not in done:
            if isinstance(samples, LazySamples):
                done[id(samples)] = replace(samples, read=scale.reader(samples.read))
            else:
                done[id(samples)] = replace(samples, inputs_N=scale(samples.inputs_N))
        return replace(part, samples=done[id(samples)])

    whole = cast(FederatedData, scaled(data))
    return replace(whole, test=scaled(data.test), client_test=scaled(data.client_test))


def load_stored(section: Data, tree: Topology, seed: int) -> tuple[FederatedData, StoredDataset | None]:
    """Load a data set by its name and divide it among the clients.

    The second value is the same data set as it is stored, if the library stores it or it is a
    folder of images. Its samples are then not yet rotated and normalised.
    """
    name = str(section.source)
    if is_own(name):
        data = load_user_data(section, tree, seed)
        if isinstance(data, FederatedData):
            return _divide_user_data(section, data, tree, seed), None
        stored = data
        divided = _divide(section, stored.y_train, stored.owner_train, tree, seed)
    elif name == "synthetic":
        if section.partition:
            raise InvalidInput("data.partition", section.partition, "synthetic data is made for each client")
        stored, divided = _synthetic(section, tree, seed)
    else:
        try:
            stored = prepare.load(name)
        except InvalidInput as error:
            raise InvalidInput("data.source", error.value, error.allowed) from None
        divided = _divide(section, stored.y_train, stored.owner_train, tree, seed)
    arrays = stored.tensors()
    data = FederatedData(
        samples=InMemorySamples(arrays.x_train, arrays.y_train),
        test=FederatedData(samples=InMemorySamples(arrays.x_test, arrays.y_test)),
        classes=stored.classes,
        is_users=is_own(name),
        **_fields_of(divided),
    )
    return data, stored


def _from_objects(section: Data, tree: Topology, seed: int) -> FederatedData:
    """Data that a program gives: arrays, a data set, a table, or a list of one of these per
    client."""
    refuse(section, "is for a function, the synthetic data or a set of Hugging Face", "arguments")
    columns = DataColumns.of("data.columns", section.columns)
    source, test = section.source, section.test

    def load(key: str, value: object, lazy: bool, by_client: bool) -> FederatedData:
        reader = load_per_client if by_client and is_per_client(value) else load_dataset
        return reader(key, value, columns=columns, lazy=lazy, seed=seed)

    if are_tables(source, columns):
        data = load_objects(section, source, test, seed)
    else:
        data = load("data.source", source, section.lazy, section.partition is None)
        data = replace(data, test=None if test is None else load("data.test", test, False, True))
    _check_same_classes({"data.source": data, "data.test": data.test})
    return _with_client_test(section, _divide_user_data(section, data, tree, seed), tree, seed)


def _with_client_test(section: Data, data: FederatedData, tree: Topology, seed: int) -> FederatedData:
    """The data with test data of each client, where it has some."""
    if isinstance(section.test_partition, str):
        check_choice("data.test_partition", section.test_partition, ("like_train",))
        return replace(data, client_test=_test_like_train(data, seed))
    columns = dict(section.columns) or None
    client_test = load_client_test_data(section.test_partition, tree, data.test, columns, seed)
    _check_same_classes({"data.source": data, "data.test": data.test, "data.test_partition": client_test})
    return replace(data, test=client_test if data.test is None else data.test, client_test=client_test)


def _check_same_classes(parts: Mapping[str, FederatedData | None]) -> None:
    """Raise if a class number has two names in data by their keys."""
    check_class_names((key, part.declared_classes) for key, part in parts.items() if part is not None)


def _fields_of(divided: Partition) -> dict[str, Any]:
    return {
        "clients": ClientIndex.from_lists(divided.leaves),
        "angles": divided.angles,
        "partition_notes": divided.methods,
    }


def _divide(section: Data, labels: np.ndarray, owners: np.ndarray | None, tree: Topology, seed: int) -> Partition:
    levels = section.partition or [{"name": "iid"}] * tree.depth
    try:
        return partition(labels, tree.parents, levels, seed, owner=owners, rotation=section.rotation)
    except InvalidInput as error:
        field = error.field.replace("levels", "partition", 1)
        raise InvalidInput(f"data.{field}", error.value, error.allowed) from None


def _for_model(section: Data, data: FederatedData, stored: StoredDataset, seed: int) -> FederatedData:
    """Rotate images where asked for, put their channels first and normalise them."""
    if stored.kind != "image" and (section.rotation is not None or section.augment != "none"):
        raise InvalidInput("data.source", section.source, "rotation and augment are for images")
    assert data.clients is not None and data.test is not None
    x_train, x_test = cast(Tensor, data.inputs), cast(Tensor, data.test.inputs)

    def samples(x: Tensor, targets_N: Tensor) -> InMemorySamples:
        is_image = stored.kind == "image"
        return InMemorySamples(normalise(channels_first(x), stored.mean, stored.std) if is_image else x, targets_N)

    for client, angle in enumerate(() if data.angles is None else data.angles):
        x_train[data.clients[client]] = rotate(x_train[data.clients[client]], float(angle))
    client_test = None
    if wants_client_test(section):
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


def load_client_test_data(
    test_partition: Any, tree: Topology, test: FederatedData | None, columns: object, seed: int
) -> FederatedData | None:
    """Load each client's own test data; None if all nodes share `test`.

    test_partition: for each client, its sample numbers in `test`, or a data set, or None if it has
        no test data. Unless given, the clients' data are those of `test`, if that is divided.
    """
    if test_partition is None:
        field, data = "data.test", test if test is not None and test.clients is not None else None
    else:
        field, data = "data.test_partition", _divide_test_data(test_partition, tree, test, columns, seed)
    count = 0 if data is None or data.clients is None else len(data.clients)
    if data is not None and count != tree.leaves:
        raise InvalidInput(field, f"{count} parts", f"needs one per client of the tree, {tree.leaves} of them")
    return data


def _divide_test_data(
    test_partition: Any, tree: Topology, test: FederatedData | None, columns: object, seed: int
) -> FederatedData:
    is_single = isinstance(test_partition, str | bytes | dict) or getattr(test_partition, "ndim", 1) == 0
    if is_single or not hasattr(test_partition, "__len__"):
        allowed = f"must be a list of sample numbers, or a data set, for each of the {tree.leaves} clients"
        raise InvalidInput("data.test_partition", test_partition, allowed)
    present = [part for part in test_partition if part is not None]
    if is_per_client(present):
        data = load_per_client("data.test_partition", present, columns=columns, seed=seed)
        parts = iter(data.clients or ())
        numbers = [np.empty(0, dtype=np.int64) if part is None else next(parts) for part in test_partition]
        return replace(data, clients=ClientIndex.from_lists(numbers))
    if test is None:
        raise InvalidInput("data.test_partition", "sample numbers", "are those of test data, and there is none")
    count = len(test.samples.targets_N)
    numbers = [
        check_sample_numbers(f"data.test_partition[{client}]", part, count)
        for client, part in enumerate(test_partition)
    ]
    return replace(test, clients=ClientIndex.from_lists(numbers))


def wants_client_test(section: Data) -> bool:
    """Whether each client of a stored data set is to have test data like its training data."""
    if section.test_partition is None:
        return False
    return bool(check_choice("data.test_partition", section.test_partition, ("like_train",)))


def _test_like_train(data: FederatedData, seed: int) -> FederatedData:
    """The test data, divided as the training data are."""
    test = data.test
    if test is None or test.clients is not None:
        allowed = "the test data comes divided among the clients already" if test else "there is no test data"
        raise InvalidInput("data.test_partition", "like_train", allowed)
    assert data.clients is not None
    targets = data.samples.targets_N.numpy(), test.samples.targets_N.numpy()
    labels = Labels(*targets)
    if data.owners is not None and test.owners is not None:
        owners = encode_labels("owner", [*data.owners, *test.owners])[0]
        labels = Labels(*targets, *np.split(owners, [len(data.owners)]))
    return replace(test, clients=ClientIndex.from_lists(like_train(labels, data.clients.numpy(), seed)))


def _divide_user_data(section: Data, data: FederatedData, tree: Topology, seed: int) -> FederatedData:
    """The user's data with their classes and the samples of each client: as they came, by numbers,
    or by partition methods."""
    if section.rotation is not None:
        raise InvalidInput("data.rotation", dict(section.rotation), "is for images of the library, or in folders")
    data, parts = replace(data, classes=data.classes or _class_numbers(data), is_users=True), section.partition
    if data.clients is not None:
        if parts is not None:
            raise InvalidInput("data.partition", parts, "the data comes divided among the clients already")
        numbers: Any = data.clients
    elif parts is None or _are_methods(parts):
        return replace(data, **_fields_of(_split_user_data(section, data, tree, seed)))
    elif isinstance(parts, Partition):
        if parts.angles is not None:
            raise InvalidInput("data.partition", "with rotation", "turns images: rotate them yourself")
        numbers = parts.leaves
    else:
        numbers = parts
    notes = parts.methods if isinstance(parts, Partition) else data.partition_notes
    clients = check_partition(numbers, tree, len(data.samples.targets_N))
    return replace(data, clients=clients, partition_notes=notes or ("as it was given",) * tree.depth)


def _are_methods(parts: object) -> bool:
    """Whether a partition is one method per level, and not the sample numbers of each client."""
    if isinstance(parts, str | Mapping):
        return True
    return isinstance(parts, list | tuple) and all(isinstance(part, str | Mapping | PartitionMethod) for part in parts)


def _split_user_data(section: Data, data: FederatedData, tree: Topology, seed: int) -> Partition:
    labels = data.samples.targets_N.cpu().numpy()
    if not _are_labels(labels):
        levels = section.partition or ()
        methods = [
            spec.name if isinstance(spec, PartitionMethod) else name_and_params(f"data.partition[{m}]", spec)[0]
            for m, spec in enumerate(levels)
        ]
        for m, method in enumerate(methods):
            if method not in NEED_NO_LABELS:
                allowed = f"the targets are no class numbers: one of {', '.join(NEED_NO_LABELS)}"
                raise InvalidInput(f"data.partition[{m}]", method, allowed)
        labels = np.zeros(len(labels), dtype=np.int64)
    owners = None if data.owners is None else encode_labels("owner", data.owners)[0]
    return _divide(section, labels, owners, tree, seed)


def _are_labels(targets: np.ndarray) -> bool:
    return targets.ndim == 1 and targets.dtype.kind in "iu" and targets.min() >= 0


def _class_numbers(data: FederatedData) -> tuple[str, ...]:
    """Numbers of all classes as names; none where the targets to train on are something else."""
    targets = [part.samples.targets_N for part in (data, data.test) if part is not None]
    if targets[0].is_floating_point() or targets[0].is_complex():
        return ()
    if targets[-1].is_floating_point():
        told = "must be whole numbers, as the targets to train on are: make both alike"
        raise InvalidInput("data.test targets", str(targets[-1].dtype).removeprefix("torch."), told)
    largest = max(int(part.max()) for part in targets)
    return tuple(map(str, range(1 + largest))) if largest < MAX_CLASSES else ()


def augment_of(section: Data) -> Augment | None:
    """Transform of every training batch."""
    if not isinstance(section.augment, str):
        return cast("Augment | None", section.augment)
    if section.augment.lower() not in AUGMENT:
        raise unknown_name("data.augment", section.augment, AUGMENT)
    return AUGMENT[section.augment.lower()]


def _synthetic(section: Data, tree: Topology, seed: int) -> tuple[StoredDataset, Partition]:
    known = set(inspect.signature(synthetic).parameters) - {"parents", "seed"}
    for key in section.arguments:
        if key not in known:
            raise unknown_name("data.arguments key", key, known)
    arguments = {"samples": 100, **section.arguments}
    try:
        dataset, clients = synthetic(tree.parents, seed=seed, **arguments)
    except InvalidInput as error:
        raise InvalidInput(f"data.arguments.{error.field}", error.value, error.allowed) from None
    return dataset, Partition(tuple(clients), 0, ("one distribution per client",) * tree.depth, seed)


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


# -- the model -------------------------------------------------------------------------------------


def model_factory(section: Model, data: Callable[[], tuple[Shape, int]]) -> nn.Module | Callable[[], nn.Module]:
    """The module, or the function that builds it, called with all generators set from the seed.

    data: the shape of a sample and the number of outputs; asked for models that are named.
    """
    name, lora = section.name, _lora(section.lora)
    if not isinstance(name, str):
        if isinstance(name, nn.Module) and section.params:
            raise InvalidInput("model.params", dict(section.params), "are for a model that is built, not for a module")
        if section.base is None and lora is None and not section.params:
            return cast("nn.Module | Callable[[], nn.Module]", name)

    def make() -> nn.Module:
        if isinstance(name, str):
            module = build(name, *data(), **section.params)
        else:
            module = copy.deepcopy(name) if isinstance(name, nn.Module) else name(**section.params)
        if section.base is not None:
            weights = flat_module.read_state_dict(section.base, "model.base")
            flat_module.load_weights(module, weights, "model.base")
        return module if lora is None else adapters(module, **lora)

    return make


def _lora(table: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Arguments of `adapters`."""
    if table is None:
        return None
    for key in table:
        if key not in LORA:
            raise unknown_name("model.lora key", key, LORA)
    return {"targets": [], **table}
