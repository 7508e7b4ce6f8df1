"""Types of the options of an experiment: each has a check, and words for what it accepts."""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args, get_origin

from pydantic import BeforeValidator, ConfigDict, Field, Strict, TypeAdapter
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from stratafl.base.errors import InvalidInput
from stratafl.base.validation import plain

CONFIG = ConfigDict(extra="forbid", arbitrary_types_allowed=True, use_attribute_docstrings=True)
AnyClass = TypeVar("AnyClass", bound=type)
Table = Mapping[str, Any]


@dataclass(frozen=True)
class Accepts:
    """Words for the values that a field accepts: "must be ..." in an error, and in the
    reference."""

    text: str


def _lower(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


def whole(value: object) -> object:
    """A float without decimals as an integer; any other value as it is, without NumPy's and
    PyTorch's types."""
    value = plain(value)
    return int(value) if isinstance(value, float) and value.is_integer() else value


Unwrapped = BeforeValidator(plain)
"""Numbers and arrays of NumPy and PyTorch become Python's."""
Whole = BeforeValidator(whole)
"""Whole numbers may be floats, as results of a calculation are."""
LowerCase = BeforeValidator(_lower)

MAX_COUNT = 1 << 31
"""Largest number of rounds and samples."""

Count = Annotated[int, Field(strict=True, ge=1, le=MAX_COUNT), Whole, Accepts("a whole number of at least 1")]
CountOrZero = Annotated[int, Field(strict=True, ge=0, le=MAX_COUNT), Whole, Accepts("a whole number of at least 0")]
Integer = Annotated[int, Strict(), Whole, Accepts("a whole number")]
Positive = Annotated[
    float, Field(strict=True, gt=0, allow_inf_nan=False), Unwrapped, Accepts("a finite number above 0")
]
NotNegative = Annotated[
    float, Field(strict=True, ge=0, allow_inf_nan=False), Unwrapped, Accepts("a finite number of at least 0")
]
Flag = Annotated[bool, Strict(), Accepts("true or false")]
Text = Annotated[str, Strict(), Accepts("a text")]
FilePath = Annotated[str | Path, Accepts("the path of a file")]


def accepted(annotation: Any) -> str:
    """Words for the values that a type accepts."""
    if get_origin(annotation) is Annotated:
        inner, *metadata = get_args(annotation)
        words = [entry.text for entry in metadata if isinstance(entry, Accepts)]
        return words[-1] if words else accepted(inner)
    if get_origin(annotation) is Literal:
        *choices, last = [f'"{choice}"' for choice in get_args(annotation)]
        return f"{', '.join(choices)} or {last}" if choices else last
    if get_origin(annotation) in (typing.Union, types.UnionType):
        parts = [part for part in get_args(annotation) if part is not type(None)]
        return ", or ".join(dict.fromkeys(map(accepted, parts)))
    if get_origin(annotation) in (list, tuple, Sequence):
        return f"a list: each {accepted(get_args(annotation)[0])}"
    if get_origin(annotation) is Mapping:
        return "a table"
    return "any value" if annotation is Any else getattr(annotation, "__name__", str(annotation))


class Section:
    """A group of options that is checked when it is made, and never changes."""

    SHORTHAND: ClassVar[str] = ""
    """Field that a bare value stands for; empty: a table is needed."""
    INLINE: ClassVar[str] = ""
    """Field that takes the unknown keys of a table; empty: they are mistakes."""

    @classmethod
    def option(cls, name: str) -> Option:
        """One of the section's options."""
        return options(cls)[name]

    @classmethod
    def as_table(cls, value: object) -> object:
        """The fields of this section from what stands for it: a table, or a bare value."""
        if isinstance(value, cls):
            return value
        names = [field.name for field in fields(cls)]  # type: ignore[arg-type]
        if isinstance(value, Mapping) and not (cls.SHORTHAND and cls._is_shorthand(value)):
            if not cls.INLINE:
                return dict(value)
            known = {key: entry for key, entry in value.items() if key in names}
            rest = {key: entry for key, entry in value.items() if key not in names}
            if not rest:
                return known
            inline = known.get(cls.INLINE, {})
            return {**known, cls.INLINE: {**inline, **rest} if isinstance(inline, Mapping) else inline}
        return cls.from_bare(value) if cls.SHORTHAND else value

    @classmethod
    def from_bare(cls, value: object) -> dict[str, Any]:
        """The fields that a bare value stands for."""
        return {cls.SHORTHAND: value}

    @classmethod
    def _is_shorthand(cls, table: Table) -> bool:
        """Whether a table is a value of the shorthand's field, and not the section's fields."""
        return False

    def replace(self, **changes: Any) -> Any:
        """The section with other values of these options."""
        return type(self)(**{**{field.name: getattr(self, field.name) for field in fields(self)}, **changes})  # type: ignore[arg-type]

    def is_implied(self, name: str) -> bool:
        """Whether an option has the value that it gets where none is given."""
        return False

    def changed(self) -> dict[str, Any]:
        """The options that differ from their defaults."""
        return {
            name: getattr(self, name)
            for name, option in options(type(self)).items()
            if not same(getattr(self, name), option.default()) and not self.is_implied(name)
        }

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return all(same(getattr(self, field.name), getattr(other, field.name)) for field in fields(self))  # type: ignore[arg-type]

    def __hash__(self) -> int:
        return hash(type(self))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.changed().items())})"


