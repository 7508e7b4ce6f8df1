"""`stratafl deploy`: a tree of real processes on Flower."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from stratafl.errors import InvalidInput, MissingExtra, printable
from stratafl.record import listed
from stratafl.store.signals import Interrupted

deploy = typer.Typer(help="Run a tree of real sites on Flower.", no_args_is_help=True)
TopologyFile = Annotated[Path, typer.Argument(help="A TOML file; see docs/deploy.md.")]
Out = Annotated[Path, typer.Option(help="The folder with one folder per site.")]
Folders = Annotated[list[Path], typer.Argument(help="Folders of sites, made by `deploy init`.")]

SHOWN = ("doing", "round", "bytes_in", "arrays_in", "bytes_out", "arrays_out")
"""Of a site's status."""


def _need_flower() -> None:
    if importlib.util.find_spec("flwr") is None:
        raise MissingExtra("deployment", "flwr", "deploy")


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # a log on a full disk ends nobody
        print(printable(text), file=sys.stderr, flush=True)


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
    from stratafl.deploy.provision import Topology, check_made_from, provision

    if not local:
        raise InvalidInput(
            "--local", local, "other hosts start their sites themselves, with start.sh: see docs/deploy.md"
        )
    given = Topology.load(topology)
    if out.exists():
        check_made_from(whole.sites(out)["root"], given)
    else:
        provision(given, out)
        _say(f"made {out}, a folder per site; starting them takes a while")
    rounds = given.config.run.rounds
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        whole.run(out, lambda line: print(_in_words(line, rounds), flush=True))
    except KeyboardInterrupt:
        place = "" if out == Path("sites") else f" --out {out}"
        again = f"stopped; go on with: stratafl deploy up {topology} --local{place}"
        raise Interrupted(signal.SIGINT, again) from None
    print(f"the model: {out / 'root' / 'model.safetensors'}")


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _in_words(line: str, rounds: int) -> str:
    """A line of rounds.jsonl."""
    seen = json.loads(line)
    numbers = "".join(f"  {name} {value:.3f}" for name, value in seen["metrics"].items())
    apart = "".join(f"  {word}: {listed(seen[word])}" for word in ("absent", "refused") if seen[word])
    return printable(f"round {seen['round']} of {rounds}{numbers}  {seen['seconds']:.1f} s{apart}")


@deploy.command("status")
def status_command(out: Out = Path("sites")) -> None:
    """Every site of this machine: whether it runs, its round, its last contact and its bytes."""
    from stratafl.deploy import whole

    # a narrow terminal breaks lines, and cuts no number short
    names = ("runs", "doing", "round", "contact", "bytes in", "arrays", "bytes out", "arrays")
    table = Table(Column("site", no_wrap=True), *(Column(name, overflow="fold") for name in names))
    for seen in whole.look(out):
        ago = seen.contact
        told = [escape(printable(seen.status.get(name, "-"))) for name in SHOWN]
        running, contact = "yes" if seen.running else "no", "-" if ago is None else f"{ago:.0f} s ago"
        table.add_row(escape(printable(seen.site.name)), running, *told[:2], contact, *told[2:])
    Console().print(table)


@deploy.command("down")
def down_command(out: Out = Path("sites")) -> None:
    """Stop every site that runs on this machine; each goes on from where it stood when it is started again."""
    from stratafl.deploy import whole

    left = whole.stop(out)
    if left:
        raise InvalidInput("sites", left, "did not stop in time")


@deploy.command("reset")
def reset_command(
    sites: Annotated[list[str], typer.Argument(help="Folders of sites, or names of sites in --out.")],
    out: Out = Path("sites"),
) -> None:
    """Set the state of sites aside: they begin anew. With the root's, the whole run does."""
    from stratafl.deploy import whole

    for name, aside in whole.reset(sites, out).items():
        print(f"{printable(name)}: begins anew; what it had is in {aside}")


@deploy.command("site")
def site_command(folders: Folders) -> None:
    """Start the processes of one or more sites and watch over them until the run is over or SIGTERM comes."""
    _need_flower()
    from stratafl.deploy.supervise import run_sites

    raise typer.Exit(run_sites(folders, _say))
