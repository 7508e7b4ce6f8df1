"""Mistakes in an experiment: the errors of pydantic as errors of one line."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, cast, dataclass_transform

from pydantic import ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass as checked_dataclass

from stratafl.base.errors import InvalidInput, unknown_name
from stratafl.experiment.fields import CONFIG, AnyClass, Option, Section, options
from stratafl.experiment.legacy import TABLES, new_place

SECTION_NAMES = {"Tree": "tree", "Data": "data", "Model": "model", "Method": "method", "Schedule": "schedule",
                 "Client": "client", "Aggregation": "aggregation", "Evaluation": "evaluation",
                 "Execution": "execution", "Storage": "storage", "Experiment": "",
                 "Cosine": "client.lr_schedule", "StepDecay": "client.lr_schedule"}  # fmt: skip
"""Key of each section in an experiment."""


_PASSES = 'schedule.unit = "epochs", and the last of schedule.periods'
OTHER_NAMES = {
    **dict.fromkeys(("lr", "learning_rate", "client.learning_rate"), "client.lr"),
    **dict.fromkeys(("batch_size", "client.batch"), "client.batch_size"),
    **dict.fromkeys(("optimizer", "optim"), "client.optimizer"),
    **dict.fromkeys(("momentum", "client.momentum"), 'client.optimizer = { name = "sgd", momentum = 0.9 }'),
    **dict.fromkeys(("client.grad_clip", "client.gradient_clip", "client.max_grad_norm"), "client.clip_norm"),
    **dict.fromkeys(("epochs", "local_epochs", "client.epochs", "client.local_epochs"), _PASSES),
    **dict.fromkeys(("local_steps", "client.steps", "client.local_steps"), "the last of schedule.periods"),
    **dict.fromkeys(("num_rounds", "global_rounds", "schedule.rounds"), "rounds"),
    **dict.fromkeys(("clients", "num_clients"), "tree.shape"),
    **dict.fromkeys(("algorithm", "strategy"), "method"),
    **dict.fromkeys(("criterion", "client.loss"), "loss"),
    **dict.fromkeys(("dataset", "data.dataset"), "data.source"),
}
"""Names of options in other programs, and what they are here."""


class InvalidExperiment(InvalidInput):
    """The first of several mistakes in an experiment; `mistakes` has all of them."""

    mistakes: tuple[InvalidInput, ...] = ()


def raise_first(mistakes: Sequence[InvalidInput]) -> NoReturn:
    """Raise the first of these mistakes, which has the others, too."""
    first = mistakes[0]
    if len(mistakes) == 1:
        raise first from None
    error = InvalidExperiment(first.field, first.value, first.allowed)
    error.mistakes = tuple(mistakes)
    raise error from None


def mistakes(problem: ValidationError, cls: type) -> list[InvalidInput]:
    """All mistakes that pydantic found, one per option."""
    found: dict[str, InvalidInput] = {}
    for error in problem.errors(include_url=False):
        for mistake in _old_keys(error) or [_mistake(error, cls)]:
            is_key = mistake.field.endswith(" key")
            found.setdefault(f"{mistake.field} {mistake.value}" if is_key else mistake.field, mistake)
    return list(found.values())


def _old_keys(error: Any) -> list[InvalidInput]:
    """One mistake per key of a table that this version does not have, if the keys have new
    places."""
    table, entries = str(error["loc"][-1]) if error["loc"] else "", error["input"]
    if error["type"] != "unexpected_keyword_argument" or table not in TABLES or not isinstance(entries, Mapping):
        return []
    places = {f"{table}.{key}": (value, new_place(f"{table}.{key}")) for key, value in entries.items()}
    return [InvalidInput(key, value, place) for key, (value, place) in places.items() if place is not None]


def _mistake(error: Any, cls: type) -> InvalidInput:
    path, option, within, rest = _locate(error["loc"], cls)
    value, kind = error["input"], error["type"]
    raised = error.get("ctx", {}).get("error")
    if isinstance(raised, InvalidInput):
        if raised.field.startswith(path) and path:
            return raised
        inner = f".{raised.field}" if raised.field else ""
        return InvalidInput(f"{path}{inner}", raised.value, raised.allowed) if path else raised
    if kind == "unexpected_keyword_argument":
        name = str(rest[-1])
        key = f"{path}.{name}" if path else name
        moved = new_place(key)
        if moved is not None:
            return InvalidInput(key, value, moved)
        if key in OTHER_NAMES:
            return InvalidInput(key, value, f"unknown; here it is {OTHER_NAMES[key]}")
        return unknown_name(f"{path or 'experiment'} key", name, options(within))
    if kind in ("missing", "missing_argument"):
        return InvalidInput(f"{path}.{rest[-1]}" if rest else path, None, "must be given")
    if option is None or option.section is not None:
        return InvalidInput(path or "experiment", value, "must be a table")
    if kind == "less_than_equal":
        return InvalidInput(path, value, f"must be at most {error['ctx']['le']:,}")
    if option.choices and isinstance(value, str):
        return unknown_name(path, value, option.choices)
    return InvalidInput(path, value, f"must be {option.accepts}")


def _locate(loc: Sequence[Any], cls: type) -> tuple[str, Option | None, type[Section], list[Any]]:
    """Locate a mistake: the dotted key, its option, the innermost section, and the rest of the
    location."""
    path, option, within = SECTION_NAMES.get(cls.__name__, cls.__name__.lower()), None, cls
    rest = list(loc)
    while rest:
        known = options(within)
        name = list(known)[rest[0]] if isinstance(rest[0], int) else rest[0]
        if name not in known:
            break
        rest.pop(0)
        option = known[name]
        path = f"{path}.{name}" if path else name
        if option.section is None:
            break
        within = option.section
    return path, option, within, rest


@dataclass_transform(frozen_default=True, field_specifiers=(Field,))
def section(cls: AnyClass) -> AnyClass:
    """Class decorator: an immutable, checked section whose mistakes are errors of one line."""
    inline = ConfigDict(json_schema_extra={"additionalProperties": True}) if getattr(cls, "INLINE", "") else {}
    made: Any = checked_dataclass(frozen=True, eq=False, repr=False, config=CONFIG | inline)(cls)
    validate: Callable[..., None] = made.__init__

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            validate(self, *args, **kwargs)
        except ValidationError as problem:
            raise_first(mistakes(problem, made))

    __init__.__signature__ = validate.__signature__ if hasattr(validate, "__signature__") else None  # type: ignore[attr-defined]
    made.__init__ = __init__
    return cast("AnyClass", made)
