"""A run's records as TensorBoard events, beside what its directory keeps anyway."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any

from stratafl.errors import MissingExtra
from stratafl.simulate import RoundResult

FOLDER = "tensorboard"
"""In the run's own directory."""


def check_board() -> Any:
    """The writer's class; a complaint before the work where it is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise MissingExtra("--tensorboard", "tensorboard", "tensorboard") from None
    return SummaryWriter


class Board:
    """Open while a run goes on."""

    def __init__(self, run: Path, done: int = 0):
        """done: rounds there are already; events of later rounds, left by a process that died, are void."""
        self._writer = check_board()(run / FOLDER, purge_step=done + 1 if done else None)

    def __enter__(self) -> Board:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writer.close()

    def add(self, record: RoundResult) -> None:
        for name, value in scalars(record).items():
            self._writer.add_scalar(name, value, global_step=record.round)
        self._writer.flush()


def scalars(record: RoundResult) -> dict[str, float]:
    """A record's numbers, by the names TensorBoard groups them by."""
    found = {f"test/{name}": value for name, value in record.metrics.items()}
    for node, metrics in record.nodes.items():
        found |= {f"node {node}/{name}": value for name, value in metrics.items()}
    for level, quantities in record.drift.items():
        found |= {f"level {level}/{name}": value for name, value in quantities.items()}
    return found | {
        "run/lr": record.lr,
        "run/bytes per client": record.bytes_per_client,
        "run/seconds per round": record.seconds,
        "run/refused": len(record.refused),
    }
