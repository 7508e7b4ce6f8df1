"""The paper's own question with a clock: which (E, H) and which method gets to 75 % and 80 % first,
on four networks? Stored runs of Table 1 and Figure 6, priced; nothing is trained.

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
from stratafl.base.plotting import STYLE, pyplot, save
from stratafl.config.schema import Config
from stratafl.cost.costs import PriceableRun
from stratafl.cost.pricing import TIME, Unit
from stratafl.metrics.records import measured
from stratafl.network.specification import network
from stratafl.runs import StoredRun, list_runs
from stratafl.runs.reader import unpacked

RESULTS = Path(__file__).parents[2] / "docs" / "results"
NETWORKS = ("lan_wan", "mobile_edge", "nyc_mesh", "leo_relay")
TARGETS = (0.75, 0.8)
COLOURS = {"mtgc": "#0072b2", "group_correction": "#d55e00", "local_correction": "#009e73", "hfedavg": "#8a919a"}


@dataclass(frozen=True)
class PricedRun:
    """One run until one target on one network."""

    distribution: str
    periods: str
    method: str
    network: str
    target: float
    round: int | None
    """None where it never got there."""
    seconds: float | None
    joules: float | None
    top_bytes: float | None
    """Over the root's links."""

    @property
    def name(self) -> str:
        return f"{METHODS[self.method]}, {self.periods}"


def stored_cases(runs: Sequence[StoredRun]) -> list[tuple[Case, StoredRun]]:
    """Table 1's cases that there is a run of, each with the newest of those that got furthest;
    Figure 6's are among them."""
    by_identity: dict[str, list[StoredRun]] = defaultdict(list)
    for run in runs:
        by_identity[identity(Config.of(run.config))].append(run)
    found = []
    for case in MTGC.find("table1").cases(Options()):
        there = by_identity[identity(case.config)]
        if there:
            found.append((case, max(there, key=lambda run: (first_round(run, TARGETS[-1]) is not None, run.id))))
    return found


def first_round(run: StoredRun, target: float) -> int | None:
    """The first whose test accuracy is as good as that."""
    good = (record["round"] for record in run.rounds if measured(record).get("accuracy", 0.0) >= target)
    return next(good, None)


def priced(cases: Sequence[tuple[Case, StoredRun]]) -> list[PricedRun]:
    """All of them on all networks."""
    found = []
    for case, run in cases:
        ready = PriceableRun.of(run)
        distribution, periods = case.panel
        for name in NETWORKS:
            costs = ready.cost_on(network(name))
            for target in TARGETS:
                end = first_round(run, target)
                total = None if end is None else costs.up_to_round(end)
                found.append(
                    PricedRun(
                        distribution, periods, case.line, name, target, end,
                        *((None,) * 3 if total is None else (total.seconds, total.joules, total.bytes[0])),
                    )
                )  # fmt: skip
    return found


# -- the page --------------------------------------------------------------------------------------


def page(found: Sequence[PricedRun]) -> str:
    """The result as Markdown."""
    lines = ["# The paper's runs, with a clock", "", *INTRODUCTION, "", "![Time to 80 %](priced.png)", ""]
    lines += ["## Who is first", "", *_fastest(found), "", *_findings(found), ""]
    lines += ["## Everything, where groups and clients differ", ""]
    for name in NETWORKS:
        lines += [f"### {name}: {network(name).about}", "", *_table(found, name), ""]
    lines += ["`priced.csv` has every number, for the other two distributions as well."]
    return "\n".join(lines) + "\n"


INTRODUCTION = """
Made by `python -m benchmarks.studies.paper_with_clock` from the stored runs of Table 1 and Figure 6 (CIFAR-10, the
paper's CNN, 100 clients in 10 groups, everybody takes part), which are in `runs.tar.gz`. Nothing
was trained for it: a synchronous run learns the same on every network, so its rounds can be put on
any clock. There is one seed per setting, so a difference of a few per cent means nothing. Of Table
1's sixty settings only those that are named below were run; methods are compared at the periods at
which all four were, (10, 20) and (30, 20). The networks are presets: `stratafl networks show NAME`
has their numbers, and their files the sources. On nyc_mesh a device's time for one meeting does not
depend on how many steps it makes, which favours a large H. "never" is: not in the rounds that the
run had, of which HFedAvg had 400 at (10, 20) and all methods 50 or 100 at (30, 20).
""".strip().splitlines()


def _best(found: Sequence[PricedRun]) -> PricedRun | None:
    return min((each for each in found if each.seconds is not None), key=lambda each: each.seconds or 0.0, default=None)


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "never"
    unit = Unit.of(TIME, [seconds])
    return f"{seconds / unit.factor:.3g} {unit.name}"


