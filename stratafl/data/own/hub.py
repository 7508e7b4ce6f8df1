"""A data set of Hugging Face's: saved in a folder, or in the cache of its package; never
downloaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stratafl.base.errors import InvalidInput, MissingExtra, guarded
from stratafl.base.validation import check_choice
from stratafl.data.given import Columns
from stratafl.data.own.found import Found
from stratafl.data.sets.formats.hub import load

TESTED = ("test", "validation")
"""The splits a model is tested on unless one is named, the first that there is."""


def read(name: str, test: object, columns: Columns, arguments: Mapping[str, Any]) -> Found:
    """Read a data set's split `train`, and one to test on."""
    splits = _splits(name, arguments)
    if "train" not in splits:
        raise InvalidInput("data.name", name, f"has no split train; it has {', '.join(splits)}")
    tested = (
        check_choice("data.test", test, splits) if test is not None else next((n for n in TESTED if n in splits), None)
    )
    train = splits["train"]
    target = columns.target("data", list(train.column_names))
    classes = getattr(train.features[target], "names", None) or ()
    return Found(train=train, test=None if tested is None else splits[tested], classes=tuple(classes))


@contextmanager
def _offline(datasets: Any) -> Iterator[None]:
    """Have the package look nowhere but in its cache; it has no argument for that."""
    from huggingface_hub import constants

    before = datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE = before


def _splits(name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """A data set's splits by their names."""
    try:
        import datasets  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError:
        raise MissingExtra("data sets of Hugging Face", "datasets", "hub") from None
    folder = Path(name)
    if folder.is_dir():
        if not ((folder / "dataset_dict.json").exists() or (folder / "state.json").exists()):
            found = [part for part in ("train", *TESTED) if list(folder.rglob(f"{part}*.parquet"))]
            return {part: load(folder, part) for part in found}
        with guarded("data.name", name, "cannot be read"):
            saved = datasets.load_from_disk(name)
    else:
        get = f"to get it: python -c \"import datasets; datasets.load_dataset('{name}')\""
        with guarded("data.name", name, f"is not in the cache of Hugging Face's datasets; {get}"), _offline(datasets):
            saved = datasets.load_dataset(name, **arguments)
    return dict(saved) if isinstance(saved, dict) else {"train": saved}
