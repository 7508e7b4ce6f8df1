"""From a config to a run: data, partition, model and method put together."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from stratafl import checks, models
from stratafl.config import Config, DataConfig, named
from stratafl.data import sources
from stratafl.data.canonical import Dataset
from stratafl.data.partition import Partition, partition
from stratafl.data.rotation import rotate
from stratafl.data.synthetic import synthetic
from stratafl.data.transforms import channels_first, flip_and_crop, normalise
from stratafl.engine.loop import LoopEngine
from stratafl.engine.work import Augment, Engine, Training
from stratafl.errors import InvalidInput, unknown, whole
from stratafl.flat import Flat
from stratafl.own_code import load_module
from stratafl.ranks.group import Ranks
from stratafl.registry import RuleLike
from stratafl.schedule import Schedule
from stratafl.simulate import Simulation, simulate
from stratafl.tree import Tree


@dataclass(frozen=True)
class Material:
    """A data set as the model sees it, and who holds what."""

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    classes: tuple[str, ...]
    partition: Partition
    augment: Augment | None


AUGMENT: dict[str, Augment | None] = {"none": None, "flip_and_crop": flip_and_crop}


def split(config: DataConfig, tree: Tree, seed: int) -> tuple[Dataset, Partition]:
    """Load a prepared data set, or make a synthetic one, and split it over the tree."""
    if config.name == "synthetic":
        if config.partition:
            raise InvalidInput("data.partition", config.partition, "synthetic data is made for each client")
        return _synthetic(config, tree, seed)
    dataset = sources.load(config.name)
    levels = config.partition or [{"name": "iid"}] * tree.depth
    try:
        return dataset, partition(
            dataset.y_train, tree.parents, levels, seed, owner=dataset.owner_train, rotation=config.rotation
        )
    except InvalidInput as error:
        field = error.field.replace("levels", "partition", 1)
        raise InvalidInput(f"data.{field}", error.value, error.allowed) from None


def material(config: DataConfig, tree: Tree, seed: int) -> Material:
    """The data as the model sees it: turned where asked for, channels first, normalised."""
    if config.augment not in AUGMENT:
        raise unknown("data.augment", config.augment, AUGMENT)
    dataset, parts = split(config, tree, seed)
    if dataset.kind != "image" and (config.rotation is not None or config.augment != "none"):
        raise InvalidInput("data.name", config.name, "rotation and augment are for images")
    arrays = dataset.tensors()
    x_train = arrays.x_train
    if parts.angles is not None:
        for angle, mine in zip(parts.angles, parts.leaves, strict=True):
            x_train[mine] = rotate(x_train[mine], float(angle))

    def seen(x: Tensor) -> Tensor:
        return normalise(channels_first(x), dataset.mean, dataset.std) if dataset.kind == "image" else x

    return Material(
        (seen(x_train), arrays.y_train),
        (seen(arrays.x_test), arrays.y_test),
        dataset.classes,
        parts,
        AUGMENT[config.augment],
    )


def _synthetic(config: DataConfig, tree: Tree, seed: int) -> tuple[Dataset, Partition]:
    known = set(inspect.signature(synthetic).parameters) - {"parents", "seed"}
    for key in config.synthetic:
        if key not in known:
            raise unknown("data.synthetic key", key, known)
    options = {"samples": 100, **config.synthetic}
    try:
        dataset, leaves = synthetic(tree.parents, seed=seed, **options)
    except InvalidInput as error:
        raise InvalidInput(f"data.synthetic.{error.field}", error.value, error.allowed) from None
    return dataset, Partition(tuple(leaves), 0, ("one distribution per client",) * tree.depth, seed)


@dataclass(frozen=True, eq=False)
class Holdings:
    """What each client holds, in numbers."""

    classes: tuple[str, ...]
    labels: np.ndarray
    """Clients x classes: how many samples of each."""
    fingerprint: str
    """Of who holds which samples with which labels: two runs with the same one train on the same split."""

    @staticmethod
    def of(held: Material) -> Holdings:
        targets = held.train[1].reshape(len(held.train[1]), -1).numpy()
        digest = hashlib.sha256(targets.tobytes())
        counts = np.zeros((len(held.partition.leaves), len(held.classes)), dtype=np.int64)
        for client, mine in enumerate(held.partition.leaves):
            counts[client] = np.bincount(targets[mine].ravel(), minlength=len(held.classes))
            digest.update(len(mine).to_bytes(8, "little") + np.ascontiguousarray(mine, dtype=np.int64).tobytes())
        return Holdings(held.classes, counts, digest.hexdigest())


@dataclass(frozen=True, eq=False)
class Study:
    """A run ready to iterate, and what its clients hold."""

    simulation: Simulation
    holdings: Holdings


def experiment(config: Config) -> Simulation:
    """The run a config describes, ready to iterate."""
    return study(config).simulation


def study(config: Config, ranks: Ranks | None = None) -> Study:
    """Likewise, with what its clients hold; on several ranks, the part of it that is this one's."""
    seed = whole("run.seed", config.run.seed)
    whole("run.checkpoint_every", config.run.checkpoint_every, at_least=0)
    import_plugins(config.run.plugins)
    tree = Tree.of(config.tree.shape)
    schedule = schedule_of(config, tree.depth)
    chain = config.leaf.chain(config.run.rounds)
    rules = rules_of(config)
    device = checks.place(config.run.device, "run.device")
    held = material(config.data, tree, seed)
    name, params = named("model", config.model)
    shape = tuple(held.train[0].shape[1:])
    simulation = simulate(
        lambda: models.build(name, shape, len(held.classes), **params),
        held.train,
        held.partition.leaves,
        tree,
        rules,
        periods=schedule,
        rounds=config.run.rounds,
        leaf=chain,
        batch=config.leaf.batch or None,
        sampling=config.leaf.sampling,  # type: ignore[arg-type]  # simulate checks it
        test=held.test,
        weights=config.tree.weights,
        participation=config.schedule.participation,
        seed=seed,
        evaluate_every=config.run.evaluate_every,
        evaluate_levels=config.run.evaluate_levels,
        stop_at=config.run.stop_at,
        augment=held.augment,
        device=device,
        engine=config.run.engine,  # type: ignore[arg-type]  # simulate checks it
        precision=config.run.precision,  # type: ignore[arg-type]
        diagnose=config.run.diagnose,  # type: ignore[arg-type]
        update_limit=config.run.update_limit,
        update_factor=config.run.update_factor,
        ranks=ranks,
    )
    return Study(simulation, Holdings.of(held))


