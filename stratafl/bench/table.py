"""What a benchmark measured, and how often as fast one way is as another: at the same precision only."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from stratafl.roofline import Rates

OURS = ("loop", "stacked", "auto")
"""The engines; every other way is what they are measured against."""
Way = tuple[str, str]
"""An engine or a baseline, and the precision of its products."""


def ratios(client_steps: Mapping[Way, float]) -> dict[str, dict[str, float]]:
    """Each engine's speed as a multiple of that of every baseline of the same precision, by "engine:precision"."""
    found = {
        f"{engine}:{precision}": {
            other: speed / other_speed
            for (other, other_precision), other_speed in client_steps.items()
            if other not in OURS and other_precision == precision
        }
        for (engine, precision), speed in client_steps.items()
        if engine in OURS
    }
    return {way: others for way, others in found.items() if others}


@dataclass(frozen=True)
class Row:
    """One way to train."""

    engine: str
    precision: str
    how: str
    ms: float
    """For one step of all clients."""
    client_steps: float
    """A second."""
    peak_bytes: int | None
    """Of the GPU's memory."""
    roofline: float
    """The share of what the device could do in this precision."""
    stages_ms: dict[str, float]
    """Of a step, with all before it awaited: `train` and `meet`, where they can be told apart."""
    kernels_ms: dict[str, float]
    """Of a step of our own engines on a GPU: what its time goes to, by kind of work."""


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
    """Of one client's step."""
    bytes: dict[str, float]
    """Of one client's step, in each precision."""
    rates: Rates
    rows: list[Row]
    failed: dict[str, str]
    """Why a way could not be measured, by "way:precision"."""

    def ratios(self) -> dict[str, dict[str, float]]:
        """How often as fast as each baseline of its precision an engine is."""
        return ratios({(row.engine, row.precision): row.client_steps for row in self.rows})

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "ratios": self.ratios()}

    def text(self) -> str:
        """For people."""
        head = f"{self.model}, {self.clients} clients, batch {self.batch}, {self.steps} steps a round, {self.device}"
        titles = f"{'':16}{'precision':>10}{'ms / step':>12}{'client-steps/s':>16}{'peak GiB':>10}{'roofline':>10}"
        lines = [head, titles]
        for row in self.rows:
            peak = "" if row.peak_bytes is None else f"{row.peak_bytes / 2**30:.2f}"
            speed = f"{row.ms:12.3f}{row.client_steps:16,.0f}{peak:>10}{row.roofline:10.1%}"
            lines.append(f"{row.engine:16}{row.precision:>10}{speed}")
        lines += [f"{way}: failed: {reason}" for way, reason in self.failed.items()]
        for way, others in self.ratios().items():
            engine, _, precision = way.partition(":")
            told = ", ".join(f"{ratio:.1f}x {other}" for other, ratio in others.items())
            lines += _wrapped(f"{engine}, all in {precision}: {told}")
        for row in self.rows:
            spent = row.kernels_ms or row.stages_ms
            if spent:
                parts = ", ".join(f"{kind} {ms:.3f}" for kind, ms in spent.items())
                lines += _wrapped(f"{row.engine} {row.precision}, ms / step: {parts}")
        return "\n".join(lines)


def _wrapped(line: str) -> list[str]:
    return textwrap.wrap(line, 100, subsequent_indent="    ")
