"""The demo: the paper's four-way comparison, small enough for a laptop."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from stratafl.config.schema import Config

TARGET = 0.9
METHODS = {
    "HFedAvg": "hfedavg",
    "local correction": "local_correction",
    "group correction": "group_correction",
    "MTGC": "mtgc",
}


def settings(method: str, seed: int = 0) -> Mapping[str, Any]:
    """Handwritten digits on a 4x5 tree: a group sees 4 of the 10 classes, a client 1."""
    return {
        "tree": {"shape": "4x5"},
        "data": {
            "name": "digits",
            "partition": [{"name": "classes", "k": 4}, {"name": "classes", "k": 1}],
        },
        "model": {"name": "mlp", "hidden": [32]},
        "method": {"name": method},
        "schedule": {"periods": [10, 5]},
        "leaf": {"lr": 0.1, "batch": 20},
        "run": {"rounds": 12, "seed": seed},
    }


def configs(seed: int = 0) -> Iterator[tuple[str, Config]]:
    """The config of each method of the demo, with its title."""
    for title, method in METHODS.items():
        yield title, Config.of(settings(method, seed))
