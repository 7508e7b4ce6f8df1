"""Checks of rules that users write: a dry run, and errors that name the function."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stratafl.base.errors import InvalidInput, MissingExtra, UserCodeError, describe_exception, is_out_of_memory
from stratafl.base.signals import Interrupted
from stratafl.base.tracebacks import PACKAGE, UserFrame, code_object, definition_frame, user_frames
from stratafl.core.channel import BUFFERS, MODEL
from stratafl.core.dry_run import ImpureFunction, dry_run, result_tensors
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
class UserFunction:
    """A function of a user's rule, with checks of its result and errors that name it."""

    rule: str
    """Description of the rule, for errors."""
    name: str
    function: Callable[..., Any]

    def __call__(self, *arguments: Any) -> Any:
        try:
            result = self.function(*arguments)
        except (InvalidInput, MissingExtra, Interrupted):
            raise
        except (Exception, SystemExit) as problem:
            if is_out_of_memory(problem):
                raise
            named = zip(SIGNATURES[self.name], arguments, strict=True)
            described = ", ".join(f"{name} {describe_value(argument)}" for name, argument in named)
            text = f"raised {describe_exception(problem)}; it was given {described}"
            raise self.error(text, user_frames(problem), UserCodeError.of_kind(problem)) from problem
        fault = FAULTS[self.name](result, *arguments)
        if fault:
            raise self.error(f"returned {fault}")
        return result

    def error(
        self, text: str, frames: Sequence[UserFrame] = (), kind: type[UserCodeError] = UserCodeError
    ) -> UserCodeError:
        """An error about this function; without frames it shows the function's first line."""
        shown = frames or definition_frame(self.function)
        return kind(self.rule, self.name, text, shown, f"{self.rule}: {self.name} {text}")


def guarded_rule(label: str, rule: Rule) -> Rule:
    """The rule with every function from outside this package replaced by a `UserFunction`."""
    defaults = average()
    guarded: dict[str, Any] = {}
    for name, signature in SIGNATURES.items():
        function, is_optional = getattr(rule, name), getattr(defaults, name) is None
        if function is None and is_optional:
            continue
        if not callable(function):
            must = f"must be a function of ({', '.join(signature)}){' or None' if is_optional else ''}"
            raise UserCodeError(label, name, must, message=f"{label}: {name} is {describe_value(function)}, {must}")
        code = code_object(function)
        if code is None or not Path(code.co_filename).is_relative_to(PACKAGE):
            guarded[name] = UserFunction(label, name, function)
    return rule._replace(**guarded)


