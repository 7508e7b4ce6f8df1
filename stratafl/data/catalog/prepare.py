"""Prepare data sets from published files, load them, and describe them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from stratafl.base.errors import InvalidInput, unknown_name
from stratafl.base.rng import Stream, random_bits
from stratafl.data.catalog.catalog import ORIGINALS_VARIABLE, SOURCES, PublishedFormat, digits, usual_places
from stratafl.data.catalog.catalog import TITLE as DIGITS_TITLE
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
from stratafl.data.formats.archive import FileTree, open_files

NAMES = ("digits", *SOURCES, "synthetic")
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
    where: str = ""
    train: int = 0
    test: int = 0
    shape: tuple[int, ...] = ()
    classes: tuple[str, ...] = ()
    train_per_class: tuple[int, ...] = ()
    owners: int = 0
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    checksum: str = ""
    notes: tuple[str, ...] = ()


def load(name: str, *, root: str | Path | None = None, verify: bool = False) -> StoredDataset:
    """Load a prepared data set, memory-mapped; `verify` compares every byte with its checksums.

    Images are uint8, with channels last if there are several. A run from a config converts them to
    normalised floats, channels first: (x / 255 - mean) / std.
    """
    _known(name)
    if name == "digits":
        return digits()
    if name == "synthetic":
        raise InvalidInput("data set", name, "generated for a tree: call stratafl.data.catalog.synthetic.synthetic")
    folder = data_root(root)
    if not (folder / name).exists():
        raise InvalidInput("data set", name, f"not prepared under {folder}; run: stratafl data prepare {name}")
    return read(name, folder, verify)


def prepare(
    name: str,
    source: str | Path | None = None,
    *,
    root: str | Path | None = None,
    allow_partial: bool = False,
) -> DatasetStatus:
    """Read a data set in one of its published formats and store it; return the format found.

    `source` is a file, a folder, an archive, "hub", or None for the usual places. A data set of
    another size than the published one is refused, unless `allow_partial` accepts it with a note.
    """
    _known(name)
    if name not in SOURCES:
        raise InvalidInput("data set", name, f"needs no preparing; these do: {', '.join(SOURCES)}")
    folder = data_root(root)
    if source == "hub":
        remote = SOURCES[name].remote
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


def _known(name: str) -> None:
    if name not in NAMES:
        raise unknown_name("data set", name, NAMES)


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
    return next((form for form in SOURCES[name].forms if form.fits(files)), None)


def _unrecognised(name: str, files: FileTree) -> InvalidInput:
    forms = ", ".join(form.name for form in SOURCES[name].forms)
    some = ", ".join(files.names[:5]) + (", ..." if len(files.names) > 5 else "")
    return InvalidInput(
        "source",
        str(files.path),
        f"expected {name} as one of: {forms}; found {len(files.names):,} files: {some or 'none'}",
    )


def _check_size(
    where: str, form: str, samples: DatasetArrays, sizes: tuple[tuple[int, int], ...], partial: bool
) -> DatasetArrays:
    found = (len(samples.y_train), len(samples.y_test))
    if not sizes or found in sizes:
        return samples
    expected = " or ".join(f"{train:,} + {test:,}" for train, test in sizes)
    difference = f"expected {expected} samples (training + test), found {found[0]:,} + {found[1]:,}"
    if not partial:
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
    _known(name)
    if name == "synthetic":
        return DatasetStatus(name=name, title=_SYNTHETIC_TITLE, kind="vector", state="generated")
    if name == "digits":
        return DatasetStatus(name=name, title=DIGITS_TITLE, kind="image", state="embedded", **_measured(digits()))
    source, folder = SOURCES[name], data_root(root)
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
    return f"{SOURCES[name].how_to_get}; or `stratafl data prepare {name} --from hub`"


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
