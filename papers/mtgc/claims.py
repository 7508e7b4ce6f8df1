"""Claims of Section 5 and Appendices B to E, and how each is judged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from papers.harness.claims import Claim, Finding, percent
from papers.harness.results import MeasuredLine, Results, Value, is_below, ratio
from papers.harness.series import Panel
from papers.mtgc.experiments import EH
from papers.mtgc.published import communication_ratio
from papers.mtgc.settings import AS_RELEASED, DISTRIBUTIONS, METHODS, eh_name, label

WHERE = "Section 5.2, Table 1"


def _settings(results: Results) -> list[str]:
    return [eh_name(e, h) for e, h in EH[results.options.scale]]


def _chains(results: Results) -> list[list[str]]:
    """Settings with growing H, and those with growing E; both begin with the base setting."""
    base, h2, h3, e2, e3 = _settings(results)
    return [[base, h2, h3], [base, e2, e3]]


def speedup(results: Results, distribution: str, eh: str, line: str = "mtgc") -> Value | None:
    """Speed-up of a line over HFedAvg in rounds to the target."""
    panel = (distribution, eh)
    return ratio(results.reach(panel, "hfedavg"), results.reach(panel, line))


def _text(value: Value | None, unit: str = "") -> str:
    return "?" if value is None else value.text(unit=unit)


def _fewest(results: Results) -> list[Finding]:
    findings = []
    for panel in results.panels:
        mtgc = results.reach(panel, "mtgc")
        others = {line: results.reach(panel, line) for line in results.lines(panel) if line != "mtgc"}
        answers = [is_below(mtgc, other) for other in others.values()]
        holds = False if False in answers else None if None in answers or not answers else True
        numbers = ", ".join([_text(mtgc), *(f"{METHODS[line]} {_text(value)}" for line, value in others.items())])
        findings.append(Finding(label(panel), holds, numbers))
    return findings


def _monotone(labels: str, values: Sequence[Value | None], rising: bool) -> Finding:
    """Whether values are monotone: no pair has the wrong order for certain, and one the right."""
    measured = [value for value in values if value is not None]
    if len(measured) < 2:
        return Finding(labels, None, "")
    pairs = [(a, b) if rising else (b, a) for i, a in enumerate(measured) for b in measured[i + 1 :]]
    right, wrong = (any(is_below(*pair[::way]) for pair in pairs) for way in (1, -1))
    level = all(is_below(*pair) is False for pair in pairs)
    holds = False if wrong or level else True if right else None
    return Finding(labels, holds, ", ".join(_text(value) for value in measured))


def _falls(results: Results) -> list[Finding]:
    return [
        _monotone(f"{d} {chain[0]} to {chain[-1]}", [results.reach((d, eh), "mtgc") for eh in chain], rising=False)
        for d in DISTRIBUTIONS
        for chain in _chains(results)
    ]


def _speedup_grows(results: Results) -> list[Finding]:
    return [
        _monotone(f"{d} {chain[0]} to {chain[-1]}", [speedup(results, d, eh) for eh in chain], rising=True)
        for d in DISTRIBUTIONS
        for chain in _chains(results)
    ]


def _hfedavg_suffers(results: Results) -> list[Finding]:
    findings = []
    for eh in _settings(results):
        client, group, both = (results.reach((d, eh), "hfedavg") for d in ("client", "group", "both"))
        answers = [is_below(client, both), is_below(group, both)]
        holds = False if False in answers else None if None in answers else True
        findings.append(Finding(eh, holds, f"{_text(client)} and {_text(group)}, both levels {_text(both)}"))
    return findings


def _mtgc_is_stable(results: Results) -> list[Finding]:
    """Whether MTGC's rounds grow by a smaller factor from one non-i.i.d. level to both."""
    findings = []
    for eh in _settings(results):
        growth = {line: _growth(results, eh, line) for line in ("mtgc", "hfedavg")}
        numbers = f"MTGC {_text(growth['mtgc'], '×')}, HFedAvg {_text(growth['hfedavg'], '×')}"
        findings.append(Finding(eh, is_below(growth["mtgc"], growth["hfedavg"]), numbers))
    return findings


def _growth(results: Results, eh: str, line: str) -> Value | None:
    easier = [value for d in ("client", "group") if (value := results.reach((d, eh), line)) is not None]
    if len(easier) < 2:
        return None
    return ratio(results.reach(("both", eh), line), min(easier, key=lambda value: value.mean))