def describe_value(value: object) -> str:
    """A value's type and size, in a few words."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return f"a dict of {', '.join(f'{key!r}' for key in value)}" if value else "an empty dict"
    if isinstance(value, list | tuple):
        return f"a {type(value).__name__} of {len(value)}"
    article = "an" if type(value).__name__[:1] in "aeiouE" else "a"
    return "None" if value is None else f"{article} {type(value).__name__}"


# -- faults of results: what is wrong with the result of a function, or an empty text --------------


def _tensor_fault(name: str, value: object, like: Tensor, source: str) -> str:
    """Fault of a value that must be a tensor of the shape, type and device of another one."""
    must = f"must be a tensor of shape {tuple(like.shape)} like {source}"
    if not isinstance(value, Tensor) or value.shape != like.shape:
        return f"{describe_value(value)}{name}, {must}"
    if value.dtype != like.dtype or value.device != like.device:
        return f"{value.dtype} on {value.device}{name}, must be {like.dtype} on {like.device} like {source}"
    return ""


def _rows_fault(name: str, value: object, count: int | None, before: Rows | None = None) -> str:
    """Fault of a value that must be a dict of matrices with `count` rows; with `before`, of the
    same names and shapes."""
    rows = "a row per node" if count is None else f"{count} rows"
    if not isinstance(value, dict):
        return f"{describe_value(value)} as its {name}, must be a dict of tensors with {rows}"
    for key, matrix in value.items():
        if not isinstance(key, str):
            return f"a {name} with the key {key!r}, must be texts"
        if not isinstance(matrix, Tensor) or matrix.dim() != 2 or (count is not None and len(matrix) != count):
            return f"{describe_value(matrix)} as {name}[{key!r}], must be a tensor of two dimensions with {rows}"
    if before is not None and value.keys() != before.keys():
        return f"a {name} that is {describe_value(value)}, must have what it had: {describe_value(before)}"
    faults = (
        _tensor_fault(f" as {name}[{key!r}]", value[key], old, f"the {name} before")
        for key, old in (before or {}).items()
    )
    return next(filter(None, faults), "")


def _row_count(*tables: Rows) -> int | None:
    """Number of nodes in these tables; None if all are empty."""
    return next((len(matrix) for table in tables for matrix in table.values()), None)


def _pair_fault(value: object, names: str) -> str:
    if isinstance(value, tuple) and len(value) == 2:
        return ""
    return f"{describe_value(value)}, must be a tuple of two: ({names})"


def _reserved_fault(name: str, rows: Rows, *reserved: str) -> str:
    """Fault of rows with the name of something that is sent anyway."""
    used = [key for key in reserved if key in rows]
    return f"a {name} with {used[0]!r}, which is sent anyway: it must have another name" if used else ""


def _up_fault(result: Any, state: Rows, x: Tensor, edge: Edge) -> str:
    fault = _pair_fault(result, "state, message") or _rows_fault("state", result[0], len(x), state)
    fault = fault or _rows_fault("message", result[1], len(x)) or _reserved_fault("message", result[1], BUFFERS)
    if not fault and MODEL not in result[1]:
        message = describe_value(result[1])
        return f"a message that is {message}, must have at least 'model': what the parent takes the mean of"
    return fault or _tensor_fault(" as message['model']", result[1][MODEL], x, "x")


def _merge_fault(result: Any, memory: Rows, start: Tensor, mean: Rows, share: Tensor) -> str:
    fault = _pair_fault(result, "memory, model") or _rows_fault("memory", result[0], len(start), memory)
    return fault or _tensor_fault(" as the model", result[1], start, "mean['model']")


def _correction_fault(result: Any, state: Rows, note: Rows) -> str:
    count = _row_count(state, note)
    if result is None or (isinstance(result, Tensor) and result.dim() == 2 and count in (None, len(result))):
        return ""
    rows = "a row per node" if count is None else f"{count} rows"
    return f"{describe_value(result)}, must be None or a tensor with {rows} of one number per parameter"


def _state_fault(result: Any, state: Rows, *others: Any) -> str:
    return _rows_fault("state", result, _row_count(state), state)


def _reweigh_fault(result: Any, memory: Rows, moved: Rows, gain: Tensor) -> str:
    fault = _pair_fault(result, "memory, shift") or _rows_fault("memory", result[0], len(gain), memory)
    fault = fault or _rows_fault("shift", result[1], len(gain))
    if not fault and not result[1].keys() <= moved.keys():
        shift, names = describe_value(result[1]), describe_value(moved)
        return f"a shift that is {shift}, must have names of the state alone: {names}"
    return fault


FAULTS: Mapping[str, Callable[..., str]] = {
    "init": lambda result, x: _rows_fault("state", result, len(x)),
    "up": _up_fault,
    "open": lambda result, x: _rows_fault("memory", result, len(x)),
    "merge": _merge_fault,
    "note": lambda result, memory: (
        _rows_fault("note", result, _row_count(memory)) or _reserved_fault("note", result, MODEL, BUFFERS)
    ),
    "correction": _correction_fault,
    "local": lambda result, x, g, edge: _tensor_fault("", result, g, "g"),
    "down": _state_fault,
    "relay": _state_fault,
    "from_gradient": _state_fault,
    "reduce": lambda result, rows, weights: _tensor_fault("", result, rows[0], "one of its rows"),
    "reweigh": _reweigh_fault,
}

# -- dry run ---------------------------------------------------------------------------------------

NODES = 2


def try_rules(rules: Sequence[Rule], x_P: Tensor) -> None:
    """Dry run of the rules with user functions, at the model that the run starts from; `rules` are
    root first."""
    for level, rule in enumerate(rules, 1):
        if has_user_functions(rule):
            try_rule(rule, x_P, relays=level > 1)


def has_user_functions(rule: Rule) -> bool:
    """Whether a rule has functions that a user wrote."""
    return any(isinstance(function, UserFunction) for function in rule)


def try_rule(rule: Rule, x_P: Tensor, relays: bool = True) -> None:
    """Let two nodes synchronise twice with their parents, the second time with absent siblings.

    relays: whether newer models may come from above the parents.
    """
    start = torch.stack([x_P.nan_to_num(0.0, 0.0, 0.0) * (1 + k / 8) + k / 64 for k in range(NODES)])
    x, g = start * 0.75 + 0.125, start * 0.5 + 0.25
    state, memory = _call(rule, "init", start), _call(rule, "open", start)
    note = _call(rule, "note", memory)
    if rule.from_gradient is not None:
        state = _call(rule, "from_gradient", state, g, g.flip(0) * 0.5)
    for share in (1.0, 0.5):
        correction = _correction(rule, state, note, start)
        edge = Edge(start, correction, torch.full_like(start[:, :1], 0.25))
        if rule.local is not None:
            _call(rule, "local", x, g, edge)
        state, message = _call(rule, "up", state, x, edge)
        mean = {name: _reduce(rule, rows) for name, rows in message.items()}
        memory, merged = _call(rule, "merge", memory, start, mean, torch.full_like(start[:, :1], share))
        note = _call(rule, "note", memory)
        if rule.down is not None:
            state = _call(rule, "down", state, x, Edge(start, correction, edge.rate, merged))
        if rule.relay is not None and relays:
            _correction(rule, state, note, start)
            state = _call(rule, "relay", state)
    if rule.reweigh is not None:
        moved = {name: rows * 0.25 for name, rows in state.items()}
        memory, _ = _call(rule, "reweigh", memory, moved, torch.full_like(start[:, :1], 0.25))
    _correction(rule, state, note, start)


def _correction(rule: Rule, state: Rows, note: Rows, start: Tensor) -> Tensor | None:
    correction, function = _call(rule, "correction", state, note), rule.correction
    if isinstance(function, UserFunction) and correction is not None and correction.shape != start.shape:
        must = f"must be None or a tensor of shape {tuple(start.shape)} like x"
        raise function.error(f"returned {describe_value(correction)}, {must}")
    return correction


def _reduce(rule: Rule, rows: Tensor) -> Tensor:
    """Aggregates at two parents: the first has both children, the second only one of them."""
    if rule.reduce is None:
        return torch.stack([rows.mean(dim=0), rows[1]])
    families = rows, rows[1:]
    return torch.stack(
        [_call(rule, "reduce", family, torch.full_like(family[:, 0], 1 / len(family))) for family in families]
    )


def _call(rule: Rule, name: str, *arguments: Any) -> Any:
    """Call a function of a rule; raises if it is a user's and is not a pure function of rows."""
    function = getattr(rule, name)
    if not isinstance(function, UserFunction):
        return function(*arguments)
    try:
        result = dry_run(function, dict(zip(SIGNATURES[name], arguments, strict=True)), by_row=name != "reduce")
    except ImpureFunction as problem:
        raise function.error(str(problem)) from None
    is_finite = all(bool(tensor.isfinite().all()) for tensor in result_tensors(result) if tensor.is_floating_point())
    if name in ("up", "merge", "correction", "local", "reduce", "reweigh") and not is_finite:
        raise function.error("returns numbers that are not finite for finite arguments")
    return result
