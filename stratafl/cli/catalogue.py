"""`stratafl list`: everything that a config can name."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from inspect import Parameter, getdoc, signature
from itertools import starmap
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import typer

from stratafl.base.errors import InvalidInput, escape_control, format_value, unknown_name
from stratafl.cli.options import AsJson
from stratafl.cli.tables import Column, print_sentence, print_table, unbroken

Kind = Literal["methods", "models", "datasets", "partitions", "networks", "optimizers", "losses", "metrics"]
Row = dict[str, Any]


@dataclass(frozen=True)
class Listing:
    """Entries of one kind: rows of plain data, and how they are printed."""

    rows: Sequence[Row]
    """Rows with a `name` each, as `--json` prints them."""
    columns: Sequence[Column | str]
    cells: Callable[[Row], Sequence[str]]
    remarks: Sequence[str] = ()


def list_command(
    kind: Annotated[Kind, typer.Argument(metavar="KIND", help=f"What to list: {', '.join(get_args(Kind))}.")],
    name: Annotated[str | None, typer.Argument(help="One of them, with all that is known of it.")] = None,
    plugin: Annotated[list[str] | None, typer.Option(help="A Python file that registers methods; repeatable.")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Draw the network (.png, .svg or .pdf).", show_default=False)
    ] = None,
    tree: Annotated[str, typer.Option(help="The tree that the network is drawn with, such as 4x5.")] = "3x4",
    as_json: AsJson = False,
) -> None:
    """List what a config can name: methods, models, data sets, networks and more."""
    if kind == "networks" and name is not None:
        return _show_network(name, out, tree, as_json)
    if out is not None:
        raise InvalidInput("--out", out, "draws one network: stratafl list networks NAME -o FILE")
    listing = _methods(plugin or ()) if kind == "methods" else LISTINGS[kind]()
    rows = listing.rows
    if name is not None:
        rows = [row for row in rows if row["name"] == name]
        if not rows:
            raise unknown_name(kind, name, [row["name"] for row in listing.rows])
    if as_json:
        print(json.dumps(rows if name is None else rows[0], default=_as_json))
    elif name is not None:
        print_table(["what", Column("value", prose=True)], [(key, _text(key, value)) for key, value in rows[0].items()])
    else:
        print_table(listing.columns, [listing.cells(row) for row in rows])
        for remark in listing.remarks:
            print_sentence(remark)


def _methods(plugins: Sequence[str]) -> Listing:
    from stratafl.experiment.loading import import_plugins
    from stratafl.rules.registry import entries

    import_plugins(plugins)
    rows = [
        {"name": method.name, "levels": method.levels, "summary": method.summary, "parameters": method.parameters}
        for method in sorted(entries(), key=lambda entry: entry.name)
    ]
    columns = ("name", "edges", Column("what it is", prose=True), Column("parameters", prose=True))
    return Listing(rows, columns, lambda row: (row["name"], row["levels"], row["summary"], _parameters(row)))


def _models() -> Listing:
    from stratafl.models.registry import catalogue

    columns = (
        Column("name"),
        Column("what it is", prose=True),
        Column("input"),
        Column("classes", right=True),
        Column("parameters", right=True),
    )

    def cells(row: Row) -> Sequence[str]:
        shape = "x".join(map(str, row["input_shape"]))
        return row["name"], row["description"], shape, str(row["classes"]), f"{row['parameters']:,}"

    own = 'your own: `name = "my_package.module:Class"` or `name = "my_model.py:Class"` in [model]'
    return Listing([asdict(model) for model in catalogue()], columns, cells, [own])


def _datasets() -> Listing:
    from stratafl.data.catalog import prepare

    columns = (
        Column("name"),
        Column("state"),
        Column("train / test", right=True),
        Column("sample", minor=True),
        Column("what it is", prose=True),
    )

    def cells(row: Row) -> Sequence[str]:
        samples = f"{row['train']:,} / {row['test']:,}" if row["train"] else ""
        return row["name"], row["state"], samples, "x".join(map(str, row["shape"])), row["title"].partition(": ")[2]

    rows = [asdict(dataset) for dataset in prepare.catalogue()]
    return Listing(rows, columns, cells, [f"{row['name']}: {row['advice']}" for row in rows if row["advice"]])


def _networks() -> Listing:
    from stratafl.network.specification import network, presets

    columns = (Column("name"), Column("what it is", prose=True), Column("source", prose=True, minor=True))
    remark = "one of them: `stratafl list networks NAME`; your own: a .toml file, see docs/clock.md"
    rows = [{"name": e.name, "about": e.about, "source": e.source} for e in map(network, presets())]
    return Listing(rows, columns, lambda row: (row["name"], row["about"], row["source"]), [remark])


def _partitions() -> Listing:
    from stratafl.data.partition.methods import SPLITS

    return _functions(SPLITS, 'a level of `partition` in [data], such as `{ name = "dirichlet", alpha = 0.3 }`')


def _optimizers() -> Listing:
    from stratafl.core.optimizer import OPTIMIZERS

    return _functions(OPTIMIZERS, 'in [client]: `optimizer = { name = "sgd", momentum = 0.9 }`; your own: docs/own')


def _losses() -> Listing:
    from stratafl.core.losses import LOSSES

    rows = [
        {"name": name, "summary": summary_of(function), "parameters": dict.fromkeys(parameters, Parameter.empty)}
        for name, (function, parameters) in LOSSES.items()
    ]
    return _with_parameters(rows, 'at the top of a config: `loss = "mse"`')


def _metrics() -> Listing:
    from stratafl.metrics.metrics import METRICS

    rows = [
        {"name": name, "better": metric.better, "parameters": dict.fromkeys(metric.parameters, Parameter.empty)}
        for name, metric in METRICS.items()
    ]
    columns = ("name", "better", Column("parameters", prose=True))
    remark = 'in [evaluation]: `metrics = ["f1", "top5"]`; accuracy and loss are always measured'
    return Listing(rows, columns, lambda row: (row["name"], row["better"], _parameters(row)), [remark])


LISTINGS: Mapping[Kind, Callable[[], Listing]] = {
    "models": _models,
    "datasets": _datasets,
    "partitions": _partitions,
    "networks": _networks,
    "optimizers": _optimizers,
    "losses": _losses,
    "metrics": _metrics,
}


def _functions(functions: Mapping[str, Callable[..., Any]], remark: str) -> Listing:
    """Functions or classes by name, with their parameters."""
    rows = [
        {
            "name": name,
            "summary": summary_of(function),
            "parameters": {p.name: p.default for p in signature(function).parameters.values()},
        }
        for name, function in functions.items()
    ]
    return _with_parameters(rows, remark)


def _with_parameters(rows: Sequence[Row], remark: str) -> Listing:
    columns = ("name", Column("what it is", prose=True), Column("parameters", prose=True))
    return Listing(rows, columns, lambda row: (row["name"], row["summary"], _parameters(row)), [remark])


def summary_of(function: Callable[..., Any]) -> str:
    """The first sentence of a docstring, on one line."""
    return " ".join((getdoc(function) or "").partition("\n\n")[0].split()).partition(". ")[0].rstrip(".")


def _parameters(row: Row) -> str:
    """Parameters as a config would have them, each on one line."""
    return ", ".join(starmap(_parameter, row["parameters"].items()))


def _parameter(name: str, default: object) -> str:
    return name if default is Parameter.empty else unbroken(f"{name}={format_value(default)}")


def _as_json(value: object) -> str | None:
    """A value that JSON does not know: no default, a path or any object of a user's rule."""
    if value is Parameter.empty:
        return None
    return str(value) if isinstance(value, Path) else format_value(value)


def _text(key: str, value: Any) -> str:
    if key == "parameters" and isinstance(value, Mapping):
        return _parameters({key: value}) or "none"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(map(str, value)) or "none"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _show_network(name: str, out: Path | None, tree: str, as_json: bool) -> None:
    """A network's tiers and devices, as a table and as a picture."""
    from stratafl.base.plotting import check_picture
    from stratafl.base.topology import Topology
    from stratafl.costs.figures import plot_network, quantity_rows
    from stratafl.network.specification import network

    chosen, shape = network(name, "network"), Topology.of(tree)
    if out is not None:
        check_picture(out)
    if as_json:
        print(json.dumps({"name": chosen.name, "about": chosen.about, "source": chosen.source, **chosen.as_tables()}))
    else:
        columns = [Column("what"), Column("quantity"), Column("median", right=True), Column("10 % to 90 %", right=True)]
        print_table(columns, quantity_rows(chosen), f"{chosen.name}: {chosen.about}" if chosen.about else chosen.name)
        if chosen.source:
            print_sentence(f"source: {chosen.source}")
    if out is not None:
        plot_network(out, chosen, shape)
        print(f"picture: {escape_control(out)}", file=sys.stderr if as_json else sys.stdout)
