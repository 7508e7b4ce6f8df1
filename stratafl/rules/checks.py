"""Checks of user rules: a dry run, and errors that name the function."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stratafl.base.errors import InvalidInput, MissingExtra, UserCodeError, describe_exception, is_no_room
from stratafl.base.signals import Interrupted
from stratafl.base.tracebacks import PACKAGE, UserFrame, code_object, definition_frame, user_frames
from stratafl.core.channel import BUFFERS, MODEL
from stratafl.core.rule import Edge, Rows, Rule, average

SIGNATURES: Mapping[str, tuple[str, ...]] = {
    "init": ("x",),
    "up": ("state", "x", "edge"),
    "open": ("x",),
    "merge": ("memory", "start", "mean", "share"),
    "note": ("memory",),
    "correction": ("state", "note"),
    "local": ("x", "g", "edge"),
    "down": ("state", "x", "edge"),
    "relay": ("state",),
    "from_gradient": ("state", "g", "mean_g"),
    "reduce": ("rows", "weights"),
    "reweigh": ("memory", "moved", "gain"),
}


@dataclass(frozen=True)
class Called:
    """A function of a user's rule, which complains of itself."""

    rule: str
    """The rule in words."""
    name: str
    function: Callable[..., Any]

    def __call__(self, *given: Any) -> Any:
        try:
            made = self.function(*given)
        except (InvalidInput, MissingExtra, Interrupted):
            raise
        except (Exception, SystemExit) as problem:
            if is_no_room(problem):
                raise
            named = zip(SIGNATURES[self.name], given, strict=True)
            arguments = ", ".join(f"{name} {what(each)}" for name, each in named)
            told = f"raised {describe_exception(problem)}; it was given {arguments}"
            raise self.complaint(told, user_frames(problem), UserCodeError.of_kind(problem)) from problem
        wrong = RETURNS[self.name](made, *given)
        if wrong:
            raise self.complaint(f"returned {wrong}")
        return made

    def complaint(
        self, told: str, frames: Sequence[UserFrame] = (), kind: type[UserCodeError] = UserCodeError
    ) -> UserCodeError:
        """What is wrong with it, with the lines to look at: its own first one unless given."""
        shown = frames or definition_frame(self.function)
        return kind(self.rule, self.name, told, shown, f"{self.rule}: {self.name} {told}")


def guarded_rule(label: str, rule: Rule) -> Rule:
    """A rule whose functions complain of themselves where they are a user's own; the package's stay
    as they are."""
    defaults, functions = average(), {name: getattr(rule, name) for name in SIGNATURES}
    for name, function in functions.items():
        is_optional = getattr(defaults, name) is None
        if not callable(function) and not (is_optional and function is None):
            must = f"must be a function of ({', '.join(SIGNATURES[name])}){' or None' if is_optional else ''}"
            raise UserCodeError(label, name, must, message=f"{label}: {name} is {what(function)}, {must}")
    own = {name: each for name, each in functions.items() if each is not None and _is_own(each)}
    guarded: dict[str, Any] = {name: Called(label, name, each) for name, each in own.items()}
    return rule._replace(**guarded)


def _is_own(function: Callable) -> bool:
    code = code_object(function)
    return code is None or not Path(code.co_filename).is_relative_to(PACKAGE)