def _speedup_is_largest(results: Results) -> list[Finding]:
    findings = []
    for eh in _settings(results):
        client, group, both = (speedup(results, d, eh) for d in ("client", "group", "both"))
        answers = [is_below(client, both), is_below(group, both)]
        holds = False if False in answers else None if None in answers else True
        numbers = f"{_text(client, '×')} and {_text(group, '×')}, both levels {_text(both, '×')}"
        findings.append(Finding(eh, holds, numbers))
    return findings


SMALL_OVERHEAD = 1.25
"""Time of MTGC's rounds over HFedAvg's that still counts as "relatively small"."""


def best(line: str, others: Sequence[str] = ()) -> Callable[[Results], list[Finding]]:
    """Claim that a line ends with the highest accuracy of all, or of `others`, in every panel.

    One higher line refutes it, even if other lines were not measured.
    """

    def findings(results: Results) -> list[Finding]:
        verdicts = []
        for panel in results.panels:
            rivals = [other for other in results.lines(panel) if other != line and (not others or other in others)]
            own = results.accuracy(panel, line)
            scores = {other: score for other in rivals if (score := results.accuracy(panel, other)) is not None}
            rival = max(scores, key=lambda other: scores[other].mean, default=None)
            if own is None or rival is None or (len(scores) < len(rivals) and own.mean > scores[rival].mean):
                verdicts.append(Finding(label(panel), None, ""))
                continue
            numbers = f"{percent(own)}, {METHODS.get(rival, rival)} {percent(scores[rival])}"
            verdicts.append(Finding(label(panel), own.mean > scores[rival].mean, numbers))
        return verdicts

    return findings


def ends_above(panel: Panel, high: str, low: str, results: Results) -> Finding:
    """Whether one line of a panel ends above another."""
    a, b = results.accuracy(panel, high), results.accuracy(panel, low)
    if a is None or b is None:
        return Finding(label(panel), None, "")
    return Finding(label(panel), a.mean > b.mean, f"{METHODS[high]} {percent(a)}, {METHODS[low]} {percent(b)}")


def extra_models(mtgc: MeasuredLine, plain: MeasuredLine, e: int) -> float:
    """Additional models that a client exchanges in a round; HFedAvg's are e up and e down."""
    last, base = mtgc.curves[0].last_sent, plain.curves[0].last_sent
    return (last - base) / (base / (2 * e))


def _with(results: Results, part: str) -> list[Panel]:
    return [panel for panel in results.panels if part in panel]


def _data(results: Results) -> list[str]:
    return list(dict.fromkeys(panel[0] for panel in results.panels))


def _gap(
    results: Results, panel: Panel, line: str, others: Sequence[str], beside: Sequence[Panel] = ()
) -> float | None:
    """Lead of a line over the best of the others, at the last round all compared panels have."""
    own, *rivals = (results.accuracy(panel, value, beside) for value in (line, *others))
    if own is None or not rivals or None in rivals:
        return None
    return own.mean - max(value.mean for value in rivals if value is not None)


def _points(value: float | None) -> str:
    return "?" if value is None else f"{100 * value:+.1f} points"


def _at(results: Results, panels: Sequence[Panel]) -> str:
    """Name the round of a comparison, if the panels have different last rounds."""
    return f" at round {results.until(*panels)}" if len({results.until(panel) for panel in panels}) > 1 else ""


def _largest_for_cifar100(results: Results) -> list[Finding]:
    others = [line for line in METHODS if line != "mtgc"]
    gaps = {
        panel: _gap(results, panel, "mtgc", [line for line in others if line in results.lines(panel)], results.panels)
        for panel in results.panels
    }
    measured = {panel: gap for panel, gap in gaps.items() if gap is not None}
    hard = [panel for panel in measured if panel[0] == "cifar100"]
    if not hard or len(measured) < 2:
        return [Finding("CIFAR-100", None, "")]
    numbers = ", ".join(f"{label(panel)} {_points(gap)}" for panel, gap in measured.items()) + _at(
        results, results.panels
    )
    return [Finding("CIFAR-100", measured[hard[0]] == max(measured.values()), numbers)]


