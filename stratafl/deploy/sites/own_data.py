"""A leaf's own data, at its own host: nobody else needs it, and it leaves it only as what training
makes of it.

FILE.npz        with x and y
FOLDER          with x.npy and y.npy
FILE.py         with a function load() that returns x and y

x is what the model takes, sample by sample; y the classes' numbers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stratafl.base.errors import InvalidInput
from stratafl.base.user_code import load_module
from stratafl.deploy.sites.site import Site

FIELD = "data of this leaf"


def own_data(site: Site, folder: Path) -> tuple[Tensor, Tensor]:
    """What this leaf has at its host, if it is what the run takes; nothing else is loaded."""
    x, y = _checked(site, *_read(folder / site.data))
    if site.samples[0] not in (0, len(y)):
        raise InvalidInput(FIELD, f"{len(y)} samples", f"must be the {site.samples[0]} that the topology declares")
    return x, y


def _read(path: Path) -> tuple[np.ndarray, np.ndarray]:
    try:
        if path.suffix == ".py":
            found = load_module(FIELD, path).load()
            x, y = found
            return np.asarray(x), np.asarray(y)
        if path.is_dir():
            return np.load(path / "x.npy", allow_pickle=False), np.load(path / "y.npy", allow_pickle=False)
        with np.load(path, allow_pickle=False) as arrays:
            return arrays["x"], arrays["y"]
    except InvalidInput:
        raise
    except (Exception, SystemExit) as problem:
        wanted = "must be a .npz with x and y, a folder with x.npy and y.npy, or a .py whose load() returns both"
        # what was raised may quote a sample: it is the cause, and no part of the message
        raise InvalidInput(FIELD, path, wanted) from problem


def _checked(site: Site, x: np.ndarray, y: np.ndarray) -> tuple[Tensor, Tensor]:
    """The samples as tensors, if they are what this run's model takes."""
    wanted: Any = getattr(torch, site.input_type)
    if (
        x.shape[1:] != tuple(site.inputs)
        or (x.dtype.kind == "f") != wanted.is_floating_point
        or x.dtype.kind not in "fiu"
    ):
        given = f"x of shape {x.shape} and type {x.dtype.name}"
        raise InvalidInput(
            FIELD, given, f"must be (samples, {', '.join(map(str, site.inputs))}) of type {site.input_type}"
        )
    if y.dtype.kind not in "iu" or y.shape != x.shape[:1] or not len(y) or y.min() < 0 or y.max() >= site.classes:
        given = f"y of shape {y.shape} and type {y.dtype.name}"
        raise InvalidInput(FIELD, given, f"must be a class, 0 to {site.classes - 1}, for each of at least one sample")
    if not np.isfinite(x).all():
        raise InvalidInput(FIELD, "x", "must be finite")
    return torch.from_numpy(x.astype(x.dtype.newbyteorder("="))).to(wanted), torch.from_numpy(y.astype(np.int64))
