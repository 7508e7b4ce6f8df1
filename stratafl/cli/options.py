"""Options that several commands share, and the groups that commands are in."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

EXPERIMENTS, RESULTS = "Experiments", "Results"
CATALOGUE, DEPLOYMENT, INSTALLED = "Data and catalogue", "First steps and deployment", "Installed besides"
"""Groups of commands in the help."""

CONFIG_FILE = typer.Argument(help="A TOML file; see docs/config.md.")
Changes = Annotated[
    list[str] | None,
    typer.Option(
        "--set", "-s", metavar="SECTION.KEY=VALUE", help="Change one value, or with SECTION=VALUE a table; repeatable."
    ),
]
Workers = Annotated[int | None, typer.Option(help="Processes; one per GPU or core unless given.")]
KeepStale = Annotated[
    bool, typer.Option("--keep-stale", help="Keep runs that are done although files of yours were changed since.")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")]
TARGET_HELP = "A metric and its value: 'loss<=0.3', 'f1>=0.6', or 0.75 alone for an accuracy."
Targets = Annotated[list[str] | None, typer.Option("--target", metavar="TARGET", help=f"{TARGET_HELP} Repeatable.")]
Networks = Annotated[
    list[str] | None,
    typer.Option("--network", "-n", help="A preset (stratafl list networks), a .toml file, or own: the runs' own."),
]
RunsFolder = Annotated[Path, typer.Option("--runs", "-d", metavar="DIR", help="The folder of runs.")]
RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="A run's folder, a part of its name, or latest.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


class TrackerName(StrEnum):
    """Experiment trackers; an enumeration, since Typer takes no lists of Literals."""

    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    MLFLOW = "mlflow"


Track = Annotated[
    list[TrackerName] | None,
    typer.Option(help="Tell a tracker of every round; repeatable."),
]


def tracked_by(track: list[TrackerName] | None, tensorboard: bool) -> list[str]:
    """The trackers that were asked for, either way."""
    return [*(track or ()), *(["tensorboard"] if tensorboard else [])]


def shorthands(options: Mapping[str, object]) -> list[str]:
    """The changes that short options stand for; those that are None are not given."""
    return [f"{key}={value}" for key, value in options.items() if value is not None]


class Commands(TyperGroup):
    """A group that names the nearest command, once, where it has none of a name."""

    def __init__(self, *given: Any, **settings: Any):
        super().__init__(*given, **settings)
        self.suggest_commands = not _click_suggests()


class TopCommands(Commands):
    """The group of all commands; the name of one may be two words, the first a command itself."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if " ".join(args[:2]) in self.commands:
            args = [" ".join(args[:2]), *args[2:]]
        return super().resolve_command(ctx, args)


def _click_suggests() -> bool:
    """Whether Click does so itself, as it does since 8.4; recent versions of Typer do without
    Click."""
    try:
        exceptions = importlib.import_module("click.exceptions")
    except ImportError:
        return False
    return hasattr(exceptions, "NoSuchCommand")