def _fastest(found: Sequence[PricedRun]) -> list[str]:
    lines = [
        "| network | data | target | fastest of all | fastest without MTGC | MTGC saves |",
        "|---|---|---|---|---|---|",
    ]
    for name in NETWORKS:
        for distribution, title in DISTRIBUTIONS.items():
            for target in TARGETS:
                here = [e for e in found if (e.network, e.distribution, e.target) == (name, distribution, target)]
                best, other = _best(here), _best([each for each in here if each.method != "mtgc"])
                mtgc = _best([each for each in here if each.method == "mtgc"])
                saves = ""
                if other is not None and mtgc is not None and mtgc.seconds and other.seconds:
                    saves = f"{100 * (1 - mtgc.seconds / other.seconds):.0f} %"
                cells = [f"{each.name}: {_time(each.seconds)}" if each else "none" for each in (best, other)]
                lines.append(f"| {name} | {title} | {100 * target:.0f} % | {cells[0]} | {cells[1]} | {saves} |")
    return lines


def _findings(found: Sequence[PricedRun]) -> list[str]:
    """Where MTGC is not the best choice at the same periods, said by the numbers."""
    lost, compared = [], 0
    for name in NETWORKS:
        for distribution in DISTRIBUTIONS:
            for target in TARGETS:
                for periods in dict.fromkeys(each.periods for each in found):
                    place = name, distribution, target, periods
                    here = [e for e in found if (e.network, e.distribution, e.target, e.periods) == place]
                    best = _best(here)
                    mtgc = _best([each for each in here if each.method == "mtgc"])
                    if best is None or mtgc is None or len(here) < 2:
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
    chosen = _chosen(found)
    if not lost:
        return [heading, "", *chosen]
    return [f"{heading} It is **not** the best choice here:", "", *lost, "", *chosen]


def _chosen(found: Sequence[PricedRun]) -> list[str]:
    """How MTGC's best periods change with the network."""
    lines = ["MTGC's own best periods change with the network (groups and clients both differ, 80 %):", ""]
    for name in NETWORKS:
        here = [e for e in found if (e.network, e.distribution, e.target, e.method) == (name, "both", 0.8, "mtgc")]
        order = sorted((each for each in here if each.seconds), key=lambda each: each.seconds or 0.0)
        lines.append(f"- {name}: " + ", ".join(f"{each.periods} {_time(each.seconds)}" for each in order))
    return lines


def _table(found: Sequence[PricedRun], name: str) -> list[str]:
    lines = ["| E, H | method | rounds to 75 % | time | rounds to 80 % | time | bytes of the root's links |",
             "|---|---|---|---|---|---|---|"]  # fmt: skip
    here = [each for each in found if each.network == name and each.distribution == "both"]
    for first in [each for each in here if each.target == TARGETS[0]]:
        last = next(e for e in here if (e.periods, e.method, e.target) == (first.periods, first.method, TARGETS[1]))
        sent = "" if last.top_bytes is None else f"{last.top_bytes / 1e9:.3g} GB"
        cells = [first.periods, METHODS[first.method], first.round or "never", _time(first.seconds)]
        lines.append("| " + " | ".join(map(str, [*cells, last.round or "never", _time(last.seconds), sent])) + " |")
    return lines


def table(found: Sequence[PricedRun]) -> str:
    """Everything as CSV."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(
        ["distribution", "periods", "method", "network", "target", "round", "seconds", "joules", "root_bytes"]
    )
    for each in found:
        numbers = ["" if e is None else f"{e:.10g}" for e in (each.seconds, each.joules, each.top_bytes)]
        round = "" if each.round is None else each.round
        writer.writerow([each.distribution, each.periods, each.method, each.network, each.target, round, *numbers])
    return text.getvalue()


def picture(found: Sequence[PricedRun], path: Path) -> None:
    """A panel per network: time to 80 % where groups and clients differ, the fastest on top."""
    plt = pyplot()
    with plt.rc_context(STYLE):
        figure, panels = plt.subplots(2, 2, figsize=(9.0, 6.4), layout="constrained")
        for axes, name in zip(panels.flat, NETWORKS, strict=True):
            here = [e for e in found if (e.network, e.distribution, e.target) == (name, "both", 0.8)]
            here.sort(key=lambda each: (each.seconds is None, each.seconds or 0.0))
            unit = Unit.of(TIME, [each.seconds for each in here if each.seconds])
            longest = max((each.seconds or 0.0) / unit.factor for each in here)
            for place, each in enumerate(here):
                width = (each.seconds or 0.0) / unit.factor
                axes.barh(place, width, height=0.68, color=COLOURS[each.method])
                text = "never" if each.seconds is None else f"{width:.3g}"
                axes.text(width + 0.01 * longest, place, text, va="center", fontsize=7)
            axes.set_yticks(range(len(here)), [each.name for each in here])
            axes.set(xlim=(0, 1.12 * longest), ylim=(len(here) - 0.4, -0.6), xlabel=f"{unit.name} to 80 %")
            axes.set_title(name, loc="left", fontsize=9)
            axes.spines[["top", "right"]].set_visible(False)
        save(figure, path)


def results(archive: Path = RESULTS / "runs.tar.gz") -> list[PricedRun]:
    """What the committed records give."""
    with unpacked(archive) as folder:
        return priced(stored_cases(list_runs(folder)))


def main() -> None:
    """Write the page, the table and the picture."""
    found = results()
    (RESULTS / "priced.md").write_text(page(found))
    (RESULTS / "priced.csv").write_text(table(found))
    picture(found, RESULTS / "priced.png")
    print(RESULTS / "priced.md")


if __name__ == "__main__":
    main()