def _lowest(line: str, among: Sequence[str]) -> Callable[[Results], list[Finding]]:
    """Claim that a line ends below all others of `among`."""

    def findings(results: Results) -> list[Finding]:
        verdicts = []
        for panel in results.panels:
            scores = {other: results.accuracy(panel, other) for other in results.lines(panel) if other in among}
            if None in scores.values() or line not in scores or len(scores) < 2:
                verdicts.append(Finding(label(panel), None, ""))
                continue
            means = {other: score.mean for other, score in scores.items() if score is not None}
            rival = min((other for other in means if other != line), key=lambda other: means[other])
            numbers = f"{METHODS[line]} {percent(scores[line])}, lowest other {METHODS[rival]} {percent(scores[rival])}"
            verdicts.append(Finding(label(panel), means[line] < means[rival], numbers))
        return verdicts

    return findings


def _restless(high: str, among: Sequence[str]) -> Callable[[Results], list[Finding]]:
    """Claim that a line changes most from round to round.

    Judged for finished runs only: unfinished ones change because they still improve.
    """

    def findings(results: Results) -> list[Finding]:
        verdicts = []
        for panel in results.panels:
            until = results.until(panel)
            jumps = {
                other: m.round_to_round_change(until)
                for other in results.lines(panel)
                if (m := results.get(panel, other))
            }
            jump_of = {other: jump for other, jump in jumps.items() if jump is not None}
            others = [other for other in results.lines(panel) if other in among and other != high]
            is_finished = until == results.limit(panel)
            if not is_finished or high not in jump_of or not others or any(other not in jump_of for other in others):
                verdicts.append(Finding(label(panel), None, ""))
                continue
            rival = max(others, key=lambda other: jump_of[other])
            numbers = (
                f"{METHODS[high]} {100 * jump_of[high]:.2f}, {METHODS[rival]} {100 * jump_of[rival]:.2f} points a round"
            )
            verdicts.append(Finding(label(panel), jump_of[high] > jump_of[rival], numbers))
        return verdicts

    return findings


def _falls_with_heterogeneity(results: Results) -> list[Finding]:
    findings = []
    for data in _data(results):
        panels = [(data, distribution) for distribution in ("both", "client", "group")]
        both, *others = (results.accuracy(panel, "hfedavg", panels) for panel in panels)
        if both is None or None in others:
            findings.append(Finding(label((data,)), None, ""))
            continue
        numbers = f"{percent(others[0])} and {percent(others[1])}, both levels {percent(both)}{_at(results, panels)}"
        findings.append(
            Finding(
                label((data,)),
                all(distribution is not None and both.mean < distribution.mean for distribution in others),
                numbers,
            )
        )
    return findings


def _one_correction_helps(results: Results) -> list[Finding]:
    findings = []
    for panel in results.panels:
        local, group = (
            ends_above(panel, line, "hfedavg", results) for line in ("local_correction", "group_correction")
        )
        if local.holds is None or group.holds is None:
            findings.append(Finding(label(panel), None, ""))
        else:
            better = local if local.holds else group
            findings.append(better)
    return findings


def _gain_is_largest(results: Results) -> list[Finding]:
    findings = []
    for data in _data(results):
        panels = [(data, distribution) for distribution in ("client", "group", "both")]
        gains = {panel[1]: _gap(results, panel, "mtgc", ["hfedavg"], panels) for panel in panels}
        measured = [gain for gain in gains.values() if gain is not None]
        holds = None if len(measured) < 3 else gains["both"] == max(measured)
        numbers = ", ".join(f"{distribution} {_points(gain)}" for distribution, gain in gains.items()) + _at(
            results, panels
        )
        findings.append(Finding(label((data,)), holds, numbers))
    return findings


def _clients_matter_more(results: Results) -> list[Finding]:
    """Whether the lead of local over group correction grows with the clients of a group."""
    panels = sorted(results.panels, key=lambda panel: int(panel[0].partition("x")[2]))
    leads = [_gap(results, panel, "local_correction", ["group_correction"], panels) for panel in panels]
    return [
        Finding(f"from {label(few)} to {label(many)}", None if a is None or b is None else b > a,
                f"local over group correction {_points(a)}, {_points(b)}{_at(results, panels)}")
        for (few, a), (many, b) in pairwise(zip(panels, leads, strict=True))
    ]  # fmt: skip


def _groups_matter_more(results: Results) -> list[Finding]:
    many = max(results.panels, key=lambda panel: int(panel[0].partition("x")[0]), default=None)
    return [] if many is None else [ends_above(many, "group_correction", "local_correction", results)]


