"""`stratafl config`: check, show and explain experiments."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from stratafl.base.errors import escape_control
from stratafl.cli.options import CONFIG_FILE, AsJson, Changes, Commands

config = typer.Typer(cls=Commands, help="Configs: check, show, explain.", no_args_is_help=True)


@config.command("check")
def check_command(file: Annotated[Path, CONFIG_FILE], change: Changes = None) -> None:
    """Name every mistake in a config, without its data."""
    from stratafl.experiment.algorithm import mistakes_in, sync_schedule, topology_of
    from stratafl.experiment.toml import read_tables

    experiment, mistakes = mistakes_in(read_tables(file, change or ()))
    for mistake in mistakes:
        print(escape_control(f"error: {mistake}"), file=sys.stderr)
    if experiment is None or mistakes:
        raise typer.Exit(2)
    tree = topology_of(experiment)
    steps = sync_schedule(experiment.schedule, tree).steps[0]
    unit = "local steps" if experiment.schedule.unit == "steps" else "passes"
    work = f"{steps:,} {unit} per round, {experiment.rounds:,} rounds"
    print(f"ok: {tree.leaves:,} clients, {tree.depth + 1} levels, {work}")


@config.command("show")
def show_command(
    file: Annotated[Path, CONFIG_FILE],
    change: Changes = None,
    changed: Annotated[bool, typer.Option("--changed", help="Only what differs from the defaults.")] = False,
    as_json: AsJson = False,
) -> None:
    """Print a config, with its defaults filled in."""
    from stratafl.experiment.experiment import Experiment
    from stratafl.experiment.toml import write_tables

    experiment = Experiment.from_toml(file, change or ())
    if as_json:
        print(json.dumps(experiment.to_table(defaults=not changed)))
    else:
        print(experiment.to_toml() if changed else write_tables(experiment.to_table()), end="")


@config.command("explain")
def explain_command(
    option: Annotated[str | None, typer.Argument(help="An option, client.lr, or a section; all unless given.")] = None,
) -> None:
    """Tell what an option accepts, its default and what it means."""
    from stratafl.experiment.experiment import Experiment, all_options

    if option is not None:
        print(Experiment.explain(option))
        return
    for key, entry in all_options().items():
        print(f"{key}: {entry.accepts}")


@config.command("schema")
def schema_command() -> None:
    """Print the JSON schema of a config, for the completion of editors."""
    from stratafl.experiment.experiment import Experiment

    print(json.dumps(Experiment.schema(), indent=2))
