"""`stratafl init`: a folder with a study in it that runs, to be changed into one's own."""

from __future__ import annotations

import shlex
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Annotated

import typer

from stratafl.base.errors import InvalidInput, escape_control
from stratafl.base.files import atomic_write, make_folder

SUFFIX = ".txt"
"""The ending of a template, behind the name of what is made of it."""


def init_command(
    name: Annotated[Path, typer.Argument(help="The folder; a new one, or one with nothing in it.")] = Path("study"),
) -> None:
    """Write a project that runs: a config, a model, data, a rule, and what to do with them."""
    if name.exists() and (not name.is_dir() or any(name.iterdir())):
        raise InvalidInput("NAME", name, "is there already; nothing is overwritten")
    make_folder(name)
    for file, text in project(name.absolute().name).items():
        with atomic_write(name / file, sync=False) as written:
            written.write(text.encode())
        print(escape_control(name / file))
    here = "" if name.absolute() == Path.cwd() else f"cd {shlex.quote(str(name))} && "
    print(escape_control(f"next: {here}stratafl run study.toml"))


def project(title: str) -> dict[str, str]:
    """Every file of a project of that name."""
    templates = sorted(files("stratafl.cli.init").joinpath("template").iterdir(), key=lambda each: each.name)
    return {
        each.name.removesuffix(SUFFIX): Template(each.read_text(encoding="utf-8")).substitute(title=title)
        for each in templates
    }
