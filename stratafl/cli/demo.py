"""`stratafl demo`: four methods on handwritten digits, compared."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stratafl.base.signals import Interrupted
from stratafl.cli.options import AsJson, Quiet
from stratafl.cli.tables import Column, print_table

if TYPE_CHECKING:
    from stratafl.simulation.result import Result

TARGET = 0.9
METHODS = {
    "HFedAvg": "hfedavg",
    "local correction": "local_correction",
    "group correction": "group_correction",
    "MTGC": "mtgc",
}


def settings(method: str, seed: int = 0) -> dict[str, Any]:
    """Config of one method: digits on a 4x5 tree, where a group has 4 of 10 classes, a client 1."""
    return {
        "tree": {"shape": "4x5"},
        "data": {
            "source": "digits",
            "partition": [{"name": "classes", "k": 4}, {"name": "classes", "k": 1}],
        },
        "model": {"name": "mlp", "hidden": [32]},
        "method": {"name": method},
        "schedule": {"periods": [10, 5]},
        "client": {"lr": 0.1, "batch_size": 20},
        "rounds": 12,
        "seed": seed,
    }


def demo_command(
    out: Annotated[Path, typer.Option("--out", "-o", help="Where the picture goes.")] = Path("demo.png"),
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Compare four methods on handwritten digits, in about a minute."""
    from stratafl.base import plotting
    from stratafl.base.units import byte_count
    from stratafl.metrics.evaluation import rounds_to

    plotting.pyplot()
    plotting.check_picture(out)
    rows = []
    lines = {}
    for title, method in METHODS.items():
        result = _run(title, settings(method, seed), quiet)
        rounds = [r.round for r in result.history]
        accuracy = [r.metrics["accuracy"] for r in result.history]
        lines[title] = (rounds, accuracy)
        rows.append(
            {
                "method": title,
                "final_accuracy": accuracy[-1],
                "rounds_to_target": rounds_to(TARGET, rounds, accuracy),
                "bytes_per_client": result.communication.bytes_per_client,
            }
        )
    title = "Handwritten digits on a 4x5 tree, non-i.i.d. at both levels"
    _draw(out, lines, title)
    if as_json:
        print(json.dumps({"target": TARGET, "methods": rows, "picture": str(out)}))
        return
    numbers = ("final accuracy", f"rounds to {TARGET:g}", "per client")
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


def _draw(path: Path, lines: Mapping[str, tuple[Sequence[float], Sequence[float]]], title: str) -> None:
    """Draw the test accuracy of each method over the rounds, with a legend in the order in which
    the lines end."""
    from stratafl.base.plotting import QUIET, line_styles, save, style

    with style() as plt:
        figure, axes = plt.subplots(figsize=(7.2, 4.2), layout="constrained")
        for (name, (rounds, values)), line in zip(lines.items(), line_styles(list(METHODS.values())), strict=True):
            axes.plot(rounds, values, label=name, linewidth=2, **line.options)
        axes.axhline(TARGET, color=QUIET, linewidth=0.8, linestyle=":")
        axes.annotate(
            f"{TARGET:g}", (1, TARGET), xycoords=("axes fraction", "data"), xytext=(4, -3),
            textcoords="offset points", color=QUIET, annotation_clip=False,
        )  # fmt: skip
        axes.set(xlabel="global rounds", ylabel="test accuracy")
        axes.set_title(title, loc="left", fontsize=11)
        axes.grid(True)
        ordered = sorted(zip(*axes.get_legend_handles_labels(), strict=True), key=lambda entry: -lines[entry[1]][1][-1])
        axes.legend(*zip(*ordered, strict=True), loc="lower right", handlelength=3.6)
        save(figure, path)


def _run(title: str, values: dict[str, Any], quiet: bool) -> Result:
    from stratafl.experiment.experiment import Experiment
    from stratafl.simulation.progress import ProgressBar

    simulation = Experiment.from_table(values).start()
    try:
        with ProgressBar(title, simulation.rounds, quiet) as display:
            simulation.on_sync = display.on_sync
            for result in simulation:
                display.show(result)
    except KeyboardInterrupt:
        raise Interrupted(signal.SIGINT, "interrupted; nothing was written") from None
    return simulation.result()
