"""Tuning task: which cost to minimise, for which target, on which networks."""

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
    """Space, networks, target and cost of one search."""

    config: Config
    """Given config, which stops at the target."""
    space: Space
    networks: tuple[Network, ...]
    target: Goal
    minimise: Cost
    budgets: Mapping[Cost, float] = field(default_factory=dict)
    """Maximum costs up to the target."""
    seeds: int = 3
    """Number of seeds with which the best settings are run."""
    trials: int = 20

    @staticmethod
    def of(config: Config, space: Space, networks: Sequence[Network], target: Goal, **options: Any) -> TuningTask:
        """Create a task whose runs all end at the target."""
        name = repeated(slug(network.name) for network in networks)
        if name is not None:
            raise InvalidInput("--network", name, "two networks of this name: give each once, and names of their own")
        stopping = at_target(config, target)
        return TuningTask(stopping, replace(space, config=stopping), tuple(networks), target, **options)

    @property
    def seed_list(self) -> list[int]:
        """Seed of the search, then the seeds of the repetitions."""
        return [self.config.run.seed + offset for offset in range(self.seeds)]

    def as_dict(self) -> dict[str, Any]:
        """Description that must be equal to continue a search; a network may be added."""
        return {
            "config": self.config.as_dict(),
            "space": self.space.as_dict(),
            "target": str(self.target),
            "minimise": self.minimise,
            "budgets": dict(self.budgets),
            "networks": {network.name: _digest(network) for network in self.networks},
        }

    def check(self, folder: Path) -> dict[str, Any]:
        """Compare with the task stored in a folder, which another task must not use; returns the
        description to store."""
        description: dict[str, Any] = json.loads(json.dumps(self.as_dict()))
        path = folder / FILE
        if not path.exists():
            return description
        before = read_json(path)
        if not isinstance(before, dict) or not isinstance(before.get("networks"), dict):
            raise cannot_read(path, "not a plan's question")
        # networks may be added, as the runs are there already
        added = {name: digest for name, digest in description["networks"].items() if name not in before["networks"]}
        networks = {**before["networks"], **description["networks"]}
        before["networks"] = {**before["networks"], **added}
        description["networks"] = networks
        changed = [key for key in description if _decisive(before.get(key)) != _decisive(description[key])]
        if changed:
            reason = (
                f"holds a plan with another {' and '.join(changed)}: give what it was begun with, or another folder"
            )
            raise InvalidInput("--out", folder, reason)
        return description


def _digest(network: Network) -> str:
    """Digest of a network, without quantities that have their defaults."""
    return hashlib.sha256(json.dumps(network.as_tables(), sort_keys=True).encode()).hexdigest()


def _decisive(value: object) -> object:
    """Copy tables without entries that decide nothing, such as file paths; return other values as
    they are."""
    return json.loads(json.dumps(essence(value))) if isinstance(value, dict) else value


def at_target(config: Config, target: Goal) -> Config:
    """Copy of a config whose run ends at the target."""
    stop = {target.metric: target.value} if not target.sign else f"{target.metric} {target.sign} {target.value!r}"
    return replace(config, run=replace(config.run, stop_at=None, stop_when=stop))


def budgets_of(texts: Sequence[str], option: str = "--budget") -> dict[Cost, float]:
    """Read budgets such as "seconds=3600", each cost at most once."""
    budgets: dict[Cost, float] = {}
    for text in texts:
        name, _, value = text.partition("=")
        cost = check_choice(option, name.strip(), COSTS)
        try:
            limit = float(value)
        except ValueError:
            raise InvalidInput(option, text, "must look like seconds=3600") from None
        if cost in budgets:
            raise InvalidInput(option, text, f"{cost} has a budget already")
        budgets[cost] = check_number(option, limit, above=0)
    return budgets
