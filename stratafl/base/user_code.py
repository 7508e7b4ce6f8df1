"""Load and call a user's own Python code; errors in it name the function that raised."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from stratafl.base.errors import (
    InvalidInput,
    MissingExtra,
    UserCodeError,
    convert_errors,
    describe_exception,
    is_out_of_memory,
    unknown_name,
)
from stratafl.base.signals import Interrupted
from stratafl.base.tracebacks import user_frames

FunctionNames = Mapping[CodeType, str]
"""Descriptions of user functions by their code objects."""


def load_module(field: str, path: Path) -> ModuleType:
    """Import a user's Python file as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, str(path))
    # os.path, since to pathlib a name that is too long is an error and not a file that is absent
    if spec is None or spec.loader is None or not os.path.isfile(path):
        raise InvalidInput(field, path, "cannot be imported: no such Python file")
    module = importlib.util.module_from_spec(spec)
    with convert_errors(field, path, "cannot be imported"), _seeded_import(), _listed(module):
        spec.loader.exec_module(module)
    return module


@contextmanager
def _listed(module: ModuleType) -> Iterator[None]:
    """List a module in `sys.modules` while it is executed, where `dataclasses` looks for it, unless
    another has its name."""
    is_free = sys.modules.setdefault(module.__name__, module) is module
    try:
        yield
    finally:
        if is_free:
            sys.modules.pop(module.__name__, None)


def import_module(field: str, value: str, name: str) -> ModuleType:
    """Import an installed module by its import path, which is part of `value`."""
    if name.partition(".")[0] in sys.stdlib_module_names:
        # importing or calling one may open a browser, wait for a key or end the process
        allowed = f"{name} is a part of Python itself; a file of the same name can be given with its .py"
        raise InvalidInput(field, value, allowed)
    with convert_errors(field, value, "cannot be imported"), _seeded_import():
        return importlib.import_module(name)


def _seeded_import() -> AbstractContextManager[None]:
    """Seed the generators while a file is imported: it draws the same numbers everywhere."""
    from stratafl.base.rng import ALIKE, seeded_rng  # torch takes a second to import

    return seeded_rng(ALIKE)


def load_attribute(field: str, path: str) -> Any:
    """Load the callable that "package.module:attribute" or "file.py:attribute" names."""
    source, _, attribute = path.rpartition(":")
    module = load_module(field, Path(source)) if source.endswith(".py") else import_module(field, path, source)
    function = getattr(module, attribute, None)
    if function is not None and not callable(function):
        raise InvalidInput(field, path, f"must be something to call, and is {type(function).__name__}")
    if function is None:
        raise unknown_name(
            field, attribute, [n for n, value in vars(module).items() if callable(value) and n[0] != "_"]
        )
    return function


@contextmanager
def attribute_errors(owners: Callable[[], FunctionNames] = dict, when: str = "") -> Iterator[None]:
    """Turn what user code raises in this block into an error that names the function.

    owners: describes the functions, and is called only after an error; when: part of the message.
    """
    try:
        yield
    except (InvalidInput, MissingExtra, Interrupted):
        raise
    except (Exception, SystemExit) as problem:
        names = owners()
        frames = user_frames(problem, {code.co_filename for code in names})
        if not frames or is_out_of_memory(problem):
            raise
        who = next(_names_on_traceback(problem, names), f"{frames[0].function} of {os.path.basename(frames[0].file)}")
        message = f"{who} raised {describe_exception(problem)}{when}"
        kind = UserCodeError.of_kind(problem)
        raise kind(who, describe_exception(problem), "it must not raise", frames, message) from problem


def _names_on_traceback(problem: BaseException, owners: FunctionNames) -> Iterator[str]:
    """Descriptions of the user functions on an exception's traceback, outermost first."""
    for frame, _ in traceback.walk_tb(problem.__traceback__):
        if frame.f_code in owners:
            yield owners[frame.f_code]
