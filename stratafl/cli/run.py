"""`stratafl run`: one run, new or gone on with."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stratafl.base.errors import InvalidInput, escape_control
from stratafl.base.signals import Interrupted
from stratafl.base.validation import check_integer
from stratafl.cli.options import CONFIG_FILE, AsJson, Changes, Quiet, Track, tracked_by
from stratafl.runs import format

if TYPE_CHECKING:
    from stratafl.distributed.communicator import Communicator
    from stratafl.experiment.experiment import Experiment
    from stratafl.metrics.records import RoundResult
    from stratafl.runs.session import RunSession


def run_command(
    config: Annotated[Path | None, CONFIG_FILE] = None,
    change: Changes = None,
    runs: Annotated[Path, typer.Option(help="The folder that gets the run's own folder.")] = Path("runs"),
    name: Annotated[str | None, typer.Option(help="The run's name; the config file's unless given.")] = None,
    resume: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Go on with this folder's run; with --set rounds=N, further."),
    ] = None,
    force: Annotated[
        bool,
        typer.Option("--force", help="Go on with a run also where its config, your files or its data were changed."),
    ] = False,
    track: Track = None,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="The same as --track tensorboard: events in the run's own folder.")
    ] = False,
    nproc: Annotated[
        int | None,
        typer.Option(metavar="N", help="Share the run among N processes here, its ranks; see docs/ranks.md."),
    ] = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Run what a config file describes, and keep it in a folder of its own."""
    from stratafl.distributed.launcher import distributed_session
    from stratafl.experiment.experiment import Experiment
    from stratafl.runs.session import RunSession, extended
    from stratafl.runs.trackers import check_trackers

    if nproc is not None:
        raise typer.Exit(_shared(nproc, None if config is None else Experiment.from_toml(config, change or ())))
    tracked = tracked_by(track, tensorboard)
    check_trackers(tracked)
    with distributed_session() as ranks:
        try:
            with ranks.raise_together():
                if (config is None) == (resume is None):
                    raise InvalidInput("CONFIG", config, "give either a config file, or --resume and a run's folder")
                if resume is not None and name is not None:
                    raise InvalidInput("--name", name, "a run goes on under the name it has: give none with --resume")
                if force and resume is None:
                    raise InvalidInput("--force", force, "is for --resume")
                settings = None if config is None else Experiment.from_toml(config, change or ())
            if resume is not None:
                further = extended(resume, change) if change else None
                session = RunSession.resume(resume, further, ranks=ranks, say=_saying(resume.name, ranks), force=force)
            else:
                assert config is not None and settings is not None
                session = RunSession.start(settings, name or format.slug(config.stem), runs, ranks=ranks)
        except KeyboardInterrupt:
            raise Interrupted(signal.SIGINT, "interrupted before the first round") from None
        if ranks.is_first:
            _show(session, tracked, quiet, as_json)
        else:
            session.run()


def _shared(nproc: int, settings: Experiment | None) -> int:
    """Have so many processes do it, and return the exit code."""
    from stratafl.base.topology import Topology
    from stratafl.distributed.launcher import launch, without_option

    count = check_integer("--nproc", nproc, at_least=1, at_most=4096)
    clients = count if settings is None else Topology.of(settings.tree.shape).leaves
    if count > clients:
        # said before so many processes are started that would have nothing to do
        raise InvalidInput("--nproc", count, f"the tree has {clients:,} clients; every process needs one at least")
    return launch(count, without_option(sys.argv[1:], "--nproc"))


def _saying(title: str, ranks: Communicator) -> Callable[[str], None]:
    def say(text: str) -> None:
        if ranks.is_first:
            print(escape_control(f"{title}: {text}"), file=sys.stderr)

    return say


def _show(session: RunSession, tracked: Sequence[str], quiet: bool, as_json: bool) -> None:
    from stratafl.cli.display import byte_count
    from stratafl.runs.trackers import trackers_for
    from stratafl.simulation.callbacks import tracking
    from stratafl.simulation.progress import ProgressBar

    title, before, folder = escape_control(session.name), len(session.simulation.history), session.path
    trackers = trackers_for(tracked, folder, session.name, folder.name, before)
    with (
        ProgressBar(title, session.simulation.rounds, quiet, done=before) as display,
        tracking(trackers, session.config) as follow,
    ):

        def watch(record: RoundResult) -> None:
            display.show(record)
            follow(record)

        session.simulation.on_sync = display.on_sync
        done = session.run(watch, display.print_line)
    summary = done.summary
    if as_json:
        print(json.dumps({**summary, "path": str(done.path)}))
        return
    metrics = "  ".join(f"{name} {value:.4f}" for name, value in summary["final"].items())
    print(f"{title}: {summary['rounds']} rounds in {summary['seconds']:.1f}s  {metrics}")
    if summary["diverged"] is not None:
        print(f"diverged at round {summary['diverged']}: from there on the test loss is not finite")
    print(f"sent and received per client: {byte_count(summary['bytes_per_client'])}")
    for line in _refusals(summary["refused"], summary["too_large"]):
        print(escape_control(line))
    print(f"written to {escape_control(done.path)}")


def _refusals(refused: Mapping[str, int], too_large: Mapping[str, int], most: int = 10) -> Iterator[str]:
    """Who was left out, how often and why, the first few of them."""
    for node, times in islice(refused.items(), most):
        large = too_large.get(node, 0)
        why = "not finite" if large == 0 else "far too large"
        if 0 < large < times:
            why = f"not finite, or {large} times {why}"
        yield f"refused {times} times, its update was {why}: {node}"
    if len(refused) > most:
        yield f"refused, too: {len(refused) - most:,} more, all in summary.json"
