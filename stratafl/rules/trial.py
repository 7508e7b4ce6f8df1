"""A user's own rule, tried before the work starts: two nodes meet twice, and every function is
called as in the run.

What a call must do beyond returning the right thing (`guard` has that): leave its arguments as they
are, give the same again for the same, give finite numbers for finite ones, and give each node what
it would give that node alone, since a deployed node has but one row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from stratafl.core.rule import Edge, Rows, Rule
from stratafl.rules.guard import SIGNATURES, Called, what

NODES = 2
ROUNDING = 1e3
"""How many units in the last place a row may differ when it is computed with others."""


def try_rules(rules: Sequence[Rule], x_P: Tensor) -> None:
    """Try those of a run's rules, root first, that are a user's own, at the model that it starts
    with."""
    for level, rule in enumerate(rules, 1):
        if is_own(rule):
            try_rule(rule, x_P, relays=level > 1)


def is_own(rule: Rule) -> bool:
    """Whether a rule has functions of a user's own."""
    return any(isinstance(each, Called) for each in rule)


def try_rule(rule: Rule, x_P: Tensor, relays: bool = True) -> None:
    """Let two nodes meet their parents twice: everybody comes, and then some stay away. `relays`:
    newer models may come from above the parents."""
    start = torch.stack([x_P.nan_to_num(0.0, 0.0, 0.0) * (1 + k / 8) + k / 64 for k in range(NODES)])
    x, g = start * 0.75 + 0.125, start * 0.5 + 0.25
    state, memory = _call(rule, "init", start), _call(rule, "open", start)
    note = _call(rule, "note", memory)
    if rule.from_gradient is not None:
        state = _call(rule, "from_gradient", state, g, g.flip(0) * 0.5)
    for share in (1.0, 0.5):
        correction = _corrected(rule, state, note, start)
        edge = Edge(start, correction, torch.full_like(start[:, :1], 0.25))
        if rule.local is not None:
            _call(rule, "local", x, g, edge)
        state, message = _call(rule, "up", state, x, edge)
        mean = {name: _reduced(rule, rows) for name, rows in message.items()}
        memory, merged = _call(rule, "merge", memory, start, mean, torch.full_like(start[:, :1], share))
        note = _call(rule, "note", memory)
        if rule.down is not None:
            state = _call(rule, "down", state, x, Edge(start, correction, edge.rate, merged))
        if rule.relay is not None and relays:
            _corrected(rule, state, note, start)
            state = _call(rule, "relay", state)
    if rule.reweigh is not None:
        moved = {name: rows * 0.25 for name, rows in state.items()}
        memory, _ = _call(rule, "reweigh", memory, moved, torch.full_like(start[:, :1], 0.25))
    _corrected(rule, state, note, start)


def _corrected(rule: Rule, state: Rows, note: Rows, start: Tensor) -> Tensor | None:
    correction = _call(rule, "correction", state, note)
    function = rule.correction
    if isinstance(function, Called) and correction is not None and correction.shape != start.shape:
        told = f"returned {what(correction)}, must be None or a tensor of shape {tuple(start.shape)} like x"
        raise function.complaint(told)
    return correction


def _reduced(rule: Rule, rows: Tensor) -> Tensor:
    """What two parents get of their children: the first has both, the second one of them."""
    if rule.reduce is None:
        return torch.stack([rows.mean(dim=0), rows[1]])
    families = rows, rows[1:]
    return torch.stack([_call(rule, "reduce", each, torch.full_like(each[:, 0], 1 / len(each))) for each in families])


def _call(rule: Rule, name: str, *given: Any) -> Any:
    """What a function gives; a complaint where it is a user's own and does what it must not."""
    function = getattr(rule, name)
    if not isinstance(function, Called):
        return function(*given)
    before = {path: (each, each._version) for path, each in _tensors(name, given)}
    names = [list(each) if isinstance(each, dict) else None for each in given]
    made = function(*given)
    for path, (each, version) in before.items():
        if each._version != version:
            raise function.complaint(f"changes its argument {path} in place: make a new tensor of it")
    for argument, each, keys in zip(SIGNATURES[name], given, names, strict=True):
        if keys is not None and list(each) != keys:
            raise function.complaint(f"changes its argument {argument} in place: return a new dict")
    if not _alike(function(*given), made, exact=True):
        told = "gives something else when it is called again with the same: what it remembers must be in what it"
        raise function.complaint(f"{told} returns, and it must not draw random numbers")
    if name in ("up", "merge", "correction", "local", "reduce", "reweigh") and not _is_finite(made):
        raise function.complaint("gives numbers that are not finite for such as are")
    if name != "reduce" and not _alike(function(*(_first(each) for each in given)), _first(made)):
        told = "gives a node something else when it is called with its row alone"
        raise function.complaint(f"{told}: rows are nodes, and those of others must not count")
    return made


def _tensors(name: str, given: Sequence[Any]) -> Iterator[tuple[str, Tensor]]:
    """All of the arguments, with what they are called."""
    for argument, each in zip(SIGNATURES[name], given, strict=True):
        if isinstance(each, Tensor):
            yield argument, each
        elif isinstance(each, Edge):
            parts = {"model": each.model, "correction": each.correction, "rate": each.rate}
            yield from ((f"{argument}.{key}", part) for key, part in parts.items() if part is not None)
        else:
            yield from ((f"{argument}[{key!r}]", rows) for key, rows in each.items())


def _first(value: Any) -> Any:
    """The first node's part of arguments or results."""
    if isinstance(value, Tensor):
        return value[:1]
    if isinstance(value, dict):
        return {key: rows[:1] for key, rows in value.items()}
    if isinstance(value, tuple):
        return tuple(map(_first, value))
    if isinstance(value, Edge):
        correction = None if value.correction is None else value.correction[:1]
        return Edge(value.model[:1], correction, value.rate[:1], None if value._merged is None else value.merged[:1])
    return value


def _leaves(value: Any) -> list[Tensor]:
    """The tensors of a result, in their order."""
    if isinstance(value, Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else ()
    return [each for part in parts for each in _leaves(part)]


def _alike(made: Any, expected: Any, exact: bool = False) -> bool:
    """Whether two results are the same, but for rounding."""
    mine, theirs = _leaves(made), _leaves(expected)
    return len(mine) == len(theirs) and all(_near(a, b, exact) for a, b in zip(mine, theirs, strict=True))


def _near(a: Tensor, b: Tensor, exact: bool) -> bool:
    """The sums of a GPU are in no fixed order, and so never exact."""
    if a.shape != b.shape or not b.is_floating_point() or not b.numel():
        return torch.equal(a, b)
    tolerance = 0.0 if exact and b.device.type == "cpu" else ROUNDING * torch.finfo(b.dtype).eps
    return bool(((a - b).abs().nan_to_num() <= tolerance * b.abs().nan_to_num().max().clamp(min=1)).all())


def _is_finite(value: Any) -> bool:
    return all(bool(each.isfinite().all()) for each in _leaves(value) if each.is_floating_point())
