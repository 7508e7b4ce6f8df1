"""Rules by name, and where in a tree a name puts them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar, get_args

from stratafl.base.errors import InvalidInput, UserCodeError, convert_errors, unknown_name
from stratafl.base.rng import ALIKE, seeded_rng
from stratafl.base.tracebacks import definition_frame
from stratafl.base.validation import check_choice, check_integer, name_and_params
from stratafl.core.rule import Rule, average
from stratafl.rules.checks import guarded_rule

Place = Literal["every", "leaf", "inner", "root"]
Factory = TypeVar("Factory", bound=Callable[..., Rule])


@dataclass(frozen=True)
class Entry:
    """A registered rule: how it is made, and the edge levels it takes when it is named for a whole
    tree."""

    name: str
    make: Callable[..., Rule]
    at: Place
    summary: str

    @property
    def parameters(self) -> dict[str, object]:
        """The factory's parameters with their defaults."""
        given = inspect.signature(self.make).parameters.values()
        return {p.name: p.default for p in given}

    def rule(self, /, **params: object) -> Rule:
        for name in params:
            if name not in self.parameters:
                raise unknown_name(f"{self.name} parameter", name, self.parameters)
        with convert_errors(f"{self.name} parameters", params, "cannot be made"), seeded_rng(ALIKE):
            made = self.make(**params)
        if not isinstance(made, Rule):
            must = f"must make a Rule, not {type(made).__name__}"
            raise UserCodeError(f"{self.name} parameters", params, must, definition_frame(self.make))
        return guarded_rule(f"rule {self.name!r}", made)


_entries: dict[str, Entry] = {}
_shipped: set[str] = set()
"""Names of the package's own rules, which mean the same in every run."""


def register(name: str, at: Place = "leaf", summary: str | None = None) -> Callable[[Factory], Factory]:
    """Decorator: make a rule factory known by name.

    `at` says which edges the rule takes when the name stands for a whole tree, the others
    averaging: `"leaf"` the clients' (a method of plain federated learning run inside each group),
    `"inner"` all but the clients', `"root"` the root's, `"every"` all. A name registered again
    means the newer factory; the names of the package's own rules cannot be taken. What a factory
    draws is the same in every run and at every site of a deployed tree.
    """
    if not isinstance(name, str) or not name:
        raise InvalidInput("register", name, "must be a name")
    if name in _shipped:
        raise InvalidInput("register", name, "is the name of a rule that stratafl ships: register it under another one")
    check_choice("register at", at, get_args(Place))

    def add(make: Factory) -> Factory:
        text = summary or (inspect.getdoc(make) or "").partition("\n\n")[0].replace("\n", " ")
        if not text:
            raise InvalidInput("register", name, "the factory needs a docstring or a summary")
        _entries[name] = Entry(name, make, at, text)
        return make

    return add


def keep_names() -> None:
    """Reserve all names registered so far."""
    _shipped.update(_entries)


def entry(name: str, field: str = "rules") -> Entry:
    """The registered rule of this name, or the complaint."""
    if name not in _entries:
        raise unknown_name(field, name, _entries)
    return _entries[name]


def entries() -> list[Entry]:
    """All registered rules, in the order in which they were registered."""
    return list(_entries.values())


RuleLike = Rule | str | Mapping[str, object]


def place(method: str | Mapping[str, object], depth: int) -> tuple[Rule, ...]:
    """The rules, root first, that a method's name puts on the edges of a tree of this depth."""
    name, params = name_and_params("method", method, "a Rule")
    found = entry(name, "method")
    rule = found.rule(**params)
    levels = range(1, check_integer("depth", depth, at_least=1) + 1)
    taken = {
        "every": set(levels),
        "leaf": {depth},
        "inner": set(levels) - {depth},
        "root": {1},
    }[found.at]
    return tuple(rule if level in taken else average() for level in levels)


def rules_for(rules: RuleLike | Sequence[RuleLike], depth: int) -> tuple[Rule, ...]:
    """One rule per edge level from whatever the user gave: a method's name, or a rule for each
    edge."""
    if isinstance(rules, str | Mapping):
        return place(rules, depth)
    listed: Sequence[RuleLike] = [rules] if isinstance(rules, Rule) else rules
    if not isinstance(listed, Sequence) or isinstance(listed, bytes):
        raise InvalidInput("rules", rules, "must be a method's name or one rule per edge level")
    if isinstance(rules, Rule) and depth > 1:
        allowed = f'needs one per edge level, {depth} of them, in a list; or a method\'s name, such as "mtgc"'
        raise InvalidInput("rules", "one Rule", allowed)
    if len(listed) != depth:
        raise InvalidInput("rules", [_label(r) for r in listed], f"needs one rule per edge level, {depth} of them")
    return tuple(_one(rule, level) for level, rule in enumerate(listed, 1))


def _one(rule: RuleLike, level: int) -> Rule:
    if isinstance(rule, Rule):
        return guarded_rule(f"the rule of edge level {level}", rule)
    name, params = name_and_params("rules", rule, "a Rule")
    return entry(name).rule(**params)


def method_label(rules: RuleLike | Sequence[RuleLike]) -> str:
    """What was given as rules, in a few words: "mtgc", "fedprox (mu 0.1)", "average, Rule"."""
    if isinstance(rules, Rule | str | Mapping):
        return str(_label(rules))
    return ", ".join(str(_label(rule)) for rule in rules)


def _label(rule: object) -> object:
    if isinstance(rule, Mapping) and "name" in rule:
        given = ", ".join(f"{key} {value}" for key, value in rule.items() if key != "name")
        return f"{rule['name']} ({given})" if given else rule["name"]
    return "Rule" if isinstance(rule, Rule) else rule
