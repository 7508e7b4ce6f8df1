"""Time the engines on this machine beside plain PyTorch and JAX: `python -m benchmarks.speed`."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import torch
import typer

from benchmarks.speed.measure import compare_engines
from benchmarks.speed.results import TablePrinter
from stratafl.base.device import check_device
from stratafl.base.errors import InvalidInput
from stratafl.base.validation import check_integer
from stratafl.cli import tables
from stratafl.cli.options import AsJson

Size = Annotated[int | None, typer.Option(help="Default: a size for the device.")]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def speed_command(
    model: Annotated[str, typer.Option(help="One of `stratafl list models`.")] = "cnn",
    clients: Size = None,
    batch: Size = None,
    steps: Annotated[
        int | None, typer.Option(help="Steps between two synchronisations. Default: for the device.")
    ] = None,
    engine: Annotated[
        list[str] | None,
        typer.Option(
            help='"stacked:bf16", "vmap:tf32", "plain loop", ...; repeatable. Default: all that suit the device. '
            '"vmap" is plain torch.func.vmap, also "graphed" or "compiled", and not the engine "vmap".'
        ),
    ] = None,
    device: Annotated[str | None, typer.Option(help="Default: a GPU if there is one.")] = None,
    as_json: AsJson = False,
) -> None:
    """Time the engines and plain PyTorch: the complete loop, the same data, one process."""
    for name, value in (("--clients", clients), ("--batch", batch), ("--steps", steps)):
        if value is not None:
            check_integer(name, value, at_least=1)
    torch_device = check_device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if as_json:
        table = compare_engines(model, clients, batch, steps, engine, torch_device)
        print(json.dumps(table.as_dict()))
    else:
        table = compare_engines(model, clients, batch, steps, engine, torch_device, watch=TablePrinter())
        for remark in table.remarks():
            tables.print_sentence(remark)
    if table.failed:
        raise typer.Exit(1)


def main() -> None:
    """Run the command; bad input is one line and exit code 2."""
    try:
        app(prog_name="python -m benchmarks.speed")
    except InvalidInput as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
