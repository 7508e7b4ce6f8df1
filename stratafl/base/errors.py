"""Errors about user input: each names the field, its value and the accepted values.

A message is one short line for a terminal: long values are cut, and characters that cannot be
printed are escaped.
"""

from __future__ import annotations

import difflib
import functools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stratafl.base.tracebacks import UserFrame, user_frames

LONGEST, LONGEST_PATH = 80, 200
"""Most characters that a message repeats of a value, and of a path."""

LONGEST_FIELD, LONGEST_WORDS, LONGEST_ALLOWED, LONGEST_TOLD = 100, 200, 300, 600
"""Most characters of parts of a message that may contain a user's text.

In this order: the key of a table, the text of an exception, an explanation, and a message about a
user's own code.
"""

MOST_DIGITS = 4000
"""Most digits of an integer that is shown in full; Python does not convert more than 4,300."""


BRACKETS: dict[type, str] = {list: "[]", tuple: "()", dict: "{}"}


TIME_IS_OVER = 75
"""Exit code of a command that did not finish in its time, and that the same command continues."""


class InvalidInput(ValueError):
    """A value from the user that cannot be used; the message is one line for the user."""

    exit_code = 2

    def __init__(self, field: str, value: object, allowed: str):
        self.field, self.value, self.allowed = field, value, allowed
        super().__init__(
            f"{one_line(field, LONGEST_FIELD)} = {format_value(value)}: {one_line(allowed, LONGEST_ALLOWED)}"
        )


@contextmanager
def as_arguments() -> Iterator[None]:
    """Name the arguments of a function in errors that name the options of its command."""
    try:
        yield
    except InvalidInput as problem:
        if not problem.field.startswith("--"):
            raise
        name = problem.field.removeprefix("--").replace("-", "_")
        raise type(problem)(name, problem.value, problem.allowed) from None


class UserCodeError(InvalidInput):
    """An error raised by the user's own code; the message names the function.

    The original exception, if there was one, is its cause.
    """

    exit_code = 4

    def __init__(
        self, field: str, value: object, allowed: str, frames: Sequence[UserFrame] = (), message: str | None = None
    ):
        """frames: the user's own; message: built from field and value unless given."""
        super().__init__(field, value, allowed)
        self.frames = tuple(frames)
        if message is not None:
            self.args = (one_line(message, LONGEST_TOLD),)

    def __str__(self) -> str:
        return str(self.args[0])

    @staticmethod
    def of_kind(problem: BaseException) -> type[UserCodeError]:
        """Class to raise for an exception: `UserCodeError` and the exception's own class in one.

        If such a class cannot be built, it is `UserCodeError`. A caller that catches the
        exception's own class still does.
        """
        kind: Any = type(problem)
        return _with_class(kind)


@functools.cache
def _with_class(kind: Any) -> type[UserCodeError]:
    ends = SystemExit, StopIteration, StopAsyncIteration  # which Python itself would hear
    if issubclass(UserCodeError, kind) or issubclass(kind, ends):
        return UserCodeError
    try:
        combined = type(UserCodeError.__name__, (UserCodeError, kind), {"__module__": UserCodeError.__module__})
        combined("field", "value", "allowed")
    except Exception:  # classes that cannot be combined, or one with a constructor of its own
        return UserCodeError
    return combined


class MissingExtra(ImportError):
    """A feature needs a package that is not installed."""

    def __init__(self, feature: str, package: str, extra: str | None = None):
        """`extra` is None for a package that every installation has."""
        package_name = package if extra is None else f"'stratafl[{extra}]'"
        super().__init__(f"{feature} needs the package {package}: pip install {package_name}")


