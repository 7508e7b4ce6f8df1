"""`stratafl networks`: links and devices that runs can be priced under."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from stratafl.base.errors import escape_control
from stratafl.cli.options import AsJson, Commands
from stratafl.cli.tables import Column, print_sentence, print_table

networks = typer.Typer(cls=Commands, help="Networks that runs can be priced under.", invoke_without_command=True)


@networks.callback()
def list_command(context: typer.Context, as_json: AsJson = False) -> None:
    """List the networks that come with stratafl; `show NAME` draws one."""
    if context.invoked_subcommand is not None:
        return
    from stratafl.network.specification import network, presets

    known = [network(name) for name in presets()]
    if as_json:
        print(json.dumps([{"name": e.name, "about": e.about, "source": e.source} for e in known]))
        return
    columns = (Column("name"), Column("what it is", prose=True), Column("source", prose=True, minor=True))
    print_table(columns, [(each.name, each.about, each.source) for each in known])
    print_sentence("one of them: `stratafl networks show NAME`; your own: a .toml file, see docs/clock.md")


@networks.command("show")
def show_command(
    name: Annotated[str, typer.Argument(help="A network's name, or a .toml file.")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Draw it (.png, .svg or .pdf).", show_default=False)
    ] = None,
    tree: Annotated[str, typer.Option(help="The tree that is drawn, such as 4x5.")] = "3x4",
) -> None:
    """Show a network: its tiers and devices, as a table and as a picture."""
    from stratafl.base.plotting import check_picture
    from stratafl.base.topology import Topology
    from stratafl.cost.figures import plot_network, quantity_rows
    from stratafl.network.specification import network

    chosen, shape = network(name, "network"), Topology.of(tree)
    if out is not None:
        check_picture(out)
    columns = [Column("what"), Column("quantity"), Column("median", right=True), Column("10 % to 90 %", right=True)]
    print_table(columns, quantity_rows(chosen), f"{chosen.name}: {chosen.about}" if chosen.about else chosen.name)
    if chosen.source:
        print_sentence(f"source: {chosen.source}")
    if out is not None:
        plot_network(out, chosen, shape)
        print(f"picture: {escape_control(out)}")