def engine_of_one(config: Config, leaf: int, data: tuple[Tensor, Tensor], classes: int) -> Engine:
    """What trains one leaf of the tree, by its number, on data that only it has; it draws as it would in a simulation.

    The model's values are not this one's concern: they come with the work.
    """
    if config.data.augment not in AUGMENT:
        raise unknown("data.augment", config.data.augment, AUGMENT)
    import_plugins(config.run.plugins)
    name, params = named("model", config.model)
    nobody = torch.empty(0, dtype=torch.int64)
    training = Training(
        flat=Flat(models.build(name, tuple(data[0].shape[1:]), classes, **params)),
        loss=F.cross_entropy,
        inputs=data[0],
        targets=data[1],
        partition=[nobody] * leaf + [torch.arange(len(data[1]))],
        leaf=config.leaf.chain(config.run.rounds),
        batch=checks.batching(config.leaf.batch or None, config.leaf.sampling),
        sampling=config.leaf.sampling,  # type: ignore[arg-type]  # just checked
        seed=whole("run.seed", config.run.seed),
        augment=AUGMENT[config.data.augment],
    )
    return LoopEngine(training)


def import_plugins(paths: Sequence[str]) -> None:
    """Run the user's own files, which register rules."""
    for path in paths:
        if not isinstance(path, str):
            raise InvalidInput("run.plugins", path, "must be paths of Python files")
        load_module("run.plugins", Path(path))


def schedule_of(config: Config, depth: int) -> Schedule:
    given = config.schedule
    if (given.periods is None) == (given.steps_per_sync is None):
        raise InvalidInput("schedule.periods", given.periods, "give either periods or steps_per_sync, a list per level")
    for name in ("periods", "steps_per_sync"):
        value = getattr(given, name)
        if value is not None and not isinstance(value, list | tuple):
            raise InvalidInput(f"schedule.{name}", value, "must be a list, one number per edge level")
    if given.periods is not None:
        return Schedule.of(given.periods, depth)
    return Schedule.of_steps(given.steps_per_sync, depth)


def rules_of(config: Config) -> RuleLike | Sequence[RuleLike]:
    if "rules" not in config.method:
        return config.method
    if len(config.method) > 1:
        raise InvalidInput("method", dict(config.method), "give either a name or rules, not both")
    rules = config.method["rules"]
    if not isinstance(rules, list | tuple):
        raise InvalidInput("method.rules", rules, "must be a list, one rule per edge level")
    return rules
