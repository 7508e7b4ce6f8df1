"""The command line, put together from its commands.

A command's file imports at its top only what is light, so that help comes at once; what the command
works with is imported where it begins to work.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Annotated

import typer

from stratafl.base.errors import InvalidInput, MissingExtra, UserCodeError, escape_control, first_line_of, format_value
from stratafl.base.signals import Interrupted
from stratafl.base.tracebacks import add_plugin, format_frames
from stratafl.base.user_code import attribute_errors
from stratafl.base.version import __version__
from stratafl.cli.config import config
from stratafl.cli.costs.networks import networks
from stratafl.cli.costs.plan import plan_command
from stratafl.cli.costs.price import price_command
from stratafl.cli.data import data
from stratafl.cli.demo import demo_command
from stratafl.cli.deploy import deploy
from stratafl.cli.init.command import init_command
from stratafl.cli.methods import methods_command
from stratafl.cli.models import models_command
from stratafl.cli.options import Commands
from stratafl.cli.report import report_command
from stratafl.cli.run import run_command
from stratafl.cli.runs import runs_command
from stratafl.cli.sweep import sweep_command
from stratafl.cli.tables import spell_out

app = typer.Typer(
    cls=Commands,
    help="Hierarchical federated learning on trees of any depth.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command("demo")(demo_command)
app.command("init")(init_command)
app.command("run")(run_command)
app.command("sweep")(sweep_command)
app.command("runs")(runs_command)
app.command("report")(report_command)
app.command("price")(price_command)
app.command("plan")(plan_command)
app.command("methods")(methods_command)
app.command("models")(models_command)
app.add_typer(config, name="config")
app.add_typer(networks, name="networks")
app.add_typer(data, name="data")
app.add_typer(deploy, name="deploy")
COMMAND_GROUP = "stratafl.commands"
"""Group of entry points by which other distributions add commands."""
CHECKOUT_COMMANDS = {"reproduce": "papers"}
"""Commands of distributions that a checkout of the repository has, with their folders."""


def add_installed_commands(group: typer.Typer, found: Iterable[EntryPoint]) -> None:
    """Add the command of each entry point, and an answer for the repository's that are missing."""
    missing = dict(CHECKOUT_COMMANDS)
    for entry in found:
        # an installed distribution whose files are gone must not stop every other command
        with contextlib.suppress(ImportError):
            group.command(entry.name)(entry.load())
            for path in getattr(sys.modules[entry.module.partition(".")[0]], "__path__", ()):
                add_plugin(path)
            missing.pop(entry.name, None)
    for name, folder in missing.items():
        arguments = {"ignore_unknown_options": True, "allow_extra_args": True}
        group.command(name, hidden=True, context_settings=arguments)(_missing_command(name, folder))


def _missing_command(name: str, folder: str) -> Callable[[], None]:
    def command() -> None:
        print(f"error: stratafl {name} is not installed: in a checkout, pip install ./{folder}", file=sys.stderr)
        raise typer.Exit(2)

    command.__doc__ = f"Not installed: in a checkout, pip install ./{folder}"
    return command


add_installed_commands(app, entry_points(group=COMMAND_GROUP))


@app.callback(invoke_without_command=True)
def version_option(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        print(__version__)
        raise typer.Exit


def main() -> None:
    """Errors a user can mend are one line and exit code 2, those in their own code come with its
    lines and are 4; an interrupt is 130, a SIGTERM 143."""
    spell_out()
    try:
        with attribute_errors():
            app(prog_name="stratafl", standalone_mode=True)
    except (InvalidInput, MissingExtra) as problem:
        print(escape_control(f"error: {problem}"), file=sys.stderr)
        if not isinstance(problem, UserCodeError):
            sys.exit(2)
        for each in format_frames(problem.frames).splitlines():
            print(escape_control(each), file=sys.stderr)
        sys.exit(problem.exit_code)
    except OSError as problem:
        where = "a file" if problem.filename is None else format_value(Path(str(problem.filename)))
        print(escape_control(f"error: {where}: {problem.strerror or first_line_of(problem)}"), file=sys.stderr)
        sys.exit(2)
    except Interrupted as stopped:
        print(escape_control(stopped.message), file=sys.stderr)
        sys.exit(stopped.exit_code)
