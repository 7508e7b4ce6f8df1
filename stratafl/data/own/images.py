"""A folder of images, one folder in it for each class; or of two such, train and test."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from stratafl.base.errors import InvalidInput
from stratafl.data.own.found import Found, held_out, needs_test
from stratafl.data.sets.formats.files import Files, open_files
from stratafl.data.sets.formats.images import picture
from stratafl.data.sets.on_disk import Samples, complete

KINDS = (".png", ".jpg", ".jpeg", ".webp")


def read(path: Path, test: object) -> Found:
    """The images of all classes, which must be of one size, as a data set of the library's own."""
    inside = {each.name for each in path.iterdir() if each.is_dir()}
    if {"train", "test"} <= inside and test is None:
        train, tested = _images("data.name", path / "train"), _images("data.name", path / "test")
    elif "train" in inside:
        allowed = "has a folder train: leave test out where there is a folder test beside it, or name both folders"
        raise InvalidInput("data.name", str(path), f'{allowed}: name = ".../train", test = ".../..."')
    elif test is None:
        raise needs_test("data.name", path)
    else:
        train = _images("data.name", path)
        tested = _images("data.test", Path(test)) if isinstance(test, str) else {}
    classes = tuple(sorted({*train, *tested}))
    x, y = _together(train, classes)
    if tested:
        (x_train, y_train), (x_test, y_test) = (x, y), _together(tested, classes)
    else:
        first, second = held_out("data.test", len(y), test)
        (x_train, y_train), (x_test, y_test) = (x[first], y[first]), (x[second], y[second])
    if x_test.shape[1:] != x_train.shape[1:]:
        raise InvalidInput("data.test", x_test.shape[1:], f"must be images of {x_train.shape[1:]}")
    samples = Samples(kind="image", x_train=x_train, y_train=y_train, x_test=x_test, y_test=y_test, classes=classes)
    stored = complete(path.name, "image folder", samples)
    return Found(train=(x_train, y_train), test=(x_test, y_test), classes=classes, stored=stored)


def _images(field: str, path: Path) -> dict[str, np.ndarray]:
    """All images of a folder, by class."""
    found: dict[str, np.ndarray] = {}
    size: tuple[int, int] | None = None
    for folder in sorted(each for each in path.iterdir() if each.is_dir() and not each.name.startswith(".")):
        files: Files = open_files(folder)
        names = sorted(name for name in files.names if name.lower().endswith(KINDS) and not _is_hidden(name))
        pictures = {}
        for name, data in files.each(names):
            pictures[name] = picture(files, name, data, size)
            size = size or (pictures[name].shape[1], pictures[name].shape[0])
        if pictures:
            found[folder.name] = np.stack([pictures[name] for name in names])
    if not found:
        raise InvalidInput(field, str(path), "must have a folder of PNG, JPEG or WebP images for each class")
    return found


def _is_hidden(name: str) -> bool:
    """Whether it is a file that an editor or a file system keeps for itself."""
    return any(part.startswith(".") for part in name.split("/"))


def _together(images: dict[str, np.ndarray], classes: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray]:
    numbers = {label: number for number, label in enumerate(classes)}
    y = [np.full(len(each), numbers[label], np.int64) for label, each in images.items()]
    return np.concatenate(list(images.values())), np.concatenate(y)
