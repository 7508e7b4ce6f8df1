"""`stratafl methods`: the rules that are registered."""

from __future__ import annotations

import json
from inspect import Parameter
from itertools import starmap
from typing import Annotated

import typer

from stratafl.base.errors import format_value
from stratafl.cli.options import AsJson
from stratafl.cli.tables import Column, print_table, unbroken


def methods_command(
    plugin: Annotated[list[str] | None, typer.Option(help="A Python file that registers rules; repeatable.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the methods, what each is, and its parameters."""
    from stratafl.experiment.loading import import_plugins
    from stratafl.rules.registry import entries

    import_plugins(plugin or ())
    known = sorted(entries(), key=lambda entry: entry.name)
    if as_json:
        fields = ("name", "levels", "summary", "parameters")
        print(json.dumps([{f: getattr(entry, f) for f in fields} for entry in known], default=_written))
        return
    rows = [
        (entry.name, entry.levels, entry.summary, ", ".join(starmap(_parameter, entry.parameters.items())))
        for entry in known
    ]
    print_table(["name", "edges", Column("what it is", prose=True), Column("parameters", prose=True)], rows)


def _parameter(name: str, default: object) -> str:
    """A parameter as a config would have it, on one line."""
    return name if default is Parameter.empty else unbroken(f"{name}={format_value(default)}")


def _written(default: object) -> str | None:
    """A default that JSON does not know: none, or any object of a user's rule."""
    return None if default is Parameter.empty else format_value(default)
