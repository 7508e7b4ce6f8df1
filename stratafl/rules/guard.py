"""The functions of a user's own rule, called so that a mistake in one is a line that names it: what
it raised, or what it returned and what that must be.

`SIGNATURES` and `RETURNS` are the contract of `core.rule` as far as it can be told from one call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from stratafl.base.errors import InvalidInput, MissingExtra, UserCodeError, is_no_room, reason
from stratafl.base.signals import Interrupted
from stratafl.base.tracebacks import PACKAGE, Frame, code_of, definition, own_frames
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
            told = f"raised {reason(problem)}; it was given {', '.join(f'{name} {what(each)}' for name, each in named)}"
            raise self.complaint(told, own_frames(problem), UserCodeError.of_kind(problem)) from problem
        wrong = RETURNS[self.name](made, *given)
        if wrong:
            raise self.complaint(f"returned {wrong}")
        return made

    def complaint(
        self, told: str, frames: Sequence[Frame] = (), kind: type[UserCodeError] = UserCodeError
    ) -> UserCodeError:
        """What is wrong with it, with the lines to look at: its own first one unless given."""
        shown = frames or definition(self.function)
        return kind(self.rule, self.name, told, shown, f"{self.rule}: {self.name} {told}")


def guarded_rule(label: str, rule: Rule) -> Rule:
    """A rule whose functions complain of themselves where they are a user's own; the package's stay
    as they are."""
    defaults, functions = average(), {name: getattr(rule, name) for name in SIGNATURES}
    for name, function in functions.items():
        is_optional = getattr(defaults, name) is None
        if not callable(function) and not (is_optional and function is None):
            must = f"must be a function of ({', '.join(SIGNATURES[name])}){' or None' if is_optional else ''}"
            raise UserCodeError(label, name, must, told=f"{label}: {name} is {what(function)}, {must}")
    own = {name: each for name, each in functions.items() if each is not None and _is_own(each)}
    guarded: dict[str, Any] = {name: Called(label, name, each) for name, each in own.items()}
    return rule._replace(**guarded)


def _is_own(function: Callable) -> bool:
    code = code_of(function)
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
