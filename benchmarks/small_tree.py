"""The config of a small tree on handwritten digits, which the deployment's benchmark and its tests run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from stratafl.config import Config

CONFIG = """
[tree]
shape = "{shape}"
weights = "samples"
[data]
name = "digits"
[model]
name = "mlp"
hidden = {hidden}
[method]
name = "{method}"
[schedule]
periods = {periods}
[leaf]
lr = 0.1
batch = 20
[run]
rounds = {rounds}
"""


def small_tree(
    folder: Path,
    *,
    shape: str = "2x2",
    periods: Sequence[int] = (2, 3),
    method: str = "mtgc",
    hidden: Sequence[int] = (16,),
    rounds: int = 2,
) -> Config:
    """Written to run.toml in the folder."""
    path = folder / "run.toml"
    path.write_text(
        CONFIG.format(shape=shape, periods=list(periods), method=method, hidden=list(hidden), rounds=rounds)
    )
    return Config.load(path)
