"""`stratafl deploy`: a tree of real processes on Flower."""

from __future__ import annotations

import importlib.util
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Column, Table

from stratafl.errors import InvalidInput, MissingExtra
from stratafl.store.signals import Interrupted

deploy = typer.Typer(help="Run a tree of real sites on Flower.", no_args_is_help=True)
TopologyFile = Annotated[Path, typer.Argument(help="A TOML file; see docs/deploy.md.")]
Out = Annotated[Path, typer.Option(help="The folder with one folder per site.")]
Folders = Annotated[list[Path], typer.Argument(help="Folders of sites, made by `deploy init`.")]


def _need_flower() -> None:
    if importlib.util.find_spec("flwr") is None:
        raise MissingExtra("deployment", "flwr", "deploy")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@deploy.command("init")
def init_command(
    topology: TopologyFile,
    out: Out = Path("sites"),
) -> None:
    """Make every site's folder: config, certificates, keys and a start script."""
    _need_flower()
    from stratafl.deploy.provision import Topology, provision

    for name, folder in provision(Topology.load(topology), out).items():
        print(f"{name}: {folder}")


@deploy.command("up")
def up_command(
    topology: TopologyFile,
    out: Out = Path("sites"),
    local: Annotated[bool, typer.Option("--local", help="All sites on this machine.")] = False,
) -> None:
    """Start a whole tree on this machine, run its job, and stop it. Folders that are there are gone on with."""
    _need_flower()
    from stratafl.deploy import whole
    from stratafl.deploy.provision import Topology, provision

    if not local:
        raise InvalidInput(
            "--local", local, "other hosts start their sites themselves, with start.sh: see docs/deploy.md"
        )
    if not out.exists():
        provision(Topology.load(topology), out)
    try:
        whole.run(out, print)
    except KeyboardInterrupt:
        raise Interrupted(signal.SIGINT, f"stopped; go on with: stratafl deploy up {topology} --local") from None
    print(f"the model: {out / 'root' / 'model.safetensors'}")


@deploy.command("status")
def status_command(out: Out = Path("sites")) -> None:
    """Every site of this machine: whether it runs, its round, its last contact and its bytes."""
    from stratafl.deploy import whole

    counts = ("bytes in", "of arrays", "bytes out", "of arrays")
    table = Table(Column("site", no_wrap=True), "runs", "doing", "round", "last contact", *counts)
    for seen in whole.look(out):
        status, ago = seen.status, seen.contact
        table.add_row(
            seen.site.name,
            "yes" if seen.running else "no",
            str(status.get("doing", "-")),
            str(status.get("round", "-")),
            "-" if ago is None else f"{ago:.0f} s ago",
            *(str(status.get(name, "-")) for name in ("bytes_in", "arrays_in", "bytes_out", "arrays_out")),
        )
    Console().print(table)


@deploy.command("down")
def down_command(out: Out = Path("sites")) -> None:
    """Stop every site that runs on this machine; each goes on from where it stood when it is started again."""
    from stratafl.deploy import whole

    left = whole.stop(out)
    if left:
        raise InvalidInput("sites", left, "did not stop in time")


@deploy.command("site")
def site_command(folders: Folders) -> None:
    """Start the processes of one or more sites and watch over them until the run is over or SIGTERM comes."""
    _need_flower()
    from stratafl.deploy.supervise import run_sites

    raise typer.Exit(run_sites(folders, _say))
