"""What is asked of a plan: which cost to get where, on which networks, within what."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from stratafl.base.errors import InvalidInput
from stratafl.base.files import cannot_read, read_json
from stratafl.base.validation import check_choice, check_number, repeated
from stratafl.config.schema import Config
from stratafl.metrics.objective import Goal
from stratafl.network.specification import Network
from stratafl.runs.format import slug
from stratafl.runs.provenance import essence
from stratafl.tune.space import Space

Cost = Literal["seconds", "bytes", "joules", "money"]
COSTS: tuple[Cost, ...] = get_args(Cost)
FILE = "question.json"


@dataclass(frozen=True, eq=False)
class TuningTask:
    """What one plan asks: what to search, where, for which target and at what cost."""

    config: Config
    """The config as given, but that it stops at the target."""
    space: Space
    networks: tuple[Network, ...]
    target: Goal
    minimise: Cost
    budgets: Mapping[Cost, float] = field(default_factory=dict)
    """The most that getting to the target may cost, of whichever costs."""
    seeds: int = 3
    """Runs of each of the best settings, with as many seeds."""
    trials: int = 20

    @staticmethod
    def of(config: Config, plan: Space, networks: Sequence[Network], target: Goal, **rest: Any) -> TuningTask:
        """A config's, whose runs all end at the target."""
        name = repeated(slug(network.name) for network in networks)
        if name is not None:
            raise InvalidInput("--network", name, "two networks of this name: give each once, and names of their own")
        stopping = at_target(config, target)
        return TuningTask(stopping, replace(plan, config=stopping), tuple(networks), target, **rest)

    @property
    def seed_list(self) -> list[int]:
        """The search's, then the further ones."""
        return [self.config.run.seed + more for more in range(self.seeds)]

    def as_dict(self) -> dict[str, Any]:
        """What must stay the same where a plan is gone on with; a network may be added."""
        return {
            "config": self.config.as_dict(),
            "space": self.space.as_dict(),
            "target": str(self.target),
            "minimise": self.minimise,
            "budgets": dict(self.budgets),
            "networks": {each.name: _digest(each) for each in self.networks},
        }

    def check(self, folder: Path) -> dict[str, Any]:
        """What is to be noted down of it; refuse a folder in which another is being answered."""
        mine: dict[str, Any] = json.loads(json.dumps(self.as_dict()))
        path = folder / FILE
        if not path.exists():
            return mine
        before = read_json(path)
        if not isinstance(before, dict) or not isinstance(before.get("networks"), dict):
            raise cannot_read(path, "not a plan's question")
        # networks may be added, as the runs are there already
        added = {name: each for name, each in mine["networks"].items() if name not in before["networks"]}
        networks = {**before["networks"], **mine["networks"]}
        before["networks"] = {**before["networks"], **added}
        mine["networks"] = networks
        changed = [key for key in mine if _decisive(before.get(key)) != _decisive(mine[key])]
        if changed:
            told = f"holds a plan with another {' and '.join(changed)}: give what it was begun with, or another folder"
            raise InvalidInput("--out", folder, told)
        return mine


def _digest(network: Network) -> str:
    """A number for what a network says, which what it leaves as usual is no part of."""
    return hashlib.sha256(json.dumps(network.as_tables(), sort_keys=True).encode()).hexdigest()


def _decisive(value: object) -> object:
    """Tables without what decides nothing, such as where files lie; any other value as it is."""
    return json.loads(json.dumps(essence(value))) if isinstance(value, dict) else value


def at_target(config: Config, target: Goal) -> Config:
    """A config whose run ends as soon as it is there."""
    stop = {target.metric: target.value} if not target.sign else f"{target.metric} {target.sign} {target.value!r}"
    return replace(config, run=replace(config.run, stop_at=None, stop_when=stop))


def budgets_of(texts: Sequence[str], option: str = "--budget") -> dict[Cost, float]:
    """Read budgets such as "seconds=3600", each cost at most once."""
    found: dict[Cost, float] = {}
    for text in texts:
        name, _, value = text.partition("=")
        cost = check_choice(option, name.strip(), COSTS)
        try:
            limit = float(value)
        except ValueError:
            raise InvalidInput(option, text, "must look like seconds=3600") from None
        if cost in found:
            raise InvalidInput(option, text, f"{cost} has a budget already")
        found[cost] = check_number(option, limit, above=0)
    return found
