"""`stratafl demo`: four methods beside each other."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stratafl.base.signals import Interrupted
from stratafl.cli.options import AsJson, Quiet
from stratafl.cli.tables import Column, print_table

if TYPE_CHECKING:
    from stratafl.config.schema import Config
    from stratafl.simulation.result import Result


def demo_command(
    out: Annotated[Path, typer.Option(help="Where the picture goes.")] = Path("demo.png"),
    seed: int = 0,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Compare four methods on handwritten digits, in about a minute."""
    from stratafl.base import plotting
    from stratafl.cli.display import byte_count
    from stratafl.metrics.evaluation import rounds_to
    from stratafl.paper import demo

    plotting.pyplot()
    plotting.check_picture(out)
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
    plotting.curves(out, lines, title=title, target=demo.TARGET)
    if as_json:
        print(json.dumps({"target": demo.TARGET, "methods": rows, "picture": str(out)}))
        return
    numbers = ("final accuracy", f"rounds to {demo.TARGET:g}", "per client")
    cells = [
        (
            str(row["method"]),
            f"{row['final_accuracy']:.3f}",
            f">{len(lines['MTGC'][0])}" if row["rounds_to_target"] is None else str(row["rounds_to_target"]),
            byte_count(float(str(row["bytes_per_client"]))),
        )
        for row in rows
    ]
    print_table(["method", *(Column(each, right=True) for each in numbers)], cells, title)
    print(f"picture: {out}")


def _run(title: str, settings: Config, quiet: bool) -> Result:
    from stratafl.config.setup import experiment
    from stratafl.simulation.progress import ProgressBar

    simulation = experiment(settings)
    try:
        with ProgressBar(title, simulation.rounds, quiet) as display:
            simulation.met = display.on_sync
            for result in simulation:
                display.show(result)
    except KeyboardInterrupt:
        raise Interrupted(signal.SIGINT, "interrupted; nothing was written") from None
    return simulation.result()
