"""`stratafl run` and `stratafl resume`: a run, new or continued."""

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
from stratafl.cli.options import (
    CONFIG_FILE,
    AsJson,
    Changes,
    Quiet,
    RunArgument,
    RunsFolder,
    Track,
    shorthands,
    tracked_by,
)
from stratafl.cli.runs import find_run
from stratafl.runs import format

if TYPE_CHECKING:
    from stratafl.distributed.communicator import Communicator
    from stratafl.experiment.experiment import Experiment
    from stratafl.metrics.records import RoundResult
    from stratafl.runs.session import RunSession


Nproc = Annotated[
    int | None, typer.Option(metavar="N", help="Share the run among N processes here, its ranks; see docs/ranks.md.")
]
TensorBoardFlag = Annotated[
    bool, typer.Option("--tensorboard", help="The same as --track tensorboard: events in the run's own folder.")
]
Rounds = Annotated[int | None, typer.Option(metavar="N", help="Global rounds.")]


def run_command(
    config: Annotated[Path, CONFIG_FILE],
    change: Changes = None,
    seed: Annotated[int | None, typer.Option(metavar="N", help="Random seed.")] = None,
    rounds: Rounds = None,
    device: Annotated[str | None, typer.Option(help="Where to train, such as cuda.")] = None,
    runs: RunsFolder = Path("runs"),
    name: Annotated[str | None, typer.Option(help="The run's name; the config file's unless given.")] = None,
    track: Track = None,
    tensorboard: TensorBoardFlag = False,
    nproc: Nproc = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Run what a config file describes, and keep it in a folder of its own."""
    from stratafl.distributed.launcher import distributed_session
    from stratafl.experiment.experiment import Experiment
    from stratafl.runs.session import RunSession
    from stratafl.runs.trackers import check_trackers

    changes = [*(change or ()), *shorthands({"seed": seed, "rounds": rounds, "execution.device": device})]
    if nproc is not None:
        raise typer.Exit(_shared(nproc, Experiment.from_toml(config, changes)))
    tracked = tracked_by(track, tensorboard)
    check_trackers(tracked)
    with distributed_session() as ranks:
        try:
            with ranks.raise_together():
                settings = Experiment.from_toml(config, changes)
            session = RunSession.start(settings, name or format.slug(config.stem), runs, ranks=ranks)
        except KeyboardInterrupt:
            raise Interrupted(signal.SIGINT, "interrupted before the first round") from None
        _train(session, tracked, quiet, as_json)


def resume_command(
    run: RunArgument,
    change: Changes = None,
    rounds: Rounds = None,
    allow_changes: Annotated[
        bool, typer.Option("--allow-changes", help="Also where its config, your files or its data were changed.")
    ] = False,
    runs: RunsFolder = Path("runs"),
    track: Track = None,
    tensorboard: TensorBoardFlag = False,
    nproc: Nproc = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Continue a run that was stopped or failed, or with --rounds one that is done."""
    from stratafl.distributed.launcher import distributed_session
    from stratafl.runs.session import RunSession, extended
    from stratafl.runs.trackers import check_trackers

    path, changes = find_run(run, runs), [*(change or ()), *shorthands({"rounds": rounds})]
    if nproc is not None:
        raise typer.Exit(_shared(nproc, None))
    tracked = tracked_by(track, tensorboard)
    check_trackers(tracked)
    with distributed_session() as ranks:
        try:
            further = extended(path, changes) if changes else None
            session = RunSession.resume(path, further, ranks=ranks, say=_saying(path.name, ranks), force=allow_changes)
        except KeyboardInterrupt:
            raise Interrupted(signal.SIGINT, "interrupted before the first round") from None
        _train(session, tracked, quiet, as_json)


def _train(session: RunSession, tracked: Sequence[str], quiet: bool, as_json: bool) -> None:
    if session.simulation.ranks.is_first:
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
    from stratafl.base.units import byte_count
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