def _faster_with(what: str) -> Callable[[Results], list[Finding]]:
    def findings(results: Results) -> list[Finding]:
        lines = [line for line in results.lines((what,)) if results.method((what,), line) == "mtgc"]
        rounds = [(line, results.reach((what,), line)) for line in lines]
        measured = [(line, value) for line, value in rounds if value is not None]
        if len(measured) < max(len(lines), 2):
            return [Finding(f"rounds to {results.target:.0%}", None, "")]
        numbers = ", ".join(f"{line} {value.text()}" for line, value in measured)
        return [Finding(f"rounds to {results.target:.0%}", is_below(measured[-1][1], measured[0][1]), numbers)]

    return findings


def _sends(results: Results) -> list[Finding]:
    """Whether MTGC exchanges one model more per round than HFedAvg's E up and E down."""
    findings = []
    for panel in results.panels:
        mtgc, plain = results.get(panel, "mtgc"), results.get(panel, "hfedavg")
        if mtgc is None or plain is None:
            findings.append(Finding(label(panel), None, ""))
            continue
        e = mtgc.case.experiment.schedule.periods[0]
        more = extra_models(mtgc, plain, e)
        expected = f"(E+1)/E = {communication_ratio(e):.3f}"
        numbers = f"{more:.2f} models more a round; with one more, its downloads are {expected} times HFedAvg's"
        findings.append(Finding(label(panel), abs(more - 1) < 0.01, numbers))
    return findings


def _better_for_the_same_bytes(results: Results) -> list[Finding]:
    findings = []
    for panel in results.panels:
        lines = {line: results.get(panel, line) for line in results.lines(panel)}
        if any(m is None for m in lines.values()) or "mtgc" not in lines or len(lines) < 2:
            findings.append(Finding(label(panel), None, ""))
            continue
        measured = {line: m for line, m in lines.items() if m is not None}
        most = min(curve.sent[-1] for m in measured.values() for curve in m.curves)
        for share in (0.25, 0.5, 1.0):
            scores = {line: m.at_cost(share * most) or 0.0 for line, m in measured.items()}
            rival = max((line for line in scores if line != "mtgc"), key=lambda line: scores[line])
            numbers = f"{100 * scores['mtgc']:.1f} %, {METHODS[rival]} {100 * scores[rival]:.1f} %"
            spent = share * most / 1e6
            findings.append(
                Finding(f"at {spent:,.{0 if spent > 10 else 2}f} MB", scores["mtgc"] > scores[rival], numbers)
            )
    return findings


def _first_in_time(results: Results) -> list[Finding]:
    findings = []
    for panel in results.panels:
        goal = results.target or 1.0
        lines = results.lines(panel)
        times_to = {line: m.seconds_to(goal) if (m := results.get(panel, line)) else None for line in lines}
        mtgc = times_to.get("mtgc")
        for line in lines:
            if line != "mtgc":
                other = times_to[line]
                numbers = " and ".join("?" if v is None else v.text(unit=" s") for v in (mtgc, other))
                findings.append(Finding(f"against {METHODS[line]}", is_below(mtgc, other), numbers))
    return findings


def _little_overhead(results: Results) -> list[Finding]:
    findings = []
    for panel in results.panels:
        lines = [results.get(panel, line) for line in ("mtgc", "hfedavg")]
        a, b = (None if m is None else Value.of([c.seconds[-1] / c.rounds[-1] for c in m.curves]) for m in lines)
        overhead = ratio(a, b)
        holds = None if overhead is None else overhead.mean <= SMALL_OVERHEAD
        numbers = "" if overhead is None else f"a round takes {overhead.mean:.2f} times HFedAvg's"
        findings.append(Finding(label(panel), holds, numbers))
    return findings


def _in_panels(part: str, high: str, low: str) -> Callable[[Results], list[Finding]]:
    return lambda results: [ends_above(panel, high, low, results) for panel in _with(results, part)]


