"""The command line, put together from its commands.

A command's file imports at its top only what is light, so that help comes at once; what the command
works with is imported where it begins to work.
"""

from __future__ import annotations

import contextlib
import sys
import traceback
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
from stratafl.cli.catalogue import list_command
from stratafl.cli.config import config
from stratafl.cli.cost import cost_command, timeline_command
from stratafl.cli.data import data
from stratafl.cli.demo import demo_command
from stratafl.cli.deploy import deploy
from stratafl.cli.init.command import init_command
from stratafl.cli.options import CATALOGUE, DEPLOYMENT, EXPERIMENTS, INSTALLED, RESULTS, TopCommands
from stratafl.cli.renamed import present_words
from stratafl.cli.report import report_command
from stratafl.cli.run import resume_command, run_command
from stratafl.cli.runs import runs
from stratafl.cli.sweep import sweep_command
from stratafl.cli.tables import spell_out
from stratafl.cli.tune import tune_command

app = typer.Typer(
    cls=TopCommands,
    help="Hierarchical federated learning on trees of any depth.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command("init", rich_help_panel=EXPERIMENTS)(init_command)
app.command("run", rich_help_panel=EXPERIMENTS)(run_command)
app.command("resume", rich_help_panel=EXPERIMENTS)(resume_command)
app.command("sweep", rich_help_panel=EXPERIMENTS)(sweep_command)
app.command("tune", rich_help_panel=EXPERIMENTS)(tune_command)
app.add_typer(config, name="config", rich_help_panel=EXPERIMENTS)
app.add_typer(runs, name="runs", rich_help_panel=RESULTS)
app.command("report", rich_help_panel=RESULTS)(report_command)
app.command("cost", rich_help_panel=RESULTS)(cost_command)
app.command("cost timeline", hidden=True)(timeline_command)
app.command("list", rich_help_panel=CATALOGUE)(list_command)
app.add_typer(data, name="data", rich_help_panel=CATALOGUE)
app.command("demo", rich_help_panel=DEPLOYMENT)(demo_command)
app.add_typer(deploy, name="deploy", rich_help_panel=DEPLOYMENT)
VERBOSE = ("--verbose", "-v")
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
            group.command(entry.name, rich_help_panel=INSTALLED)(entry.load())
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
def top_options(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
    verbose: Annotated[
        bool, typer.Option(*VERBOSE, help="Show the traceback of an error; may stand anywhere.")
    ] = False,
) -> None:
    if version:
        print(__version__)
        raise typer.Exit


def main() -> None:
    """Errors a user can mend are one line and exit code 2, those in their own code come with its
    lines and are 4; an interrupt is 130, a SIGTERM 143."""
    spell_out()
    is_verbose = any(word in VERBOSE for word in sys.argv)
    try:
        # processes that share a run are started with these words, too
        sys.argv[1:] = present_words(sys.argv[1:])
        words = [word for word in sys.argv[1:] if word not in VERBOSE]
        with attribute_errors():
            code = app(args=words, prog_name="stratafl", standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except (InvalidInput, MissingExtra, OSError, Interrupted) as problem:
        if is_verbose:
            traceback.print_exc()
        sys.exit(_tell(problem))
    except Exception as problem:
        line = _usage_line(problem)
        if line is None:
            raise
        print(escape_control(line), end="\n" if line else "", file=sys.stderr)
        sys.exit(2)


def _usage_line(problem: Exception) -> str | None:
    """The line for words that a command does not take, as Click tells it, empty where it has shown
    the help instead; None for any other error.

    Which package has Click's classes depends on the release of Typer, so they are known by what
    they offer.
    """
    context, message = getattr(problem, "ctx", None), getattr(problem, "format_message", None)
    if message is None:
        return None
    text = " ".join(message().split()).rstrip(".")
    see = "" if context is None else f"; see {context.command_path} --help"
    return f"error: {text}{see}" if text else ""


def _tell(problem: InvalidInput | MissingExtra | OSError | Interrupted) -> int:
    """Print what ended a command; returns its exit code."""
    if isinstance(problem, Interrupted):
        text = problem.message
    elif isinstance(problem, OSError):
        where = "a file" if problem.filename is None else format_value(Path(str(problem.filename)))
        text = f"error: {where}: {problem.strerror or first_line_of(problem)}"
    else:
        text = f"error: {problem}"
    print(escape_control(text), file=sys.stderr)
    if isinstance(problem, UserCodeError):
        for line in format_frames(problem.frames).splitlines():
            print(escape_control(line), file=sys.stderr)
    return problem.exit_code if isinstance(problem, Interrupted | InvalidInput) else 2
