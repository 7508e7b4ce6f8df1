"""Docstrings below the fields of a named tuple, for `help` to show."""

from __future__ import annotations

import ast
import inspect
import textwrap
from typing import TypeVar

Kind = TypeVar("Kind", bound=type)


def documented(kind: Kind) -> Kind:
    """Give the fields of a named tuple the docstrings that stand below them in its source, instead
    of "Alias for field number 6"; without the source they stay as they are."""
    try:
        (defined,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    except OSError:
        return kind
    assert isinstance(defined, ast.ClassDef)
    for field, below in zip(defined.body, defined.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(below, ast.Expr):
            value = below.value
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                getattr(kind, field.target.id).__doc__ = inspect.cleandoc(value.value)
    return kind