def same(one: Any, other: Any) -> bool:
    """Whether two values of an option are equal: plain values and sections by value, others by
    identity."""
    if one is other:
        return True
    one, other = (str(value) if isinstance(value, Path) else value for value in (one, other))
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, bool | int | float | str | Section | None):
        return type(one) is type(other) and bool(one == other)
    return bool(
        type(one) is type(other) and getattr(type(one), "__module__", "").startswith("stratafl.") and one == other
    )


@dataclass(frozen=True)
class Option:
    """An option of an experiment: name, type, default and meaning."""

    key: str
    field: FieldInfo
    annotation: Any

    def default(self) -> Any:
        """The default value; `...` if there is none."""
        value = self.field.get_default(call_default_factory=True)
        return ... if value is PydanticUndefined else value

    @property
    def meaning(self) -> str:
        """The docstring of the option."""
        return self.field.description or ""

    @property
    def accepts(self) -> str:
        """Words for the values it accepts."""
        return accepted(self.annotation)

    @property
    def choices(self) -> tuple[str, ...]:
        """Accepted names, if the option accepts nothing but names."""
        kinds = [kind for kind in _alternatives(self.annotation) if kind is not type(None)]
        is_name = all(get_origin(kind) is Literal for kind in kinds)
        return tuple(choice for kind in kinds for choice in get_args(kind)) if is_name else ()

    @property
    def section(self) -> type[Section] | None:
        """The section that the option is, if it is one."""
        kind, *others = _alternatives(self.annotation)
        return kind if not others and isinstance(kind, type) and issubclass(kind, Section) else None


def _alternatives(annotation: Any) -> list[Any]:
    """Types of a union without their metadata."""
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) in (typing.Union, types.UnionType):
        return [kind for part in get_args(annotation) for kind in _alternatives(part)]
    return [annotation]


def options(cls: type[Section], prefix: str = "") -> dict[str, Option]:
    """Options of a section by name; `prefix` stands before their keys."""
    hints = _hints(cls)  # type: ignore[arg-type]  # mypy takes the hash of its objects
    infos: dict[str, FieldInfo] = cls.__pydantic_fields__  # type: ignore[attr-defined]
    return {name: Option(f"{prefix}{name}", info, hints[name]) for name, info in infos.items()}


@cache
def _hints(cls: type[Section]) -> dict[str, Any]:
    return typing.get_type_hints(cls, include_extras=True)


def subsection(cls: type[Section], bare: Any = None) -> Any:
    """Type of a field that is a section, given as one, as a table or as a bare value of type
    `bare`."""
    shown = cls if bare is None else cls | bare
    return Annotated[cls, BeforeValidator(cls.as_table, json_schema_input_type=shown)]


def checked(check: Callable[[Any], Any], text: str) -> Any:
    """Type of a field with many forms, which a function checks and converts."""
    return Annotated[Any, BeforeValidator(partial(_call, check)), Accepts(text)]


def _call(check: Callable[[Any], Any], value: Any) -> Any:
    try:
        return check(value)
    except InvalidInput:
        raise
    except (TypeError, ValueError) as problem:
        raise InvalidInput("", value, str(problem)) from None


def schema(cls: type[Section]) -> dict[str, Any]:
    """JSON schema of a section's table."""
    return TypeAdapter(cls).json_schema(mode="validation")