def unknown_name(field: str, name: object, names: Iterable[str]) -> InvalidInput:
    """Build the error about an unknown name, with the nearest known one."""
    choices = sorted(names)
    text = name[:LONGEST].lower() if isinstance(name, str) else format_value(name)
    begun = [choice for choice in choices if text and choice.lower().startswith(text)]
    near = begun or difflib.get_close_matches(text, choices, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    known = f"known: {', '.join(choices)}" if choices else "there are none"
    return InvalidInput(field, name, f"unknown; {hint}{known}")


def format_value(value: object) -> str:
    """Format a value as one short printable line, however large or deeply nested it is."""
    if isinstance(value, Path):
        text = one_line(repr(str(value)))
        # it is its end that says which file
        return text if len(text) <= LONGEST_PATH else f"...{text[3 - LONGEST_PATH :]}"
    text = ""
    for piece in _pieces(value):
        text += one_line(piece)
        if len(text) > LONGEST:
            return f"{text[: LONGEST - 3]}..."
    return text


def escape_control(text: object) -> str:
    """Escape characters of a line that would control a terminal or cannot be encoded."""
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode("ascii")
        for character in str(text)
    )


def one_line(text: str, longest: int | None = None) -> str:
    """Format a text as one printable line, cut to `longest` characters."""
    if longest is not None and len(text) > longest:
        text = f"{text[: longest - 3]}..."
    if text.isprintable():
        return text
    plain = escape_control(" ".join(text.split()))
    return plain if longest is None else one_line(plain, longest)


def first_line_of(problem: BaseException) -> str:
    """Message of an exception in one line."""
    try:
        text = str(problem)
    except Exception:
        return ""
    return one_line(text.strip().partition("\n")[0], LONGEST_WORDS)


def describe_exception(problem: BaseException) -> str:
    """Type and message of an exception in one line."""
    kind, said = type(problem).__name__, first_line_of(problem)
    return f"{kind}: {said}" if said else kind


def error_message(problem: BaseException) -> str:
    """Describe an exception in one line; an `InvalidInput` is shown without its type."""
    return str(problem) if isinstance(problem, InvalidInput) else describe_exception(problem)


OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "CUDA error: out of memory", "ALLOC_FAILED")
"""Texts of out-of-memory errors of libraries without an exception type of their own.

The first two concern host memory.
"""


def is_out_of_memory(problem: BaseException) -> bool:
    """Whether an exception reports that memory ran out, on the host or a GPU.

    It is recognised by name, because torch is not imported for it.
    """
    if isinstance(problem, MemoryError) or type(problem).__name__ == "OutOfMemoryError":
        return True
    return isinstance(problem, RuntimeError) and any(words in str(problem) for words in OUT_OF_MEMORY)


def reraise_out_of_memory(problem: BaseException) -> None:
    """Raise an out-of-memory error again.

    Code that catches every exception to try something else calls this first, because running out of
    memory does not mean that the first way is impossible.
    """
    if is_out_of_memory(problem):
        raise problem


@contextmanager
def convert_errors(field: str, value: object, failing: str = "failed") -> Iterator[None]:
    """Turn exceptions of user code into `InvalidInput`, including those that end the process."""
    try:
        yield
    except (InvalidInput, MissingExtra):
        raise
    except (Exception, SystemExit) as problem:
        raise invalid_input(field, value, f"{failing}: {describe_exception(problem)}", problem) from problem


def invalid_input(field: str, value: object, allowed: str, problem: BaseException) -> InvalidInput:
    """Build the error for an exception: a `UserCodeError` if user code was on its traceback."""
    frames = user_frames(problem)
    return UserCodeError(field, value, allowed, frames) if frames else InvalidInput(field, value, allowed)


def _pieces(value: object) -> Iterator[str]:
    """Pieces of a value's notation, generated only as far as they are shown."""
    if isinstance(value, str | bytes):
        yield repr(value[: LONGEST + 1])
    elif isinstance(value, int) and value.bit_length() > MOST_DIGITS * math.log2(10):
        yield f"a whole number of about {round(value.bit_length() * math.log10(2)):,} digits"
    elif type(value) in BRACKETS and isinstance(value, Collection):
        brackets = BRACKETS[type(value)]
        yield brackets[0]
        for number, item in enumerate(value):
            if number:
                yield ", "
            yield from _pieces(item)
            if isinstance(value, Mapping):
                yield ": "
                yield from _pieces(value[item])
        if isinstance(value, tuple) and len(value) == 1:
            yield ","
        yield brackets[1]
    else:
        try:
            yield repr(value)
        except Exception:
            yield f"<{type(value).__name__}>"


def join_names(names: Sequence[str]) -> str:
    """Join names in one line: the first five, and the number of the others."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5:,} more" if len(names) > 5 else "")
