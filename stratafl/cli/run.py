"""The command line."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from inspect import Parameter
from itertools import islice
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from stratafl import __version__, demo, plots
from stratafl.board import Board, check_board
from stratafl.config import Config
from stratafl.data_cli import data, models_command
from stratafl.deploy_cli import deploy
from stratafl.errors import InvalidInput, MissingExtra, first_line, printable, shown, whole
from stratafl.experiment import experiment, import_plugins
from stratafl.launch import Launch
from stratafl.metrics import rounds_to
from stratafl.progress import Display
from stratafl.ranks.group import Ranks
from stratafl.ranks.session import session
from stratafl.ranks.start import start, without_option
from stratafl.registry import entries
from stratafl.report_cli import report_command
from stratafl.reproduce_cli import reproduce_command
from stratafl.runs_cli import runs_command
from stratafl.simulate import Result, RoundResult
from stratafl.store import layout
from stratafl.store.signals import Interrupted
from stratafl.sweep_cli import sweep_command

app = typer.Typer(
    help="Hierarchical federated learning on trees of any depth.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


app.add_typer(data, name="data")
app.add_typer(deploy, name="deploy")
app.command("models")(models_command)
app.command("runs")(runs_command)
app.command("report")(report_command)
app.command("sweep")(sweep_command)
app.command("reproduce")(reproduce_command)


Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


@app.command("run")
def run_command(
    config: Annotated[Path | None, typer.Argument(help="A TOML file; see docs/config.md.")] = None,
    change: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change one value; repeatable."),
    ] = None,
    runs: Annotated[Path, typer.Option(help="The folder that gets the run's own folder.")] = Path("runs"),
    name: Annotated[str | None, typer.Option(help="The run's name; the config file's unless given.")] = None,
    resume: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Go on with the interrupted or failed run in this folder.")
    ] = None,
    force: Annotated[
        bool,
        typer.Option("--force", help="Go on with a run also where its config, your files or its data were changed."),
    ] = False,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Also write TensorBoard events, in the run's own folder.")
    ] = False,
    nproc: Annotated[
        int | None,
        typer.Option(metavar="N", help="Share the run among N processes here, its ranks; see docs/ranks.md."),
    ] = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Run what a config file describes, and keep it in a folder of its own."""
    if nproc is not None:
        count = whole("--nproc", nproc, at_least=1, at_most=4096)
        raise typer.Exit(start(count, without_option(sys.argv[1:], "--nproc")))
    if tensorboard:
        check_board()
    with session() as ranks:
        try:
            with ranks.together():
                if (config is None) == (resume is None):
                    raise InvalidInput("CONFIG", config, "give either a config file, or --resume and a run's folder")
                if resume is not None and (change or name is not None):
                    raise InvalidInput("--resume", resume, "a run goes on as it began: give no --set or --name")
                if force and resume is None:
                    raise InvalidInput("--force", force, "is for --resume")
                settings = None if config is None else Config.load(config, change or ())
            if resume is not None:
                launch = Launch.resume(resume, _saying(resume.name, ranks), ranks, force)
            else:
                assert config is not None and settings is not None
                launch = Launch.new(settings, name or layout.slug(config.stem), runs, ranks)
        except KeyboardInterrupt:
            raise Interrupted(signal.SIGINT, "interrupted before the first round") from None
        if ranks.is_first:
            _show(launch, tensorboard, quiet, as_json)
        else:
            launch.run()


def _saying(title: str, ranks: Ranks) -> Callable[[str], None]:
    def say(text: str) -> None:
        if ranks.is_first:
            print(printable(f"{title}: {text}"), file=sys.stderr)

    return say


def _show(launch: Launch, tensorboard: bool, quiet: bool, as_json: bool) -> None:
    title, before = printable(launch.name), len(launch.simulation.history)
    with contextlib.ExitStack() as open_now:
        display = open_now.enter_context(Display(title, launch.simulation.rounds, quiet, done=before))
        board = open_now.enter_context(Board(launch.folder.path, before)) if tensorboard else None

        def watch(record: RoundResult) -> None:
            display.show(record)
            if board is not None:
                board.add(record)

        done = launch.run(watch, display.say)
    summary = done.summary
    if as_json:
        print(json.dumps({**summary, "path": str(done.path)}))
        return
    metrics = "  ".join(f"{name} {value:.4f}" for name, value in summary["final"].items())
    print(f"{title}: {summary['rounds']} rounds in {summary['seconds']:.1f}s  {metrics}")
    if summary["diverged"] is not None:
        print(f"diverged at round {summary['diverged']}: from there on the test loss is not finite")
    print(f"sent and received per client: {_bytes(summary['bytes_per_client'])}")
    for line in _refusals(summary["refused"], summary["too_large"]):
        print(printable(line))
    print(f"written to {printable(done.path)}")


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


