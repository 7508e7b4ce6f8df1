"""Packages that can be called, as the function of their name: `stratafl.cost("runs", "plato")`.

Once a module of such a package is imported, `stratafl.cost` is the package, whatever else had that
name. So the package itself takes the call.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


class CallablePackage(ModuleType):
    """Package with a function of its own name, which is imported at the first call."""

    _module: str

    @property
    def _function(self) -> Callable[..., Any]:
        name = self.__name__.rpartition(".")[2]
        function: Callable[..., Any] = getattr(importlib.import_module(f"{self.__name__}.{self._module}"), name)
        return function

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._function)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self._function(*arguments, **options)


def make_callable(package: str, module: str) -> None:
    """Let a package be called: its function is in one of its modules."""
    target = sys.modules[package]
    target.__class__ = CallablePackage
    target._module = module  # type: ignore[attr-defined]
