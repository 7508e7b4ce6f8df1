"""What of an error may leave its site: words of ours, its class, and the line that raised it.

What the site's own code raises, a data set's reader, a model, a loss or a rule, may quote the
site's data; so may a library that it calls, and a complaint about a value. The texts of all these
stay in the site's log.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Sequence

from stratafl.base import files
from stratafl.base.errors import InvalidInput, MissingExtra, UserCodeError, error_message, first_line_of
from stratafl.base.tracebacks import PACKAGE, is_user_file, user_frames

DEPLOY = PACKAGE / "deploy"
"""The code whose complaints are about folders, messages and shapes, and never quote a sample."""
PASSING = tuple(os.path.realpath(str(module.__file__)) for module in (files, contextlib))
"""What complains of a file on behalf of its caller."""
IN_LOG = "its text is in this site's log"

_shared = False


def share_texts(shared: bool) -> None:
    """Have errors of this process told as they are from now on, or not."""
    global _shared
    _shared = shared


def outward(problem: BaseException) -> str:
    """An error as it is told outside its site, in one line."""
    text, cause = error_message(problem), problem.__cause__
    is_quoted = cause is not None and first_line_of(cause) in text
    if not _shared and (is_quoted or not _is_ours(problem)):
        return _origin(problem)
    if cause is None or is_quoted:
        return text
    return f"{text} ({error_message(cause) if _shared else _origin(cause)})"


def _is_ours(problem: BaseException) -> bool:
    """Whether every word of an error is ours: nothing but the deployment's own code was on the way
    to where it was raised. What a missing package is needed for, any of our code may say."""
    if not isinstance(problem, InvalidInput | MissingExtra) or isinstance(problem, UserCodeError):
        return False
    way = [os.path.realpath(frame.f_code.co_filename) for frame, _ in traceback.walk_tb(problem.__traceback__)]
    while way and way[-1] in PASSING:
        way.pop()
    folder = PACKAGE if isinstance(problem, MissingExtra) else DEPLOY
    return bool(way) and way[-1].startswith(f"{folder}{os.sep}") and not any(map(is_user_file, way))


def _origin(problem: BaseException) -> str:
    """All but the text of an error: its class, or that of what a complaint was made of, and the
    line that raised it, the last one of the site's own code or else of ours."""
    seen = set[int]()  # an error may be raised from itself
    while isinstance(problem, InvalidInput) and problem.__cause__ is not None and id(problem) not in seen:
        seen.add(id(problem))
        problem = problem.__cause__
    lines = [(frame.file, frame.line, frame.function) for frame in user_frames(problem)] or _our_lines(problem)
    # code that was made of a text is in no file, and may be called by whatever is in that text
    lines = [each for each in lines if os.path.isfile(each[0])]
    if not lines:
        return f"{_kind(problem)}; {IN_LOG}"
    file, number, function = lines[-1]
    where = "" if function == "<module>" else f"the function {function} of "
    return f"{_kind(problem)} in {where}{os.path.basename(file)}, line {number}; {IN_LOG}"


def _our_lines(problem: BaseException) -> Sequence[tuple[str, int, str]]:
    frames = traceback.extract_tb(problem.__traceback__)
    ours = [each for each in frames if os.path.realpath(each.filename).startswith(f"{PACKAGE}{os.sep}")]
    return [(each.filename, each.lineno or 0, each.name) for each in ours]


def _kind(problem: BaseException) -> str:
    """The name of an error's class, or of the nearest one above it that a module has under its
    name: that of a class which was made while the code ran may be made of anything."""
    known = (each for each in type(problem).__mro__ if _stands_in_its_module(each))
    return next(known).__name__


def _stands_in_its_module(kind: type) -> bool:
    return getattr(sys.modules.get(kind.__module__), kind.__name__, None) is kind
