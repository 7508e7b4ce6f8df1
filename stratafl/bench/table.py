"""What a benchmark measured, and how often as fast one engine is as another: at the same precision
only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from stratafl.bench.roofline import Rates

OURS = ("loop", "stacked", "auto")
"""The engines; every other name is a baseline they are measured against, "vmap" among them: that is
`torch.func.vmap` as one would write it, and not the engine of this name."""
EnginePrecision = tuple[str, str]
"""An engine or a baseline, and the precision of its products."""


def ratios(client_steps: Mapping[EnginePrecision, float]) -> dict[str, dict[str, float]]:
    """Each engine's speed as a multiple of that of every baseline of the same precision, by
    "engine:precision"."""
    multiples = {
        f"{engine}:{precision}": {
            other: speed / other_speed
            for (other, other_precision), other_speed in client_steps.items()
            if other not in OURS and other_precision == precision
        }
        for (engine, precision), speed in client_steps.items()
        if engine in OURS
    }
    return {name: others for name, others in multiples.items() if others}


@dataclass(frozen=True)
class Row:
    """One engine or baseline."""

    engine: str
    precision: str
    how: str
    ms: float
    """Milliseconds for one step of all clients."""
    client_steps: float
    """Client-steps per second."""
    peak_bytes: int | None
    """The most of the GPU's memory that was taken."""
    roofline: float
    """The share of what the device could do in this precision."""
    stages_ms: dict[str, float]
    """The parts of a step, each with all before it awaited: `train` and `meet`, where they can be
    told apart."""
    kernels_ms: dict[str, float]
    """What the time of a step goes to, by kind of work; for our own engines on a GPU."""

    def cells(self) -> tuple[str, ...]:
        """The row as people read it, under `TITLES`."""
        peak = "" if self.peak_bytes is None else f"{self.peak_bytes / 2**30:.2f}"
        return self.engine, self.precision, f"{self.ms:.3f}", f"{self.client_steps:,.0f}", peak, f"{self.roofline:.1%}"


TITLES = ("engine", "precision", "ms / step", "client-steps/s", "peak GiB", "roofline")
WIDEST = ("compiled vmap", "fp32", "99999.999", "99,999,999", "999.99", "100.0%")
"""Cells as wide as any that may come."""


@dataclass(frozen=True)
class Table:
    """What a run measured."""

    model: str
    parameters: int
    clients: int
    batch: int
    steps: int
    device: str
    torch: str
    operations: float
    """What one client's step computes."""
    bytes: dict[str, float]
    """What one client's step reads and writes, in each precision."""
    rates: Rates
    rows: list[Row]
    failed: dict[str, str]
    """Why an engine or a baseline could not be measured, by "name:precision"."""

    def ratios(self) -> dict[str, dict[str, float]]:
        """How often as fast as each baseline of its precision an engine is."""
        return ratios({(row.engine, row.precision): row.client_steps for row in self.rows})

    def as_dict(self) -> dict[str, Any]:
        """The table as JSON has it."""
        return {**asdict(self), "ratios": self.ratios()}

    def heading(self) -> str:
        """What is measured, for people; known before it is."""
        return f"{self.model}, {self.clients} clients, batch {self.batch}, {self.steps} steps a round, {self.device}"

    def remarks(self) -> list[str]:
        """What is to be said below the rows, a sentence each."""
        lines = [f"{way}: failed: {reason}" for way, reason in self.failed.items()]
        for way, others in self.ratios().items():
            engine, _, precision = way.partition(":")
            told = ", ".join(f"{ratio:.1f}x {other}" for other, ratio in others.items())
            lines.append(f"{engine}, all in {precision}: {told}")
        for row in self.rows:
            spent = row.kernels_ms or row.stages_ms
            if spent:
                parts = ", ".join(f"{kind} {ms:.3f}" for kind, ms in spent.items())
                lines.append(f"{row.engine} {row.precision}, ms / step: {parts}")
        return lines
