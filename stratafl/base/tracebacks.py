"""User frames of a traceback: those outside this package, Python itself and libraries."""

from __future__ import annotations

import functools
import linecache
import os
import site
import sys
import sysconfig
import traceback
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from types import CodeType
from typing import NamedTuple

MOST = 8
"""Maximum number of frames that are shown; of more, as in an endless recursion, the outermost and
the innermost ones."""
PACKAGE = Path(__file__).resolve().parents[1]
PLUGINS: list[str] = []
"""Folders of packages that add commands to this one."""
INSTALLED = ("site-packages", "dist-packages")
"""Names of folders into which libraries are installed."""
TYPED = ("<stdin>", "<string>", "<ipython")
"""Beginnings of the file names of code that was typed in, and so is in no file."""
COMPILED = (".pyx", ".pxd", ".pxi")
"""Endings of the file names of libraries' compiled code, whose folders do not exist here."""


class UserFrame(NamedTuple):
    """Line of the user's own code."""

    file: str
    line: int
    function: str
    source: str
    """Source text; empty if it cannot be read."""

    def shown(self) -> str:
        """Format the frame as one line, or as two with its source text."""
        place = f"{self.file}, line {self.line}, in {self.function}"
        return f"  {place}\n    {self.source}" if self.source else f"  {place}"


def user_frames(problem: BaseException, also: Collection[str] = ()) -> tuple[UserFrame, ...]:
    """User frames of an exception, outermost first; if it has none, those of its cause or
    context.

    Files in `also` count as the user's.
    """
    seen: set[int] = set()
    raised: BaseException | None = problem
    while raised is not None and id(raised) not in seen:
        seen.add(id(raised))
        frames = [
            UserFrame(frame.filename, frame.lineno or 0, frame.name, (frame.line or "").strip())
            for frame in traceback.extract_tb(raised.__traceback__)
            if is_user_file(frame.filename, frame.name) or frame.filename in also
        ]
        if isinstance(raised, SyntaxError) and raised.filename and is_user_file(raised.filename):
            frames.append(UserFrame(raised.filename, raised.lineno or 0, "<module>", (raised.text or "").strip()))
        if frames:
            return tuple(frames)
        raised = raised.__cause__ or (None if raised.__suppress_context__ else raised.__context__)
    return ()


def format_frames(frames: Sequence[UserFrame]) -> str:
    """Format frames as lines to print below an error message."""
    if len(frames) > MOST:
        half = MOST // 2
        between = f"  ... {len(frames) - 2 * half:,} frames more ..."
        return "\n".join(
            [*(frame.shown() for frame in frames[:half]), between, *(frame.shown() for frame in frames[-half:])]
        )
    return "\n".join(frame.shown() for frame in frames)


def add_plugin(folder: str) -> None:
    """Count the files of a folder as a package's, not as the user's."""
    PLUGINS.append(folder)
    _library_folders.cache_clear()
    is_user_file.cache_clear()


@functools.cache
def is_user_file(file: str, function: str = "") -> bool:
    """Whether a file name belongs to a user's file or to code that was typed in."""
    if file.startswith("<"):
        # the methods that dataclasses generate come from <string>, too
        return file.startswith(TYPED) and not function.startswith("__")
    if file.endswith(COMPILED):
        return False
    path = os.path.realpath(file)
    return not any(path.startswith(root + os.sep) for root in _library_folders())


@functools.cache
def _library_folders() -> frozenset[str]:
    """Folders of this package, of Python itself and of installed libraries."""
    kinds = ("stdlib", "platstdlib", "purelib", "platlib")
    libraries = [*(sysconfig.get_path(kind) for kind in kinds), *site.getsitepackages(), site.getusersitepackages()]
    # an environment may have its libraries in another's folder, or in one that was named to pip
    libraries += [folder for folder in sys.path if _has_libraries(folder)]
    return frozenset(os.path.realpath(folder) for folder in [str(PACKAGE), *PLUGINS, *filter(None, libraries)])


def _has_libraries(folder: str) -> bool:
    """Whether a folder of the search path is one that libraries are installed into."""
    if os.path.basename(folder) in INSTALLED:
        return True
    try:
        return any(name.endswith(".dist-info") for name in os.listdir(folder or "."))
    except OSError:
        return False


def is_installed(path: Path) -> bool:
    """Whether a file is in a folder of installed libraries."""
    return not set(INSTALLED).isdisjoint(path.parts)


def code_object(function: object) -> CodeType | None:
    """Code object that a callable runs; None if it is not a Python function."""
    while isinstance(function, functools.partial):
        function = function.func
    function = getattr(function, "__wrapped__", function)
    if not hasattr(function, "__code__") and not hasattr(function, "__func__"):
        function = type(function).__call__ if callable(function) else None
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None)
    return code if isinstance(code, CodeType) else None


def definition_frame(function: Callable) -> tuple[UserFrame, ...]:
    """Frame of the first line of a user's function, to show for a wrong return value."""
    code = code_object(function)
    if code is None or not is_user_file(code.co_filename, code.co_name):
        return ()
    source = linecache.getline(code.co_filename, code.co_firstlineno).strip()
    return (UserFrame(code.co_filename, code.co_firstlineno, code.co_name, source),)
