"""Time of the paper's runs on four networks: which (E, H) and which method reaches 75 % and 80 %
first? The cost of the stored runs of Table 1 and Figure 6 is computed; nothing is trained.

    python -m benchmarks.studies.paper_with_clock

writes docs/results/priced.md, priced.csv and priced.png from docs/results/runs.tar.gz.
"""

from __future__ import annotations

import csv
import io
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from papers.harness.series import Case, Options, identity
from papers.mtgc.paper import MTGC
from papers.mtgc.settings import DISTRIBUTIONS, METHODS
from stratafl import Experiment
from stratafl.base.plotting import PALETTE, line_styles, save, style
from stratafl.costs.costs import PriceableRun
from stratafl.costs.pricing import TIME, Unit
from stratafl.metrics.records import measured
from stratafl.network.specification import network
from stratafl.runs import StoredRun, list_runs
from stratafl.runs.reader import unpacked

RESULTS = Path(__file__).parents[2] / "docs" / "results"
NETWORKS = ("lan_wan", "mobile_edge", "nyc_mesh", "leo_relay")
TARGETS = (0.75, 0.8)


@dataclass(frozen=True)
class PricedRun:
    """Cost of one run until one target, on one network."""

    distribution: str
    periods: str
    method: str
    network: str
    target: float
    round: int | None
    """Round that reaches the target, or None."""
    seconds: float | None
    joules: float | None
    top_bytes: float | None
    """Bytes over the root's links."""

    @property
    def name(self) -> str:
        return f"{METHODS[self.method]}, {self.periods}"


def stored_cases(runs: Sequence[StoredRun]) -> list[tuple[Case, StoredRun]]:
    """Cases of Table 1, which include those of Figure 6, each with its stored run.

    Of several runs of a case it is the newest of those that reach the highest target.
    """
    by_identity: dict[str, list[StoredRun]] = defaultdict(list)
    for run in runs:
        by_identity[identity(Experiment.from_table(run.config))].append(run)
    cases = []
    for case in MTGC.find("table1").cases(Options()):
        stored = by_identity[identity(case.experiment)]
        if stored:
            cases.append((case, max(stored, key=lambda run: (first_round(run, TARGETS[-1]) is not None, run.id))))
    return cases


def first_round(run: StoredRun, target: float) -> int | None:
    """First round whose test accuracy reaches the target."""
    good = (record["round"] for record in run.rounds if measured(record).get("accuracy", 0.0) >= target)
    return next(good, None)


def priced(cases: Sequence[tuple[Case, StoredRun]]) -> list[PricedRun]:
    """Cost of all runs on all networks, until each target."""
    rows = []
    for case, run in cases:
        priceable = PriceableRun.of(run)
        distribution, periods = case.panel
        for name in NETWORKS:
            costs = priceable.cost_on(network(name))
            for target in TARGETS:
                end = first_round(run, target)
                total = None if end is None else costs.up_to_round(end)
                rows.append(
                    PricedRun(
                        distribution, periods, case.line, name, target, end,
                        *((None,) * 3 if total is None else (total.seconds, total.joules, total.bytes[0])),
                    )
                )  # fmt: skip
    return rows


# -- the page --------------------------------------------------------------------------------------


def page(rows: Sequence[PricedRun]) -> str:
    """Results as Markdown."""
    lines = ["# The paper's runs, with a clock", "", *INTRODUCTION, "", "![Time to 80 %](priced.png)", ""]
    lines += ["## Who is first", "", *_fastest(rows), "", *_findings(rows), ""]
    lines += ["## Everything, where groups and clients differ", ""]
    for name in NETWORKS:
        lines += [f"### {name}: {network(name).about}", "", *_table(rows, name), ""]
    lines += ["`priced.csv` has every number, for the other two distributions as well."]
    return "\n".join(lines) + "\n"


INTRODUCTION = """
Made by `python -m benchmarks.studies.paper_with_clock` from the stored runs of Table 1 and Figure 6 (CIFAR-10, the
paper's CNN, 100 clients in 10 groups, everybody takes part), which are in `runs.tar.gz`. Nothing
was trained for it: a synchronous run learns the same on every network, so its rounds can be put on
any clock. There is one seed per setting, so a difference of a few per cent means nothing. Of Table
1's sixty settings only those that are named below were run; methods are compared at the periods at
which all four were, (10, 20) and (30, 20). The networks are presets: `stratafl list networks NAME`
has their numbers, and their files the sources. On nyc_mesh a device's time for one meeting does not
depend on how many steps it makes, which favours a large H. "never" is: not in the rounds that the
run had, of which HFedAvg had 400 at (10, 20) and all methods 50 or 100 at (30, 20).
""".strip().splitlines()


def _best(rows: Sequence[PricedRun]) -> PricedRun | None:
    return min((row for row in rows if row.seconds is not None), key=lambda row: row.seconds or 0.0, default=None)


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "never"
    unit = Unit.of(TIME, [seconds])
    return f"{seconds / unit.factor:.3g} {unit.name}"


def _fastest(rows: Sequence[PricedRun]) -> list[str]:
    lines = [
        "| network | data | target | fastest of all | fastest without MTGC | MTGC saves |",
        "|---|---|---|---|---|---|",
    ]
    for name in NETWORKS:
        for distribution, title in DISTRIBUTIONS.items():
            for target in TARGETS:
                group = [
                    row for row in rows if (row.network, row.distribution, row.target) == (name, distribution, target)
                ]
                best, other = _best(group), _best([row for row in group if row.method != "mtgc"])
                mtgc = _best([row for row in group if row.method == "mtgc"])
                saves = ""
                if other is not None and mtgc is not None and mtgc.seconds and other.seconds:
                    saves = f"{100 * (1 - mtgc.seconds / other.seconds):.0f} %"
                cells = [f"{row.name}: {_time(row.seconds)}" if row else "none" for row in (best, other)]
                lines.append(f"| {name} | {title} | {100 * target:.0f} % | {cells[0]} | {cells[1]} | {saves} |")
    return lines


