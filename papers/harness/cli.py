"""Options of the command `stratafl reproduce`.

Its work is imported when it starts, so that `--help` imports nothing slow.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stratafl.cli.options import AsJson, Quiet, Workers

UNFINISHED = 3
"""Exit code when time ran out; the same command continues."""


def reproduce_command(
    what: Annotated[list[str] | None, typer.Argument(help="table1, fig3, ..., or all; see --list.")] = None,
    scale: Annotated[str, typer.Option(help="quick (minutes on a laptop, digits) or paper.")] = "paper",
    seeds: Annotated[int | None, typer.Option(help="3 as in the paper, 1 for quick, unless given.")] = None,
    methods: Annotated[str | None, typer.Option(help="Instead of the figure's own: mtgc,hfedavg,...")] = None,
    partition: Annotated[str, typer.Option(help="release_dirichlet or dirichlet.")] = "release_dirichlet",
    only: Annotated[
        list[str] | None, typer.Option(help="Train only cases with this in their name: both/E10H20; repeatable.")
    ] = None,
    rounds: Annotated[int | None, typer.Option(help="Instead of the recipe's limit.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    precision: Annotated[str | None, typer.Option(help="fp32 on a CPU, tf32 on a GPU, unless given.")] = None,
    workers: Workers = None,
    max_seconds: Annotated[float | None, typer.Option(help="Stop in time; the same command goes on.")] = None,
    report_only: Annotated[bool, typer.Option("--report-only", help="Train nothing; report what is there.")] = False,
    runs: Annotated[Path, typer.Option(help="Where runs are kept and looked for.")] = Path("runs/reproduce"),
    out: Annotated[Path, typer.Option(help="Where tables and figures go.")] = Path("reproduced"),
    listing: Annotated[bool, typer.Option("--list", help="Say what each needs and how long it takes here.")] = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Make the paper's tables and figures, and say which of its claims held."""
    from papers.harness import reproduce
    from papers.mtgc.paper import MTGC
    from stratafl.base.device import check_device

    options = reproduce.options_of(scale, partition, methods, rounds, device, precision)
    request = reproduce.Request.of(MTGC, reproduce.select_series(MTGC, what, listing), options, seeds, only or ())
    limits = reproduce.Limits.of(workers, max_seconds)
    if not report_only:
        check_device(device)
    if listing:
        reproduce.print_listing(request, as_json)
        return
    reproduce.check_folders(runs, out, report_only)
    training = reproduce.Training() if report_only else reproduce.train_missing(request, runs, out, limits, quiet)
    results = reproduce.write_reports(request, runs, out)
    reproduce.print_results(request, results, training, out, as_json)
    if training.failed:
        raise typer.Exit(1)
    if training.unfinished:
        raise typer.Exit(UNFINISHED)
