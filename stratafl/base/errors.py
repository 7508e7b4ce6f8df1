"""One kind of complaint about input: it names the field, what was given, and what is allowed.

Whatever was given, the complaint is one short line that a terminal can show: values are cut, and
what cannot be printed is escaped.
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
"""Characters of a value that a complaint repeats, and of a path."""

LONGEST_FIELD, LONGEST_WORDS, LONGEST_ALLOWED, LONGEST_TOLD = 100, 200, 300, 600
"""All may hold a user's text: a key of a table, the words of an exception, what is said with them,
and all that is said of a user's own code."""

MOST_DIGITS = 4000
"""The most digits of a whole number that is shown as it is: Python refuses to write out more than
4,300."""


BRACKETS: dict[type, str] = {list: "[]", tuple: "()", dict: "{}"}


class InvalidInput(ValueError):
    """A value the user gave that cannot be used; the message is one line meant for them."""

    exit_code = 2

    def __init__(self, field: str, value: object, allowed: str):
        self.field, self.value, self.allowed = field, value, allowed
        super().__init__(
            f"{one_line(field, LONGEST_FIELD)} = {format_value(value)}: {one_line(allowed, LONGEST_ALLOWED)}"
        )


class UserCodeError(InvalidInput):
    """A mistake in a user's own code: the message is one line that says which function did what;
    what was raised there, if anything was, is the cause."""

    exit_code = 4

    def __init__(
        self, field: str, value: object, allowed: str, frames: Sequence[UserFrame] = (), told: str | None = None
    ):
        """frames: the user's own lines; told: the message, where it is not put together from the
        field and the value."""
        super().__init__(field, value, allowed)
        self.frames = tuple(frames)
        if told is not None:
            self.args = (one_line(told, LONGEST_TOLD),)

    def __str__(self) -> str:
        return str(self.args[0])

    @staticmethod
    def of_kind(problem: BaseException) -> type[UserCodeError]:
        """The class to raise instead of a problem: one that is also of its kind where there can be
        such a class, so that whoever catches the kind goes on to."""
        kind: Any = type(problem)
        made: type[UserCodeError] = _of_kind(kind)
        return made


@functools.cache
def _of_kind(kind: type[BaseException]) -> type[UserCodeError]:
    ends = SystemExit, StopIteration, StopAsyncIteration  # which Python itself would hear
    if issubclass(UserCodeError, kind) or issubclass(kind, ends):
        return UserCodeError
    try:
        made = type(UserCodeError.__name__, (UserCodeError, kind), {"__module__": UserCodeError.__module__})
        made("field", "value", "allowed")
    except Exception:  # two kinds that do not go together, or one that is made in a way of its own
        return UserCodeError
    return made


class MissingExtra(ImportError):
    """A feature needs a package that is not installed."""

    def __init__(self, feature: str, package: str, extra: str | None = None):
        """One that comes with every installation belongs to no extra."""
        wanted = package if extra is None else f"'stratafl[{extra}]'"
        super().__init__(f"{feature} needs the package {package}: pip install {wanted}")


def unknown_name(field: str, name: object, known: Iterable[str]) -> InvalidInput:
    """The complaint about a name nobody knows, with the nearest one that exists."""
    choices = sorted(known)
    text = name[:LONGEST] if isinstance(name, str) else format_value(name)
    begun = [choice for choice in choices if text and choice.startswith(text)]
    near = begun or difflib.get_close_matches(text, choices, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return InvalidInput(field, name, f"unknown; {hint}known: {', '.join(choices) or 'none at all'}")


def format_value(value: object) -> str:
    """A value as one short printable line, however large it is or deeply nested."""
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
    """A text as one line that a terminal only shows: what would steer it, or cannot be encoded, is
    spelt out."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode("ascii") for each in str(text))


def one_line(text: str, longest: int | None = None) -> str:
    """A text as one printable line, cut where it is longer than that."""
    if longest is not None and len(text) > longest:
        text = f"{text[: longest - 3]}..."
    if text.isprintable():
        return text
    plain = escape_control(" ".join(text.split()))
    return plain if longest is None else one_line(plain, longest)


def first_line_of(problem: BaseException) -> str:
    """What an exception says, in one line."""
    try:
        text = str(problem)
    except Exception:
        return ""
    return one_line(text.strip().partition("\n")[0], LONGEST_WORDS)


def describe_exception(problem: BaseException) -> str:
    """An exception in one line: its kind, and what it says."""
    kind, said = type(problem).__name__, first_line_of(problem)
    return f"{kind}: {said}" if said else kind


def error_message(problem: BaseException) -> str:
    """An exception in one line, for whoever gave what caused it: a complaint needs no kind."""
    return str(problem) if isinstance(problem, InvalidInput) else describe_exception(problem)


OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "CUDA error: out of memory", "ALLOC_FAILED")
"""How libraries say so where it is not their exception's type; the first two are of the host's
memory."""


def is_no_room(problem: BaseException) -> bool:
    """Whether the memory did not suffice, which is nobody's mistake and says nothing about what
    was tried. By name, since torch is not imported for its sake."""
    if isinstance(problem, MemoryError) or type(problem).__name__ == "OutOfMemoryError":
        return True
    return isinstance(problem, RuntimeError) and any(words in str(problem) for words in OUT_OF_MEMORY)


def pass_on_no_room(problem: BaseException) -> None:
    """Raise this again where the memory did not suffice: whoever catches whatever may go wrong, to
    do without, must not take that for an answer."""
    if is_no_room(problem):
        raise problem


@contextmanager
def convert_errors(field: str, value: object, failing: str = "failed") -> Iterator[None]:
    """Call a user's own code: what it raises becomes a complaint, also where it would end the
    process."""
    try:
        yield
    except (InvalidInput, MissingExtra):
        raise
    except (Exception, SystemExit) as problem:
        raise invalid_input(field, value, f"{failing}: {describe_exception(problem)}", problem) from problem


def invalid_input(field: str, value: object, allowed: str, problem: BaseException) -> InvalidInput:
    """The complaint about what was raised: of the user's own code if that was on the way."""
    frames = user_frames(problem)
    return UserCodeError(field, value, allowed, frames) if frames else InvalidInput(field, value, allowed)


def _pieces(value: object) -> Iterator[str]:
    """A value's notation bit by bit, so that nobody writes out more of it than is shown."""
    if isinstance(value, str | bytes):
        yield repr(value[: LONGEST + 1])
    elif isinstance(value, int) and value.bit_length() > MOST_DIGITS * math.log2(10):
        yield f"a whole number of about {round(value.bit_length() * math.log10(2)):,} digits"
    elif type(value) in BRACKETS and isinstance(value, Collection):
        brackets = BRACKETS[type(value)]
        yield brackets[0]
        for number, each in enumerate(value):
            if number:
                yield ", "
            yield from _pieces(each)
            if isinstance(value, Mapping):
                yield ": "
                yield from _pieces(value[each])
        if isinstance(value, tuple) and len(value) == 1:
            yield ","
        yield brackets[1]
    else:
        try:
            yield repr(value)
        except Exception:
            yield f"<{type(value).__name__}>"


def join_names(names: Sequence[str], most: int = 5) -> str:
    """A list of names in a line: the first of them, and how many there are more."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
