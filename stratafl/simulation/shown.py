"""A simulation in a few words: for trackers, in a notebook, and as plain text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stratafl.core.federation import Federation
from stratafl.core.flat import Flat
from stratafl.core.measure.record import RoundResult
from stratafl.core.measure.show import card
from stratafl.core.schedule import Schedule
from stratafl.core.work import Engine


class Shown:
    """What a simulation shows of itself."""

    federation: Federation
    flat: Flat
    engine: Engine
    schedule: Schedule
    history: list[RoundResult]
    rounds: int
    notes: Sequence[str]
    method = ""
    """The rules in a few words."""

    def facts(self) -> dict[str, Any]:
        """What is run, in a few words and numbers."""
        tree = self.federation.tree.whole
        return {
            "method": self.method,
            "tree": " > ".join(f"{size:,}" for size in tree.sizes),
            "model": type(self.flat.module).__name__,
            "parameters": self.flat.parameters,
            "periods": list(self.schedule.periods),
            "engine": self.engine.how,
            "rounds": self.rounds,
        }

    def __repr__(self) -> str:
        facts = self.facts()
        told = f"<Simulation of {facts['method'] or 'a run'}: {facts['model']} of {facts['parameters']:,} parameters"
        where = f"{self.federation.tree.whole.leaves:,} clients, round {len(self.history)} of {self.rounds}"
        return f"{told} on {where}>"

    def _repr_html_(self) -> str:
        facts = {**self.facts(), "rounds": f"{len(self.history)} of {self.rounds}"}
        facts |= {"note": "; ".join(self.notes)} if self.notes else {}
        return card("Simulation", facts, self.history)
