"""`stratafl deploy`: a tree of real processes."""

from __future__ import annotations

import importlib.util
import json
import shlex
import signal
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer

from stratafl.base.errors import InvalidInput, MissingExtra, escape_control
from stratafl.base.signals import Interrupted
from stratafl.cli.options import Commands, Track, tracked_by
from stratafl.cli.tables import Column, print_table

deploy = typer.Typer(cls=Commands, help="Run a tree of real sites.", no_args_is_help=True)
TopologyFile = Annotated[Path, typer.Argument(help="A TOML file; see docs/deploy.md.")]
Out = Annotated[Path, typer.Option(help="The folder with one folder per site, or that of one site.")]
Sites = Annotated[
    list[str] | None,
    typer.Argument(help="Sites, each by its folder or its name in --out; a folder of several stands for all in it."),
]
Folders = Annotated[list[Path], typer.Argument(help="Folders of sites, made by `deploy init`.")]

SHOWN = ("state", "round", "bytes_in", "arrays_in", "bytes_out", "arrays_out")
"""What is shown of all that is known of a site."""


def _need_flower() -> None:
    if importlib.util.find_spec("flwr") is None:
        raise MissingExtra("deployment", "flwr", "deploy")


@deploy.command("init")
def init_command(
    topology: TopologyFile,
    out: Out = Path("sites"),
) -> None:
    """Make every site's folder: config, certificates, keys and a start script."""
    _need_flower()
    from stratafl.deploy.sites.provision import DeploymentTopology, provision

    for name, folder in provision(DeploymentTopology.load(topology), out).items():
        print(f"{name}: {folder}")


@deploy.command("up")
def up_command(
    topology: TopologyFile,
    out: Out = Path("sites"),
    local: Annotated[bool, typer.Option("--local", help="All sites on this machine.")] = False,
    track: Track = None,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="The same as --track tensorboard: events in the root's folder.")
    ] = False,
) -> None:
    """Start a whole tree on this machine, or go on with one, run its job, and stop it."""
    _need_flower()
    from stratafl.deploy.host import attendance, this_machine
    from stratafl.deploy.notes import log
    from stratafl.deploy.sites.provision import DeploymentTopology, check_made_from, provision
    from stratafl.deploy.sites.rounds import read_lines
    from stratafl.deploy.sites.site import Site
    from stratafl.metrics.records import RoundResult
    from stratafl.runs.trackers import check_trackers, trackers_for
    from stratafl.simulation.callbacks import tracking

    tracked = tracked_by(track, tensorboard)
    check_trackers(tracked)
    if not local:
        raise InvalidInput(
            "--local", local, "other hosts start their sites themselves, with start.sh: see docs/deploy.md"
        )
    planned = DeploymentTopology.load(topology)
    if out.exists():
        check_made_from(this_machine.whole(out)["root"], planned)
    else:
        provision(planned, out)
        log.say(f"made {out}, a folder per site; starting them takes a while")
    rounds = planned.experiment.rounds
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        root = out / "root"
        job, done = (Site.load(root).job, len(read_lines(root))) if tracked else ("", 0)
        trackers = trackers_for(tracked, root, topology.stem, job, done)
        with tracking(trackers, planned.experiment.to_table()) as follow:

            def show(line: str) -> None:
                print(_in_words(line, rounds), flush=True)
                if trackers:
                    follow(RoundResult.of(json.loads(line)))

            this_machine.run(out, show)
    except KeyboardInterrupt:
        place = "" if out == Path("sites") else f" --out {shlex.quote(str(out))}"
        again = f"stopped; go on with: stratafl deploy up {shlex.quote(str(topology))} --local{place}"
        raise Interrupted(signal.SIGINT, again) from None
    print(f"the model: {out / 'root' / 'model.safetensors'}", flush=True)
    missing = attendance.never(out / "root")
    if missing:
        log.warn(f"never took part in this run: {', '.join(missing)}")
        raise typer.Exit(attendance.INCOMPLETE)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _in_words(line: str, rounds: int) -> str:
    """Put a line of rounds.jsonl into words."""
    from stratafl.base.errors import join_names

    seen = json.loads(line)
    numbers = "".join(f"  {name} {value:.3f}" for name, value in seen["metrics"].items())
    apart = "".join(f"  {word}: {join_names(seen[word])}" for word in ("absent", "refused") if seen[word])
    return escape_control(f"round {seen['round']} of {rounds}{numbers}  {seen['seconds']:.1f} s{apart}")


