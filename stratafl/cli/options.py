"""Options that several commands share, and the groups that commands are in."""

from __future__ import annotations

import importlib
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

CONFIG_FILE = typer.Argument(help="A TOML file; see docs/config.md.")
Changes = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change one value; repeatable."),
]
Workers = Annotated[int | None, typer.Option(help="Processes; one per GPU or core unless given.")]
KeepStale = Annotated[
    bool, typer.Option("--keep-stale", help="Keep runs that are done although files of yours were changed since.")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")]
TARGET_HELP = "A value of a metric: accuracy=0.8, 'loss <= 0.1', or a number alone for an accuracy."
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Track = Annotated[
    list[str] | None,
    typer.Option(metavar="TRACKER", help="Tell a tracker of every round: tensorboard, wandb or mlflow. Repeatable."),
]


def tracked_by(track: list[str] | None, tensorboard: bool) -> list[str]:
    """The trackers that were asked for, either way."""
    return [*(track or ()), *(["tensorboard"] if tensorboard else [])]


class Commands(TyperGroup):
    """A group that names the nearest command, once, where it has none of a name."""

    def __init__(self, *given: Any, **settings: Any):
        super().__init__(*given, **settings)
        self.suggest_commands = not _click_suggests()


def _click_suggests() -> bool:
    """Whether Click does so itself, as it does since 8.4; recent versions of Typer do without
    Click."""
    try:
        exceptions = importlib.import_module("click.exceptions")
    except ImportError:
        return False
    return hasattr(exceptions, "NoSuchCommand")
