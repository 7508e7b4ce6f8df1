"""Small federation on handwritten digits, for the benchmarks and tests of the deployment."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stratafl.experiment.experiment import Experiment
from stratafl.runs.format import is_locked

CONFIG = """
rounds = {rounds}
[tree]
shape = {shape}
weights = "samples"
[data]
source = "digits"
[model]
name = "mlp"
hidden = {hidden}
{local_parameters}
[method]
name = "{method}"
[schedule]
periods = {periods}
[client]
lr = 0.1
batch_size = 20
"""


def small_tree(
    folder: Path,
    *,
    shape: str | Sequence[Any] = "2x2",
    periods: Sequence[int] = (2, 3),
    method: str = "mtgc",
    hidden: Sequence[int] = (16,),
    rounds: int = 2,
    local_parameters: Sequence[str] = (),
) -> Experiment:
    """Write the config to run.toml in the folder and load it."""
    path, local = folder / "run.toml", f"local_parameters = {list(local_parameters)}" if local_parameters else ""
    values = {"shape": json.dumps(shape), "periods": list(periods), "hidden": list(hidden)}
    path.write_text(CONFIG.format(**values, method=method, rounds=rounds, local_parameters=local))
    return Experiment.from_toml(path)


def processes(site: Path) -> dict[str, int]:
    """Running processes of a site, the supervisor and its children, by the names of their logs."""
    if not is_locked(site):
        return {}
    supervisor = int((site / "lock").read_text())
    alive = {"supervisor": supervisor}
    with contextlib.suppress(OSError):  # it ended meanwhile
        for pid in map(int, Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()):
            with contextlib.suppress(OSError):
                alive[Path(os.readlink(f"/proc/{pid}/fd/1")).stem] = pid
    return alive
