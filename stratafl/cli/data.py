"""The commands about data sets and models."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from stratafl import models, plots
from stratafl.config import Config
from stratafl.data import pictures, sources
from stratafl.data.report import Report, heterogeneity
from stratafl.experiment import split
from stratafl.tree import Tree

data = typer.Typer(help="Data sets: list, prepare, show.", no_args_is_help=True)
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


@data.command("list")
def list_command(as_json: AsJson = False) -> None:
    """What there is, whether it is prepared, and how to get what is not."""
    found = sources.catalogue()
    if as_json:
        print(json.dumps([dataclasses.asdict(each) for each in found], default=str))
        return
    table = Table()
    table.add_column("name", no_wrap=True)
    for heading in ("state", "train / test", "sample", "classes", "how"):
        table.add_column(heading)
    for each in found:
        counts = f"{each.train:,} / {each.test:,}" if each.train else ""
        shape = "x".join(map(str, each.shape))
        how = each.form if each.train else each.advice or each.title
        table.add_row(each.name, each.state, counts, shape, str(len(each.classes) or ""), how)
    Console().print(table)


@data.command("prepare")
def prepare_command(
    name: Annotated[str, typer.Argument(help="A data set; see `stratafl data list`.")],
    source: Annotated[
        str | None,
        typer.Option("--from", metavar="PATH|hub", help="A file, a folder, or the hub; else the usual places."),
    ] = None,
    partial: Annotated[bool, typer.Option(help="Take a set of another size than the published one.")] = False,
    as_json: AsJson = False,
) -> None:
    """Read a data set in one of its published forms and store it for use."""
    done = sources.prepare(name, source, allow_partial=partial)
    if as_json:
        print(json.dumps(dataclasses.asdict(done), default=str))
        return
    print(f"{name}: found {done.form} in {done.where}")
    print(f"{done.train:,} training and {done.test:,} test samples, {len(done.classes)} classes, in {done.path}")
    for note in done.notes:
        print(f"note: {note}")


@data.command("show")
def show_command(
    config: Annotated[Path, typer.Argument(help="A TOML file; see docs/config.md.")],
    change: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change one value; repeatable."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Where the picture of the split goes.")] = Path("split.png"),
    as_json: AsJson = False,
) -> None:
    """Split the data as a config says; print how different the nodes are, and draw it."""
    plots.check_picture(out)
    settings = Config.load(config, change or ())
    tree = Tree.of(settings.tree.shape)
    dataset, parts = split(settings.data, tree, settings.run.seed)
    report = heterogeneity(dataset.y_train, parts.leaves, tree.parents)
    title = f"{dataset.name}: {', '.join(parts.methods)}"
    written = [pictures.split_figure(out, dataset.y_train, parts.leaves, tree.parents,
                                     class_names=dataset.classes, title=title)]  # fmt: skip
    if dataset.kind == "image":
        sheet = out.with_name(f"{out.stem}_images{out.suffix}")
        written.append(
            pictures.contact_sheet(sheet, dataset.x_train, parts.leaves, tree.parents, angles=parts.angles, title=title)
        )
    if as_json:
        print(json.dumps({**dataclasses.asdict(report), "pictures": [str(path) for path in written]}))
        return
    _print_report(title, report)
    for path in written:
        print(f"picture: {path}")


def _print_report(title: str, report: Report) -> None:
    table = Table("level", "nodes", "to parent", "to all", "classes", "samples", title=title)
    for level in report.levels:
        table.add_row(
            str(level.level),
            f"{level.nodes:,}",
            f"{level.to_parent:.3f}",
            f"{level.to_global:.3f}",
            f"{level.classes.least} - {level.classes.most}",
            f"{level.sizes.least:,} - {level.sizes.most:,}",
        )
    Console().print(table)
    print("to parent, to all: total-variation distance of label distributions, mean over the level's nodes")
    print(f"{report.samples:,} samples of {report.classes} classes placed, {report.dropped:,} dropped")


def models_command(as_json: AsJson = False) -> None:
    """List the models, with their parameters at the sizes of the paper's experiments."""
    known = models.catalogue()
    if as_json:
        print(json.dumps([dataclasses.asdict(each) for each in known]))
        return
    table = Table("name", "what it is", "input", "classes", "parameters")
    for each in known:
        shape = "x".join(map(str, each.input_shape))
        table.add_row(each.name, each.description, shape, str(each.classes), f"{each.parameters:,}")
    Console().print(table)
    print('your own: name = "my_package.module:Class" or "my_model.py:Class" in [model]')
