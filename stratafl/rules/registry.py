"""Registry of methods: rule factories by name, and the edge levels that a name stands for."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar, get_args

from stratafl.base.errors import InvalidInput, UserCodeError, convert_errors, join_names, unknown_name
from stratafl.base.rng import ALIKE, seeded_rng
from stratafl.base.tracebacks import definition_frame
from stratafl.base.validation import check_choice, check_integer, find_name, name_and_params
from stratafl.core.rule import Rule, average
from stratafl.rules.checks import guarded_rule

MethodLevels = Literal["all", "clients", "aggregators", "root"]
Factory = TypeVar("Factory", bound=Callable[..., Rule])


@dataclass(frozen=True)
class RegisteredMethod:
    """A rule factory, its name, and the edge levels that get its rule in a whole tree."""

    name: str
    make: Callable[..., Rule]
    levels: MethodLevels
    summary: str

    @property
    def parameters(self) -> dict[str, object]:
        """The factory's parameters with their defaults."""
        return {p.name: p.default for p in inspect.signature(self.make).parameters.values()}

    def rule(self, /, **params: object) -> Rule:
        """Make the rule, with checks around the functions of a rule that a user wrote."""
        for name in params:
            if name not in self.parameters:
                raise unknown_name(f"{self.name} parameter", name, self.parameters)
        with convert_errors(f"{self.name} parameters", params, "cannot be made"), seeded_rng(ALIKE):
            rule = self.make(**params)
        if not isinstance(rule, Rule):
            must = f"must make a Rule, not {type(rule).__name__}"
            raise UserCodeError(f"{self.name} parameters", params, must, definition_frame(self.make))
        return guarded_rule(f"rule {self.name!r}", rule)


_entries: dict[str, RegisteredMethod] = {}
_shipped: set[str] = set()
"""Names of the package's own methods, which mean the same in every run."""


def register(
    name: str, levels: MethodLevels = "clients", summary: str | None = None, **former: object
) -> Callable[[Factory], Factory]:
    """Decorator: register a rule factory under a name.

    `levels` says which edge levels get the rule when the name stands for a whole tree; the other
    levels average. `"clients"` is the clients' level (a method of plain federated learning, run
    inside each group), `"aggregators"` all levels but the clients', `"root"` the root's, `"all"`
    all of them. A name that is registered again means the newer factory; the names of the package's
    own methods cannot be used. Random numbers that a factory draws are the same in every run and at
    every site of a deployed tree.
    """
    if former:
        raise InvalidInput("register", next(iter(former)), f"unknown; levels = {join_names(get_args(MethodLevels))}")
    if not isinstance(name, str) or not name:
        raise InvalidInput("register", name, "must be a name")
    if name in _shipped:
        raise InvalidInput("register", name, "is the name of a rule that stratafl ships: register it under another one")
    check_choice("register levels", levels, get_args(MethodLevels))

    def add(make: Factory) -> Factory:
        text = summary or (inspect.getdoc(make) or "").partition("\n\n")[0].replace("\n", " ")
        if not text:
            raise InvalidInput("register", name, "the factory needs a docstring or a summary")
        _entries[name] = RegisteredMethod(name, make, levels, text)
        return make

    return add


def keep_names() -> None:
    """Reserve all names registered so far."""
    _shipped.update(_entries)


def entry(name: str, field: str = "method") -> RegisteredMethod:
    """The method registered under a name; raises InvalidInput for `field` if there is none."""
    return _entries[find_name(field, name, _entries)]


def entries() -> list[RegisteredMethod]:
    """Registered methods, in the order of registration."""
    return list(_entries.values())


RuleLike = Rule | str | Mapping[str, object]


def place(method: str | Mapping[str, object], depth: int) -> tuple[Rule, ...]:
    """The rules of a method, one per edge level of a tree of this depth, root first."""
    name, params = name_and_params("method", method, "a Rule")
    registered = entry(name)
    rule = registered.rule(**params)
    depth = check_integer("depth", depth, at_least=1)
    all_levels = range(1, depth + 1)
    places = {"all": all_levels, "clients": [depth], "aggregators": range(1, depth), "root": [1]}[registered.levels]
    return tuple(rule if level in places else average() for level in all_levels)


def rules_for(rules: RuleLike | Sequence[RuleLike], depth: int) -> tuple[Rule, ...]:
    """Rules per edge level, root first, from a method's name or table, or from a list of them.

    A single Rule stands for a list of one, in a tree of depth 1.
    """
    if isinstance(rules, str | Mapping):
        return place(rules, depth)
    per_level: Sequence[RuleLike] = [rules] if isinstance(rules, Rule) else rules
    if not isinstance(per_level, Sequence) or isinstance(per_level, bytes):
        raise InvalidInput("method.rules", rules, "must be a method's name or one rule per edge level")
    if isinstance(rules, Rule) and depth > 1:
        allowed = f'needs one per edge level, {depth} of them, in a list; or a method\'s name, such as "mtgc"'
        raise InvalidInput("method.rules", "one Rule", allowed)
    if len(per_level) != depth:
        raise InvalidInput(
            "method.rules", [_label(r) for r in per_level], f"needs one rule per edge level, {depth} of them"
        )
    return tuple(_parse_rule(rule, level) for level, rule in enumerate(per_level, 1))


def _parse_rule(rule: RuleLike, level: int) -> Rule:
    if isinstance(rule, Rule):
        return guarded_rule(f"the rule of edge level {level}", rule)
    field = f"method.rules[{level - 1}]"
    name, params = name_and_params(field, rule, "a Rule")
    return entry(name, field).rule(**params)


def method_label(rules: RuleLike | Sequence[RuleLike]) -> str:
    """Short text for a user's rules: "mtgc", "fedprox (mu 0.1)", "average, Rule"."""
    if isinstance(rules, Rule | str | Mapping):
        return str(_label(rules))
    return ", ".join(str(_label(rule)) for rule in rules)


def _label(rule: object) -> object:
    if isinstance(rule, Mapping) and "name" in rule:
        params = ", ".join(f"{key} {value}" for key, value in rule.items() if key != "name")
        return f"{rule['name']} ({params})" if params else rule["name"]
    return "Rule" if isinstance(rule, Rule) else rule