@app.command("demo")
def demo_command(
    out: Annotated[Path, typer.Option(help="Where the picture goes.")] = Path("demo.png"),
    seed: int = 0,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Compare four methods on handwritten digits, in about a minute."""
    plots.pyplot()
    plots.check_picture(out)
    rows = []
    lines = {}
    for title, settings in demo.configs(seed):
        result = _run(title, settings, quiet)
        rounds = [r.round for r in result.history]
        accuracy = [r.metrics["accuracy"] for r in result.history]
        lines[title] = (rounds, accuracy)
        rows.append(
            {
                "method": title,
                "final_accuracy": accuracy[-1],
                "rounds_to_target": rounds_to(demo.TARGET, rounds, accuracy),
                "bytes_per_client": result.communication.bytes_per_client,
            }
        )
    title = "Handwritten digits on a 4x5 tree, non-i.i.d. at both levels"
    plots.curves(out, lines, title=title, target=demo.TARGET)
    if as_json:
        print(json.dumps({"target": demo.TARGET, "methods": rows, "picture": str(out)}))
        return
    table = Table("method", title=title)
    table.add_column("final accuracy", justify="right")
    table.add_column(f"rounds to {demo.TARGET:g}", justify="right")
    table.add_column("per client", justify="right")
    for row in rows:
        reached = row["rounds_to_target"]
        table.add_row(
            str(row["method"]),
            f"{row['final_accuracy']:.3f}",
            f">{len(lines['MTGC'][0])}" if reached is None else str(reached),
            _bytes(float(str(row["bytes_per_client"]))),
        )
    Console().print(table)
    print(f"picture: {out}")


@app.command("methods")
def methods_command(
    plugin: Annotated[list[str] | None, typer.Option(help="A Python file that registers rules; repeatable.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the methods, what each is, and its parameters."""
    import_plugins(plugin or ())
    known = sorted(entries(), key=lambda entry: entry.name)
    if as_json:
        fields = ("name", "at", "summary", "parameters")
        print(json.dumps([{f: getattr(entry, f) for f in fields} for entry in known], default=_written))
        return
    table = Table("name", "edges", "what it is", "parameters")
    for entry in known:
        params = ", ".join(
            name if value is Parameter.empty else f"{name}={shown(value)}" for name, value in entry.parameters.items()
        )
        table.add_row(*map(escape, (entry.name, entry.at, entry.summary, params)))
    Console().print(table)


@app.command("bench")
def bench_command(
    model: Annotated[str, typer.Option(help="One of `stratafl models`.")] = "cnn",
    clients: int = 100,
    batch: int = 50,
    steps: Annotated[int, typer.Option(help="Steps between two meetings.")] = 20,
    engine: Annotated[
        list[str] | None,
        typer.Option(
            help='"stacked:bf16", "vmap:tf32", "plain loop", ...; repeatable; all that make sense here unless given.'
        ),
    ] = None,
    device: Annotated[str | None, typer.Option(help="A GPU if there is one, unless given.")] = None,
    as_json: AsJson = False,
) -> None:
    """Time the engines beside plain PyTorch: the whole training loop, on the same data, in one run."""
    import torch

    from stratafl.bench import bench
    from stratafl.checks import place

    for name, value in (("--clients", clients), ("--batch", batch), ("--steps", steps)):
        whole(name, value, at_least=1)
    where = place(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    table = bench(model, clients, batch, steps, engine, where)
    print(json.dumps(table.as_dict()) if as_json else table.text())
    if table.failed:
        raise typer.Exit(1)


@app.callback(invoke_without_command=True)
def _version(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        print(__version__)
        raise typer.Exit


def _run(title: str, settings: Config, quiet: bool) -> Result:
    simulation = experiment(settings)
    try:
        with Display(title, simulation.rounds, quiet) as display:
            for result in simulation:
                display.show(result)
    except KeyboardInterrupt:
        raise Interrupted(signal.SIGINT, "interrupted; nothing was written") from None
    return simulation.result()


def _written(default: object) -> str | None:
    """A default that JSON does not know: none, or any object of a user's rule."""
    return None if default is Parameter.empty else shown(default)


def _bytes(count: float) -> str:
    units = ["B", "kB", "MB", "GB", "TB"]
    while count >= 1000 and len(units) > 1:
        count, units = count / 1000, units[1:]
    return f"{count:.3g} {units[0]}"


def main() -> None:
    """Errors a user can mend are one line and exit code 2; an interrupt is 130, a SIGTERM 143."""
    try:
        app(standalone_mode=True)
    except (InvalidInput, MissingExtra) as problem:
        print(printable(f"error: {problem}"), file=sys.stderr)
        sys.exit(2)
    except OSError as problem:
        where = "a file" if problem.filename is None else shown(Path(str(problem.filename)))
        print(printable(f"error: {where}: {problem.strerror or first_line(problem)}"), file=sys.stderr)
        sys.exit(2)
    except Interrupted as stopped:
        print(printable(stopped.note), file=sys.stderr)
        sys.exit(stopped.exit_code)
