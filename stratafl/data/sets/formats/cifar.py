"""CIFAR's binary version: records of label bytes, then 3 x 32 x 32 pixels, channel by channel."""

from __future__ import annotations

from typing import Any

import numpy as np

from stratafl.data.sets.formats.files import Files
from stratafl.data.sets.on_disk import Samples

_PIXELS = 3 * 32 * 32
# The last label byte of a record is used: CIFAR-100 puts the coarse label before the fine one.
_LAYOUTS = {
    10: (r"data_batch_\d+\.bin", r"test_batch\.bin", 1, "batches.meta.txt"),
    100: (r"train\.bin", r"test\.bin", 2, "fine_label_names.txt"),
}


def fits(files: Files, classes: tuple[str, ...]) -> bool:
    """Do the record files of a set lie here?"""
    train, test, _, _ = _LAYOUTS[len(classes)]
    return bool(files.matching(train) and files.matching(test))


def read(files: Files, classes: tuple[str, ...]) -> Samples:
    """All record files; the archive's own list of class names, if it is there, must agree."""
    train, test, label_bytes, listing = _LAYOUTS[len(classes)]
    for name in files.matching(listing):
        found = tuple(files.read(name).decode("utf-8", "replace").split())
        if found != classes:
            raise files.broken(name, f"classes {', '.join(classes)}", ", ".join(found))
    arrays: dict[str, Any] = {}
    for part, pattern in (("train", train), ("test", test)):
        # One pass in stored order, then the order of the names.
        records = dict(files.each(files.matching(pattern)))
        parts = [_records(files, name, data, label_bytes, len(classes)) for name, data in sorted(records.items())]
        arrays[f"x_{part}"] = np.concatenate([x for x, _ in parts])
        arrays[f"y_{part}"] = np.concatenate([y for _, y in parts])
    return Samples(kind="image", classes=classes, **arrays)


def _records(files: Files, name: str, data: bytes, label_bytes: int, classes: int) -> tuple[np.ndarray, np.ndarray]:
    size = label_bytes + _PIXELS
    if not data or len(data) % size:
        raise files.broken(name, f"whole records of {size:,} bytes", f"{len(data):,} bytes")
    records = np.frombuffer(data, np.uint8).reshape(-1, size)
    y = records[:, label_bytes - 1].astype(np.int64)
    if y.max() >= classes:
        raise files.broken(name, f"labels 0..{classes - 1}", y.max())
    return records[:, label_bytes:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), y
