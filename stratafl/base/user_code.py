"""A user's own Python files, loaded so that what goes wrong in one is a line that names it."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

from stratafl.errors import InvalidInput, guarded


def load_module(field: str, path: Path) -> ModuleType:
    """A Python file of the user's, as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, str(path))
    # os.path, since to pathlib a name that is too long is an error and not a file that is absent
    if spec is None or spec.loader is None or not os.path.isfile(path):
        raise InvalidInput(field, path, "cannot be imported: no such Python file")
    module = importlib.util.module_from_spec(spec)
    with guarded(field, path, "cannot be imported"):
        spec.loader.exec_module(module)
    return module


def import_module(field: str, value: str, name: str) -> ModuleType:
    """An installed module of the user's, by its import path, which is part of the value given."""
    if name.partition(".")[0] in sys.stdlib_module_names:
        # importing or calling one may open a browser, wait for a key or end the process
        allowed = f"{name} is a part of Python itself; a file of the same name can be given with its .py"
        raise InvalidInput(field, value, allowed)
    with guarded(field, value, "cannot be imported"):
        return importlib.import_module(name)