S, B, C, D, E = "Section 5.2", "Appendix B", "Appendix C", "Appendix D", "Appendix E"
CLAIMS: tuple[Claim, ...] = (
    Claim("fig3_best", "fig3", f"{S}, Fig. 3", "MTGC has the highest test accuracy of HFedAvg, FedProx, SCAFFOLD, "
          "FedDyn and MTGC on all four data sets", best("mtgc"),
          small="MTGC has the highest test accuracy of HFedAvg, FedProx, SCAFFOLD, FedDyn and MTGC"),
    Claim("fig3_cifar100", "fig3", f"{S}, Fig. 3", "its lead is largest on CIFAR-100", _largest_for_cifar100),
    Claim("fig3_feddyn", "fig3", f"{S}, Fig. 3", "FedDyn has the lowest accuracy",
          _lowest("feddyn_released", AS_RELEASED)),
    Claim("fig3_unstable", "fig3", f"{S}, Fig. 3", "FedDyn varies most from round to round",
          _restless("feddyn_released", AS_RELEASED)),
    Claim("fig4_heterogeneity", "fig4", f"{S}, Fig. 4", "HFedAvg's accuracy falls when both levels are non-i.i.d.",
          _falls_with_heterogeneity),
    Claim("fig4_one_helps", "fig4", f"{S}, Fig. 4", "local or group correction raises HFedAvg's accuracy",
          _one_correction_helps),
    Claim("fig4_client", "fig4", f"{S}, Fig. 4", "where only clients differ, local correction is better than group "
          "correction", _in_panels("client", "local_correction", "group_correction")),
    Claim("fig4_group", "fig4", f"{S}, Fig. 4", "where only groups differ, group correction is better than local "
          "correction", _in_panels("group", "group_correction", "local_correction")),
    Claim("fig4_best", "fig4", f"{S}, Fig. 4", "MTGC is best in all twelve settings", best("mtgc"),
          small="MTGC is best in all three settings"),
    Claim("fig4_gain", "fig4", f"{S}, Fig. 4", "its gain over HFedAvg is largest where both levels differ",
          _gain_is_largest),
    Claim("table1_fewest", "table1", WHERE, "MTGC needs the fewest global rounds to TARGET in every setting", _fewest),
    Claim("table1_falls", "table1", WHERE, "MTGC needs fewer rounds as E or H grows", _falls),
    Claim("table1_speedup", "table1", WHERE, "MTGC's speed-up over HFedAvg grows with E and H", _speedup_grows),
    Claim("table1_hfedavg", "table1", WHERE, "HFedAvg needs more rounds where both levels are non-i.i.d.",
          _hfedavg_suffers),
    Claim("table1_stable", "table1", WHERE, "MTGC's rounds grow less than HFedAvg's from one non-i.i.d. level to both",
          _mtgc_is_stable),
    Claim("table1_gain", "table1", WHERE, "MTGC's speed-up is largest where both levels are non-i.i.d.",
          _speedup_is_largest),
    Claim("fig5_clients", "fig5", f"{B}, Fig. 5", "with more clients in a group, local correction matters more",
          _clients_matter_more),
    Claim("fig5_groups", "fig5", f"{B}, Fig. 5", "with many groups, group correction is better than local correction",
          _groups_matter_more),
    Claim("fig6_h", "fig6", f"{B}, Fig. 6", "more local steps H speed MTGC up", _faster_with("H")),
    Claim("fig6_e", "fig6", f"{B}, Fig. 6", "more group rounds E speed MTGC up", _faster_with("E")),
    Claim("fig7a_bytes", "fig7a", f"{B}, Fig. 7a", "MTGC sends one model more in a global round: (E+1)/E times "
          "HFedAvg", _sends),
    Claim("fig7a_best", "fig7a", f"{B}, Fig. 7a", "for the same communication, MTGC has the highest accuracy",
          _better_for_the_same_bytes),
    Claim("fig7b_first", "fig7b", f"{B}, Fig. 7b", "MTGC reaches TARGET in the least time", _first_in_time),
    Claim("fig7b_overhead", "fig7b", f"{B}, Fig. 7b", "what the corrections cost per round is small (here: a quarter "
          "at most)", _little_overhead),
    Claim("label_best", "label_shift", f"{C}, Fig. 8a", "under label shift MTGC has the highest accuracy",
          best("mtgc")),
    Claim("label_calm", "label_shift", f"{C}, Fig. 8a", "and oscillates less than HFedAvg",
          _restless("hfedavg", ("hfedavg", "mtgc"))),
    Claim("feature_best", "feature_shift", f"{C}, Fig. 8b", "under feature shift MTGC has the highest accuracy",
          best("mtgc")),
    Claim("shakespeare_best", "shakespeare", f"{D}, Fig. 9a", "on Shakespeare MTGC has the highest accuracy",
          best("mtgc"), small="with longer periods MTGC has the highest accuracy"),
    Claim("cinic10_best", "cinic10", f"{D}, Fig. 9b", "on CINIC-10 MTGC has the highest accuracy", best("mtgc"),
          small="on digits instead MTGC has the highest accuracy"),
    Claim("three_level_best", "three_level", f"{E}, Fig. 11", "with three levels MTGC has the highest accuracy",
          best("mtgc")),
)  # fmt: skip
