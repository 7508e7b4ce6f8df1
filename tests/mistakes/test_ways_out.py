"""Commands, options and packages that messages tell a user to use exist."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator

import click
import typer

from stratafl.cli.main import app
from tests.docs.blocks import ROOT
from tests.test_architecture import FILES, PACKAGE

OTHER_NAMES = ("base/environment.py", "cli/renamed.py", "deploy/flower/", "sweeps/executors.py")
"""Places with the options of git, Flower and SLURM, and with former ones."""
COMMANDS: click.Group = typer.main.get_command(app)  # type: ignore[assignment]


def texts() -> Iterator[tuple[str, str]]:
    """All strings of the package, each with its file; a space stands for a value in a string."""
    for path in FILES:
        name = path.relative_to(PACKAGE).as_posix()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = (part.value if isinstance(part, ast.Constant) else " " for part in node.values)
                yield name, "".join(map(str, parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield name, node.value


def options(command: click.Command) -> set[str]:
    """Options of a command and of all commands in it."""
    own = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    inner = command.commands.values() if hasattr(command, "commands") else ()
    return {"--help"} | own.union(*map(options, inner))


def command_of(words: list[str]) -> click.Command | None:
    """The command that a line starts; None where there is none of this name."""
    command: click.Command | None = COMMANDS
    for word in words:
        if command is None or not hasattr(command, "commands"):
            break
        command = command.commands.get(word)
    return command


def test_commands_that_are_named_exist() -> None:
    named = {
        (file, *match.groups())
        for file, text in texts()
        for match in re.finditer(r"(?:`|go on with: )stratafl((?: +[a-z]+)+)(?:[^`-]*(--[a-z-]+))?", text)
    }
    assert len(named) > 20
    for file, words, option in named:
        command = command_of(words.split())
        assert command is not None, f"{file} names `stratafl{words}`"
        assert option is None or option in options(command), f"{file} names `stratafl{words} {option}`"


def test_options_that_are_named_exist() -> None:
    known, named = options(COMMANDS), set()
    for file, text in texts():
        if not file.startswith(OTHER_NAMES):
            named |= {(file, option) for option in re.findall(r"(?<![\w-])--[a-z][a-z-]*", text)}
    assert len(named) > 30
    assert {each for each in named if each[1] not in known} == set()


def packages(extra: str | None, project: dict) -> set[str]:
    """Names of the packages that an installation with an extra has."""
    requirements = list(project["dependencies"])
    for requirement in [] if extra is None else project["optional-dependencies"][extra]:
        name, _, inner = requirement.partition("[")
        if name == "stratafl":
            requirements += [each for part in inner.rstrip("]").split(",") for each in packages(part, project)]
        else:
            requirements.append(requirement)
    return {re.split(r"[^\w-]", each)[0] for each in requirements}


def missing_extras() -> Iterator[tuple[str, str, str | None]]:
    """Packages whose absence is an error: the file, the package, and the extra that has it."""
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                values = [each.value for each in node.args if isinstance(each, ast.Constant)]
                if node.func.id in ("MissingExtra", "_import") and len(values) == len(node.args) >= 2:
                    package, extra = (values[1], None) if len(values) == 2 else values[-2:]
                    yield path.name, package, extra


def test_an_extra_brings_the_package_it_is_named_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = list(missing_extras())
    assert len(wanted) > 10
    assert [each for each in wanted if each[1] not in packages(each[2], project)] == []