def what(value: object) -> str:
    """A value by its kind and size, in a few words."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return f"a dict of {', '.join(f'{key!r}' for key in value)}" if value else "an empty dict"
    if isinstance(value, list | tuple):
        return f"a {type(value).__name__} of {len(value)}"
    if isinstance(value, Edge):
        return "an Edge"
    article = "an" if type(value).__name__[:1] in "aeiou" else "a"
    return "None" if value is None else f"{article} {type(value).__name__}"


# -- what each function must return: what is wrong, or nothing -------------------------------------


def _wrong_tensor(name: str, made: object, like: Tensor, source: str) -> str:
    """Whether it is a tensor as another one is."""
    must = f"must be a tensor of shape {tuple(like.shape)} like {source}"
    if not isinstance(made, Tensor) or made.shape != like.shape:
        return f"{what(made)}{name}, {must}"
    if made.dtype != like.dtype or made.device != like.device:
        return f"{made.dtype} on {made.device}{name}, must be {like.dtype} on {like.device} like {source}"
    return ""


def _wrong_rows(name: str, made: object, count: int | None, before: Rows | None = None) -> str:
    """Whether it is a table of matrices with a row per node, of the same names and shapes as it had
    before."""
    rows = "a row per node" if count is None else f"{count} rows"
    if not isinstance(made, dict):
        return f"{what(made)} as its {name}, must be a dict of tensors with {rows}"
    for key, each in made.items():
        if not isinstance(key, str):
            return f"a {name} with the key {key!r}, must be texts"
        if not isinstance(each, Tensor) or each.dim() != 2 or (count is not None and len(each) != count):
            return f"{what(each)} as {name}[{key!r}], must be a tensor of two dimensions with {rows}"
    if before is not None and made.keys() != before.keys():
        return f"a {name} that is {what(made)}, must have what it had: {what(before)}"
    for key, old in (before or {}).items():
        wrong = _wrong_tensor(f" as {name}[{key!r}]", made[key], old, f"the {name} before")
        if wrong:
            return wrong
    return ""


def _rows_in(*tables: Rows) -> int | None:
    """How many nodes these are of, as far as it can be told."""
    return next((len(each) for table in tables for each in table.values()), None)


def _pair(made: object, names: str) -> str:
    if isinstance(made, tuple) and len(made) == 2:
        return ""
    return f"{what(made)}, must be a tuple of two: ({names})"


def _first(name: str) -> Callable[..., str]:
    return lambda made, x: _wrong_rows(name, made, len(x))


def _up(made: Any, state: Rows, x: Tensor, edge: Edge) -> str:
    wrong = _pair(made, "state, message") or _wrong_rows("state", made[0], len(x), state)
    wrong = wrong or _wrong_rows("message", made[1], len(x)) or _taken("message", made[1], BUFFERS)
    if not wrong and MODEL not in made[1]:
        return f"a message that is {what(made[1])}, must have at least 'model': what the parent takes the mean of"
    return wrong or _wrong_tensor(" as message['model']", made[1][MODEL], x, "x")


def _merge(made: Any, memory: Rows, start: Tensor, mean: Rows, share: Tensor) -> str:
    wrong = _pair(made, "memory, model") or _wrong_rows("memory", made[0], len(start), memory)
    return wrong or _wrong_tensor(" as the model", made[1], start, "mean['model']")


def _note(made: Any, memory: Rows) -> str:
    return _wrong_rows("note", made, _rows_in(memory)) or _taken("note", made, MODEL, BUFFERS)


def _taken(name: str, made: Rows, *others: str) -> str:
    """Whether a name is used that says something else already."""
    used = [key for key in others if key in made]
    return f"a {name} with {used[0]!r}, which is sent anyway: it must have another name" if used else ""


def _correction(made: Any, state: Rows, note: Rows) -> str:
    count = _rows_in(state, note)
    if made is None or (isinstance(made, Tensor) and made.dim() == 2 and count in (None, len(made))):
        return ""
    rows = "a row per node" if count is None else f"{count} rows"
    return f"{what(made)}, must be None or a tensor with {rows} of one number per parameter"


def _state(made: Any, state: Rows, *others: Any) -> str:
    return _wrong_rows("state", made, _rows_in(state), state)


def _local(made: Any, x: Tensor, g: Tensor, edge: Edge) -> str:
    return _wrong_tensor("", made, g, "g")


def _reweigh(made: Any, memory: Rows, moved: Rows, gain: Tensor) -> str:
    wrong = _pair(made, "memory, shift") or _wrong_rows("memory", made[0], len(gain), memory)
    wrong = wrong or _wrong_rows("shift", made[1], len(gain))
    if not wrong and not made[1].keys() <= moved.keys():
        return f"a shift that is {what(made[1])}, must have names of the state alone: {what(moved)}"
    return wrong


def _reduce(made: Any, rows: Tensor, weights: Tensor) -> str:
    return _wrong_tensor("", made, rows[0], "one of its rows")


RETURNS: Mapping[str, Callable[..., str]] = {
    "init": _first("state"),
    "up": _up,
    "open": _first("memory"),
    "merge": _merge,
    "note": _note,
    "correction": _correction,
    "local": _local,
    "down": _state,
    "relay": _state,
    "from_gradient": _state,
    "reduce": _reduce,
    "reweigh": _reweigh,
}


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
    if name != "reduce" and not _alike(function(*(_first_example(each) for each in given)), _first_example(made)):
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


def _first_example(value: Any) -> Any:
    """The first node's part of arguments or results."""
    if isinstance(value, Tensor):
        return value[:1]
    if isinstance(value, dict):
        return {key: rows[:1] for key, rows in value.items()}
    if isinstance(value, tuple):
        return tuple(map(_first_example, value))
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
