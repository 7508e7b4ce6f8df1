"""IDX files, and the binary records of CIFAR."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from stratafl.data.catalog.storage import DatasetArrays
from stratafl.data.formats.archive import FileTree

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
        x = array(files, image_name, 3)
        y = array(files, label_name, 1).astype(np.int64)
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


def array(files: FileTree, name: str, rank: int) -> np.ndarray:
    """Read one IDX file of unsigned bytes with the expected number of dimensions."""
    data = files.read(name)
    header = 4 + 4 * rank
    magic = 0x800 + rank
    if len(data) < header:
        raise files.corrupt(name, f"an IDX header of {header} bytes", f"{len(data)} bytes")
    found, *shape = struct.unpack_from(f">I{rank}I", data)
    if found != magic:
        raise files.corrupt(name, f"magic number {magic:#010x}", f"{found:#010x}")
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
        found = tuple(files.read(name).decode("utf-8", "replace").split())
        if found != classes:
            raise files.corrupt(name, f"classes {', '.join(classes)}", ", ".join(found))
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
