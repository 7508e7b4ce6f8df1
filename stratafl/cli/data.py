"""`stratafl data`: prepare a data set, and show how one is split."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stratafl.cli.options import CONFIG_FILE, AsJson, Changes, Commands
from stratafl.cli.tables import Column, print_sentence, print_table

if TYPE_CHECKING:
    from stratafl.data.partition.heterogeneity import HeterogeneityReport

data = typer.Typer(cls=Commands, help="Data sets: prepare, show.", no_args_is_help=True)


@data.command("prepare")
def prepare_command(
    name: Annotated[str, typer.Argument(help="A data set; see `stratafl list datasets`.")],
    source: Annotated[
        str | None,
        typer.Option("--from", metavar="PATH|hub", help="A file, a folder, or the hub; else the usual places."),
    ] = None,
    allow_partial: Annotated[
        bool, typer.Option("--allow-partial", help="Take a set of another size than the published one.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Read a data set in one of its published forms and store it for use."""
    from stratafl.data.catalog import prepare

    done = prepare.prepare(name, source, allow_partial=allow_partial)
    if as_json:
        print(json.dumps(dataclasses.asdict(done), default=str))
        return
    print(f"{name}: found {done.form} in {done.where}")
    print(f"{done.train:,} training and {done.test:,} test samples, {len(done.classes)} classes, in {done.path}")
    for note in done.notes:
        print(f"note: {note}")


@data.command("show")
def show_command(
    config: Annotated[Path, CONFIG_FILE],
    change: Changes = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Draw the split (.png, .svg or .pdf).", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Split the data as a config says, and print how different the nodes are."""
    from stratafl.base import plotting
    from stratafl.base.errors import InvalidInput
    from stratafl.data.partition.heterogeneity import contact_sheet, heterogeneity, split_figure
    from stratafl.experiment.algorithm import topology_of
    from stratafl.experiment.experiment import Experiment
    from stratafl.experiment.loading import load_stored

    if out is not None:
        plotting.check_picture(out)
    experiment = Experiment.from_toml(config, change or ())
    tree = topology_of(experiment)
    dataset, stored = load_stored(experiment.data, tree, experiment.seed)
    if not dataset.classes or dataset.clients is None:
        raise InvalidInput("data.source", experiment.data.source, "has no classes to show the split of")
    labels, leaves = dataset.samples.targets_N.numpy(), dataset.clients.numpy()
    report = heterogeneity(labels, leaves, tree.parents)
    title = f"{experiment.data.source if stored is None else stored.name}: {', '.join(dataset.partition_notes)}"
    written = []
    if out is not None:
        written.append(split_figure(out, labels, leaves, tree.parents, class_names=dataset.classes, title=title))
    if out is not None and stored is not None and stored.kind == "image":
        sheet = out.with_name(f"{out.stem}_images{out.suffix}")
        written.append(contact_sheet(sheet, stored.x_train, leaves, tree.parents, angles=dataset.angles, title=title))
    if as_json:
        print(json.dumps({**dataclasses.asdict(report), "pictures": [str(path) for path in written]}))
        return
    _print_report(title, report)
    for path in written:
        print(f"picture: {path}")


def _print_report(title: str, report: HeterogeneityReport) -> None:
    titles = ("level", "nodes", "to parent", "to all", "classes", "samples")
    rows = [
        (
            str(level.level),
            f"{level.nodes:,}",
            f"{level.to_parent:.3f}",
            f"{level.to_global:.3f}",
            f"{level.classes.least} - {level.classes.most}",
            f"{level.sizes.least:,} - {level.sizes.most:,}",
        )
        for level in report.levels
    ]
    print_table([Column(each, right=True) for each in titles], rows, title)
    print_sentence("to parent, to all: total-variation distance of label distributions, mean over the level's nodes")
    print_sentence(f"{report.samples:,} samples of {report.classes} classes placed, {report.dropped:,} dropped")
