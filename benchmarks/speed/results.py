"""Results of the speed benchmark, with speed-ups between contenders of the same precision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.speed.roofline import Rates
from stratafl.cli import tables

ENGINES = ("loop", "stacked", "auto")
"""Engines of the package. Every other name is a baseline, also "vmap": plain `torch.func.vmap`, not
the engine of this name."""
EnginePrecision = tuple[str, str]
"""Name of an engine or a baseline, and the precision of its products."""


def ratios(client_steps: Mapping[EnginePrecision, float]) -> dict[str, dict[str, float]]:
    """Speed-up of each engine over every baseline of the same precision, by "engine:precision"."""
    multiples = {
        f"{engine}:{precision}": {
            other: speed / other_speed
            for (other, other_precision), other_speed in client_steps.items()
            if other not in ENGINES and other_precision == precision
        }
        for (engine, precision), speed in client_steps.items()
        if engine in ENGINES
    }
    return {name: others for name, others in multiples.items() if others}


@dataclass(frozen=True)
class BenchmarkRow:
    """Measurements of one engine or baseline."""

    engine: str
    precision: str
    how: str
    ms: float
    """Milliseconds for one step of all clients."""
    client_steps: float
    """Client-steps per second."""
    peak_bytes: int | None
    """Peak GPU memory."""
    roofline: float
    """Share of the device's peak in this precision."""
    stages_ms: dict[str, float]
    """Milliseconds of `train` and `meet` per step, each synchronised; empty for a baseline."""
    kernels_ms: dict[str, float]
    """Milliseconds of a step by kernel category; for engines on a GPU."""

    def cells(self) -> tuple[str, ...]:
        """Cells of the row as text, in the order of `TITLES`."""
        peak = "" if self.peak_bytes is None else f"{self.peak_bytes / 2**30:.2f}"
        return self.engine, self.precision, f"{self.ms:.3f}", f"{self.client_steps:,.0f}", peak, f"{self.roofline:.1%}"


TITLES = ("engine", "precision", "ms / step", "client-steps/s", "peak GiB", "roofline")
WIDEST_CELLS = ("compiled vmap", "fp32", "99999.999", "99,999,999", "999.99", "100.0%")
"""The widest cells to expect, which fix the width of the columns."""


@dataclass(frozen=True)
class BenchmarkTable:
    """Results of all contenders on one task."""

    model: str
    parameters: int
    clients: int
    batch: int
    steps: int
    device: str
    torch: str
    operations: float
    """Operations of one client's step."""
    bytes: dict[str, float]
    """Bytes that one client's step reads and writes, by precision."""
    rates: Rates
    rows: list[BenchmarkRow]
    failed: dict[str, str]
    """Reason why a contender could not be measured, by "name:precision"."""

    def ratios(self) -> dict[str, dict[str, float]]:
        """Speed-ups of the engines; see `ratios`."""
        return ratios({(row.engine, row.precision): row.client_steps for row in self.rows})

    def as_dict(self) -> dict[str, Any]:
        """The table as JSON data."""
        return {**asdict(self), "ratios": self.ratios()}

    def heading(self) -> str:
        """Title of the table: the task and the device."""
        return f"{self.model}, {self.clients} clients, batch {self.batch}, {self.steps} steps a round, {self.device}"

    def remarks(self) -> list[str]:
        """Sentences below the table: failures, speed-ups, parts of a step."""
        lines = [f"{way}: failed: {reason}" for way, reason in self.failed.items()]
        for way, others in self.ratios().items():
            engine, _, precision = way.partition(":")
            speedups = ", ".join(f"{ratio:.1f}x {other}" for other, ratio in others.items())
            lines.append(f"{engine}, all in {precision}: {speedups}")
        for row in self.rows:
            spent = row.kernels_ms or row.stages_ms
            if spent:
                parts = ", ".join(f"{kind} {ms:.3f}" for kind, ms in spent.items())
                lines.append(f"{row.engine} {row.precision}, ms / step: {parts}")
        return lines


class TablePrinter:
    """Print each row of a table as soon as it is measured."""

    def __init__(self) -> None:
        columns = [
            tables.Column(title, right=column > 1, minor=title == "peak GiB") for column, title in enumerate(TITLES)
        ]
        self._table = tables.Table(columns, [WIDEST_CELLS])
        self._rows: int | None = None

    def __call__(self, measured: BenchmarkTable) -> None:
        if self._rows is None:
            self._table.head(measured.heading())
            self._rows = 0
        for row in measured.rows[self._rows :]:
            self._table.add(row.cells())
        self._rows = len(measured.rows)