@deploy.command("status")
def status_command(
    sites: Sites = None,
    out: Out = Path("sites"),
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document; see docs/deploy.md.")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="For monitors: only what is wrong, and exit code 1 if anything is.")
    ] = False,
) -> None:
    """Show each site's state, its round and what is wrong; at the root, the whole tree's."""
    from stratafl.deploy.host import this_machine, view

    document = view.seen(this_machine.chosen(sites or [], out))
    faults = list(view.faults(document)) if check else []
    if as_json:
        print(json.dumps(document, indent=2))
    elif check:
        for name, text in faults:
            print(escape_control(f"{name}: {text}"))
    else:
        _show(document)
    if faults:
        raise typer.Exit(1)


def _show(document: dict[str, Any]) -> None:
    """Print a table of sites, and below it what there is to say of them."""
    from stratafl.deploy.host import view

    counts = ("bytes in", "arrays in", "bytes out", "arrays out")
    rows = []
    for name, seen in document["sites"].items():
        cells = [str(seen[each]) for each in SHOWN]
        cells[0] = "missing" if seen["missing"] else "out" if seen["out"] else cells[0]
        heard = "never" if seen["age"] is None else f"{seen['age']:.0f} s ago"
        rows.append((name, *cells[:2], heard, *cells[2:]))
    columns = ("site", "state", Column("round", right=True), Column("heard", right=True))
    print_table([*columns, *(Column(each, right=True) for each in counts)], rows)
    for name, seen in document["sites"].items():
        for text in view.remarks(seen):
            print(escape_control(f"{name}: {text}"))


@deploy.command("down")
def down_command(sites: Sites = None, out: Out = Path("sites")) -> None:
    """Stop the sites that run on this machine, all or those named; started again, each goes on."""
    from stratafl.deploy.host import this_machine

    stopped, left = this_machine.stop(this_machine.chosen(sites or [], out))
    for name in stopped:
        print(f"{escape_control(name)}: stopped")
    if left:
        raise InvalidInput("sites", left, "still run: they did not stop in time, or are another user's")
    if not stopped:
        print("nothing ran")


@deploy.command("reset")
def reset_command(
    sites: Annotated[list[str], typer.Argument(help="Folders of sites, or names of sites in --out.")],
    out: Out = Path("sites"),
) -> None:
    """Set the state of sites aside: they begin anew. With the root's, the whole run does."""
    from stratafl.deploy.host import this_machine

    for name, aside in this_machine.reset(sites, out).items():
        print(f"{escape_control(name)}: begins anew; what it had is in {aside}")


@deploy.command("readmit")
def readmit_command(
    sites: Annotated[list[str], typer.Argument(help="Names of sites that are out, as `deploy status` shows them.")],
    out: Out = Path("sites"),
) -> None:
    """Take sites back that their parents ask no more; at a parent's host, which may be running."""
    from stratafl.deploy.host import this_machine

    for name, parent in this_machine.readmit(sites, out).items():
        print(escape_control(f"{name}: {parent} asks it again from its children's next round on"))


@deploy.command("site")
def site_command(folders: Folders) -> None:
    """Start the processes of some sites, and watch over them until the run is over."""
    _need_flower()
    from stratafl.deploy.host.supervise import run_sites
    from stratafl.deploy.notes import log

    raise typer.Exit(run_sites(folders, log.warn))