def _findings(rows: Sequence[PricedRun]) -> list[str]:
    """Comparisons at the same periods in which MTGC is not the fastest method."""
    lost, compared = [], 0
    for name in NETWORKS:
        for distribution in DISTRIBUTIONS:
            for target in TARGETS:
                for periods in dict.fromkeys(row.periods for row in rows):
                    place = name, distribution, target, periods
                    group = [row for row in rows if (row.network, row.distribution, row.target, row.periods) == place]
                    best = _best(group)
                    mtgc = _best([row for row in group if row.method == "mtgc"])
                    if best is None or mtgc is None or len(group) < 2:
                        continue
                    compared += 1
                    if best.method != "mtgc":
                        assert best.seconds and mtgc.seconds
                        lost.append(
                            f"- {name}, {DISTRIBUTIONS[distribution]}, {periods}, {100 * target:.0f} %: "
                            f"{METHODS[best.method]} in {_time(best.seconds)} (round {best.round}), "
                            f"MTGC in {_time(mtgc.seconds)} (round {mtgc.round}), "
                            f"{100 * (mtgc.seconds / best.seconds - 1):.0f} % later"
                        )
    heading = f"At the same periods MTGC is first in {compared - len(lost)} of {compared} comparisons."
    chosen = _chosen(rows)
    if not lost:
        return [heading, "", *chosen]
    return [f"{heading} It is **not** the best choice here:", "", *lost, "", *chosen]


def _chosen(rows: Sequence[PricedRun]) -> list[str]:
    """Periods of MTGC by time to 80 %, for each network."""
    lines = ["MTGC's own best periods change with the network (groups and clients both differ, 80 %):", ""]
    for name in NETWORKS:
        group = [
            row
            for row in rows
            if (row.network, row.distribution, row.target, row.method) == (name, "both", 0.8, "mtgc")
        ]
        order = sorted((row for row in group if row.seconds), key=lambda row: row.seconds or 0.0)
        lines.append(f"- {name}: " + ", ".join(f"{row.periods} {_time(row.seconds)}" for row in order))
    return lines


def _table(rows: Sequence[PricedRun], name: str) -> list[str]:
    lines = ["| E, H | method | rounds to 75 % | time | rounds to 80 % | time | bytes of the root's links |",
             "|---|---|---|---|---|---|---|"]  # fmt: skip
    group = [row for row in rows if row.network == name and row.distribution == "both"]
    for first in [row for row in group if row.target == TARGETS[0]]:
        last = next(
            row for row in group if (row.periods, row.method, row.target) == (first.periods, first.method, TARGETS[1])
        )
        sent = "" if last.top_bytes is None else f"{last.top_bytes / 1e9:.3g} GB"
        cells = [first.periods, METHODS[first.method], first.round or "never", _time(first.seconds)]
        lines.append("| " + " | ".join(map(str, [*cells, last.round or "never", _time(last.seconds), sent])) + " |")
    return lines


def table(rows: Sequence[PricedRun]) -> str:
    """Results as CSV."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(
        ["distribution", "periods", "method", "network", "target", "round", "seconds", "joules", "root_bytes"]
    )
    for row in rows:
        numbers = ["" if number is None else f"{number:.10g}" for number in (row.seconds, row.joules, row.top_bytes)]
        round = "" if row.round is None else row.round
        writer.writerow([row.distribution, row.periods, row.method, row.network, row.target, round, *numbers])
    return text.getvalue()


def picture(rows: Sequence[PricedRun], path: Path) -> None:
    """Plot time to 80 %, with one panel per network, for groups and clients that differ."""
    with style() as plt:
        figure, panels = plt.subplots(2, 2, figsize=(9.0, 6.4), layout="constrained")
        for axes, name in zip(panels.flat, NETWORKS, strict=True):
            group = [row for row in rows if (row.network, row.distribution, row.target) == (name, "both", 0.8)]
            group.sort(key=lambda row: (row.seconds is None, row.seconds or 0.0))
            unit = Unit.of(TIME, [row.seconds for row in group if row.seconds])
            longest = max((row.seconds or 0.0) / unit.factor for row in group)
            for place, row in enumerate(group):
                width = (row.seconds or 0.0) / unit.factor
                axes.barh(place, width, height=0.68, color=PALETTE[line_styles([row.method])[0].colour])
                text = "never" if row.seconds is None else f"{width:.3g}"
                axes.text(width + 0.01 * longest, place, text, va="center", fontsize=7)
            axes.set_yticks(range(len(group)), [row.name for row in group])
            axes.set(xlim=(0, 1.12 * longest), ylim=(len(group) - 0.4, -0.6), xlabel=f"{unit.name} to 80 %")
            axes.set_title(name, loc="left", fontsize=9)
        save(figure, path)


def results(archive: Path = RESULTS / "runs.tar.gz") -> list[PricedRun]:
    """Results of the committed runs."""
    with unpacked(archive) as folder:
        return priced(stored_cases(list_runs(folder)))


def main() -> None:
    """Write the page, the table and the figure."""
    rows = results()
    (RESULTS / "priced.md").write_text(page(rows))
    (RESULTS / "priced.csv").write_text(table(rows))
    picture(rows, RESULTS / "priced.png")
    print(RESULTS / "priced.md")


if __name__ == "__main__":
    main()
