"""IDX files, as MNIST introduced them: a magic number, the sizes, then one byte per value."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from stratafl.data.sets.formats.files import Files
from stratafl.data.sets.on_disk import Samples

_IMAGES = r"(?:{prefix}-)?{part}-images[-.]idx3-ubyte(?:\.gz)?"
_LABELS = r"(?:{prefix}-)?{part}-labels[-.]idx1-ubyte(?:\.gz)?"
_PARTS = {"train": "train", "test": "(?:t10k|test)"}


def fits(files: Files, prefix: str) -> bool:
    """Do all four files of a set lie here?"""
    return all(
        files.matching(pattern.format(prefix=prefix, part=part))
        for pattern in (_IMAGES, _LABELS)
        for part in _PARTS.values()
    )


def read(files: Files, prefix: str, classes: tuple[str, ...], nist: bool = False) -> Samples:
    """The four files; NIST stores EMNIST's images transposed and counts letters from 1."""
    arrays: dict[str, Any] = {}
    for part, spelled in _PARTS.items():
        image_name = files.one(_IMAGES.format(prefix=prefix, part=spelled), f"{part} images")
        label_name = files.one(_LABELS.format(prefix=prefix, part=spelled), f"{part} labels")
        x = array(files, image_name, 3)
        y = array(files, label_name, 1).astype(np.int64)
        if len(x) != len(y):
            raise files.broken(label_name, f"{len(x):,} labels", f"{len(y):,}")
        first = 1 if nist else 0
        if len(y) and (y.min() < first or y.max() >= first + len(classes)):
            expected = f"labels {first}..{first + len(classes) - 1}"
            raise files.broken(label_name, expected, f"{y.min()}..{y.max()}")
        arrays[f"x_{part}"] = x.transpose(0, 2, 1) if nist else x
        arrays[f"y_{part}"] = y - first
    notes = ("images transposed to stand upright, labels 1..26 stored as 0..25",) if nist else ()
    return Samples(kind="image", classes=classes, notes=notes, **arrays)


def array(files: Files, name: str, rank: int) -> np.ndarray:
    """One IDX file of unsigned bytes of the rank expected."""
    data = files.read(name)
    header = 4 + 4 * rank
    magic = 0x800 + rank
    if len(data) < header:
        raise files.broken(name, f"an IDX header of {header} bytes", f"{len(data)} bytes")
    found, *shape = struct.unpack_from(f">I{rank}I", data)
    if found != magic:
        raise files.broken(name, f"magic number {magic:#010x}", f"{found:#010x}")
    size = header + int(np.prod(shape, dtype=object))
    if len(data) != size:
        raise files.broken(name, f"{size:,} bytes for shape {tuple(shape)}", f"{len(data):,}")
    return np.frombuffer(data, np.uint8, offset=header).reshape(shape)
