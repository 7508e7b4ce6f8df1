"""A run's state, looked at before anything is believed of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from stratafl.base.errors import InvalidInput
from stratafl.base.state_dict import State
from stratafl.base.topology import Tree
from stratafl.base.validation import check_integer, check_number
from stratafl.core.measure.record import BEGINNING, RoundResult, Stretch
from stratafl.core.work import Engine
from stratafl.ranks.state import check_whole

PARTS = ("federation", "traffic")
"""The parts of a run's state that have rows, which several ranks share."""


class Within(NamedTuple):
    """What was done of a global round."""

    before: Stretch = BEGINNING
    meetings: int = 0
    seconds: float = 0.0

    @staticmethod
    def read(values: State, tree: Tree, meetings: int) -> Within:
        """Read it from a state, or complain; meetings: those of a whole round."""
        kinds = {"meetings": int, "seconds": float, "refused": list, "drift": list | None, "client_steps": int}
        kinds["clipped"] = int | None
        if set(values) != set(kinds) or not all(isinstance(values[name], kind) for name, kind in kinds.items()):
            raise InvalidInput("state.within", list(values), f"must be a table of {', '.join(kinds)}")
        return Within(
            Stretch.read(values, tree.whole, "state.within"),
            check_integer("state.within.meetings", values["meetings"], at_least=1, at_most=meetings - 1),
            check_number("state.within.seconds", values["seconds"], at_least=0),
        )


def check_state(state: State, engine: Engine, tree: Tree, meetings: int, several_ranks: bool) -> None:
    """Refuse a state that is none, or another engine's."""
    kinds: dict[str, Any] = {"step": int, "history": list, "engine": str, "chunk": int | None}
    kinds |= dict.fromkeys(PARTS, dict)
    if isinstance(state, Mapping) and "within" in state:
        kinds["within"] = dict
    if not isinstance(state, Mapping) or set(state) != set(kinds):
        raise InvalidInput("state", type(state).__name__, f"must be a table of {', '.join(kinds)}")
    for name, kind in kinds.items():
        if not isinstance(state[name], kind):
            raise InvalidInput(f"state.{name}", state[name], "is of the wrong kind")
    history = [RoundResult.of(values) for values in state["history"]]
    if [result.round for result in history] != list(range(1, len(history) + 1)):
        raise InvalidInput("state.history", len(history), "its rounds are not one after another")
    check_integer("state.step", state["step"], at_least=0)
    if "within" in state:
        Within.read(state["within"], tree, meetings)
    if state["engine"] != engine.name:
        raise InvalidInput("state.engine", state["engine"], f"another engine's; this run has {engine.name}")
    if engine.chunk is not None or state["chunk"] is not None:
        check_integer("state.chunk", state["chunk"], at_least=1)
    if several_ranks:
        check_whole(tree, {name: state[name] for name in PARTS})
