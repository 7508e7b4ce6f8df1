"""`stratafl bench`: the engines against the clock."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from stratafl.base.validation import check_integer
from stratafl.cli import tables
from stratafl.cli.options import AsJson

if TYPE_CHECKING:
    from stratafl.bench.table import Table

Size = Annotated[int | None, typer.Option(help="What suits the device, unless given.")]


def bench_command(
    model: Annotated[str, typer.Option(help="One of `stratafl models`.")] = "cnn",
    clients: Size = None,
    batch: Size = None,
    steps: Annotated[int | None, typer.Option(help="Steps between two meetings; likewise.")] = None,
    engine: Annotated[
        list[str] | None,
        typer.Option(
            help='"stacked:bf16", "vmap:tf32", "plain loop", ...; repeatable; all that make sense here unless given. '
            '"vmap" is plain torch.func.vmap, also "graphed" or "compiled", and not the engine "vmap".'
        ),
    ] = None,
    device: Annotated[str | None, typer.Option(help="A GPU if there is one, unless given.")] = None,
    as_json: AsJson = False,
) -> None:
    """Time the engines beside plain PyTorch: the whole loop, the same data, one run."""
    import torch

    from stratafl.base.device import check_device
    from stratafl.bench.engines import bench

    for name, value in (("--clients", clients), ("--batch", batch), ("--steps", steps)):
        if value is not None:
            check_integer(name, value, at_least=1)
    where = check_device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if as_json:
        table = bench(model, clients, batch, steps, engine, where)
        print(json.dumps(table.as_dict()))
    else:
        table = bench(model, clients, batch, steps, engine, where, watch=Shown())
        for remark in table.remarks():
            tables.print_sentence(remark)
    if table.failed:
        raise typer.Exit(1)


class Shown:
    """Prints each row when it is measured."""

    def __init__(self) -> None:
        from stratafl.bench.table import TITLES, WIDEST

        columns = [tables.Column(each, right=at > 1, minor=each == "peak GiB") for at, each in enumerate(TITLES)]
        self._table = tables.Table(columns, [WIDEST])
        self._rows: int | None = None

    def __call__(self, measured: Table) -> None:
        if self._rows is None:
            self._table.head(measured.heading())
            self._rows = 0
        for row in measured.rows[self._rows :]:
            self._table.add(row.cells())
        self._rows = len(measured.rows)
