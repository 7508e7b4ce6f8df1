"""Every claim of Section 5 and Appendices B to E, and how each is judged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from stratafl.paper.recipes.published import communication_ratio
from stratafl.paper.recipes.settings import AS_RELEASED, METHODS
from stratafl.paper.reproduce.judge import Claim, Finding, Panel, above, best, label, percent
from stratafl.paper.reproduce.measure import Results, Value, extra_models, less, times
from stratafl.paper.reproduce.table_claims import TABLE_CLAIMS

SMALL_OVERHEAD = 1.25
"""Time of MTGC's rounds over HFedAvg's that still counts as "relatively small"."""


def _with(results: Results, part: str) -> list[Panel]:
    return [panel for panel in results.panels if part in panel]


def _data(results: Results) -> list[str]:
    return list(dict.fromkeys(panel[0] for panel in results.panels))


def _gap(
    results: Results, panel: Panel, line: str, others: Sequence[str], beside: Sequence[Panel] = ()
) -> float | None:
    """How far a line ends above the best of the others, at a round that panels it is compared with
    have too."""
    ours, *theirs = (results.accuracy(panel, each, beside) for each in (line, *others))
    if ours is None or not theirs or None in theirs:
        return None
    return ours.mean - max(each.mean for each in theirs if each is not None)


def _points(value: float | None) -> str:
    return "?" if value is None else f"{100 * value:+.1f} points"


def _at(results: Results, panels: Sequence[Panel]) -> str:
    """Where panels that did not come equally far are compared."""
    return f" at round {results.until(*panels)}" if len({results.until(panel) for panel in panels}) > 1 else ""


def _largest_for_cifar100(results: Results) -> list[Finding]:
    others = [line for line in METHODS if line != "mtgc"]
    gaps = {
        panel: _gap(results, panel, "mtgc", [line for line in others if line in results.lines(panel)], results.panels)
        for panel in results.panels
    }
    known = {panel: gap for panel, gap in gaps.items() if gap is not None}
    hard = [panel for panel in known if panel[0] == "cifar100"]
    if not hard or len(known) < 2:
        return [Finding("CIFAR-100", None, "")]
    said = ", ".join(f"{label(panel)} {_points(gap)}" for panel, gap in known.items()) + _at(results, results.panels)
    return [Finding("CIFAR-100", known[hard[0]] == max(known.values()), said)]


def _lowest(line: str, among: Sequence[str]) -> Callable[[Results], list[Finding]]:
    """One line ends below all others of these."""

    def findings(results: Results) -> list[Finding]:
        found = []
        for panel in results.panels:
            scores = {each: results.accuracy(panel, each) for each in results.lines(panel) if each in among}
            if None in scores.values() or line not in scores or len(scores) < 2:
                found.append(Finding(label(panel), None, ""))
                continue
            means = {each: score.mean for each, score in scores.items() if score is not None}
            rival = min((each for each in means if each != line), key=lambda each: means[each])
            said = f"{METHODS[line]} {percent(scores[line])}, lowest other {METHODS[rival]} {percent(scores[rival])}"
            found.append(Finding(label(panel), means[line] < means[rival], said))
        return found

    return findings


def _restless(high: str, among: Sequence[str]) -> Callable[[Results], list[Finding]]:
    """One line jumps more than all others of these; while they still climb, that says how fast they
    do."""

    def findings(results: Results) -> list[Finding]:
        found = []
        for panel in results.panels:
            until = results.until(panel)
            jumps = {each: m.unrest(until) for each in results.lines(panel) if (m := results.get(panel, each))}
            known = {each: jump for each, jump in jumps.items() if jump is not None}
            others = [each for each in results.lines(panel) if each in among and each != high]
            whole = until == results.limit(panel)
            if not whole or high not in known or not others or any(each not in known for each in others):
                found.append(Finding(label(panel), None, ""))
                continue
            rival = max(others, key=lambda each: known[each])
            said = f"{METHODS[high]} {100 * known[high]:.2f}, {METHODS[rival]} {100 * known[rival]:.2f} points a round"
            found.append(Finding(label(panel), known[high] > known[rival], said))
        return found

    return findings


def _falls_with_heterogeneity(results: Results) -> list[Finding]:
    found = []
    for data in _data(results):
        panels = [(data, each) for each in ("both", "client", "group")]
        both, *others = (results.accuracy(panel, "hfedavg", panels) for panel in panels)
        if both is None or None in others:
            found.append(Finding(label((data,)), None, ""))
            continue
        said = f"{percent(others[0])} and {percent(others[1])}, both levels {percent(both)}{_at(results, panels)}"
        found.append(Finding(label((data,)), all(each is not None and both.mean < each.mean for each in others), said))
    return found


def _one_correction_helps(results: Results) -> list[Finding]:
    found = []
    for panel in results.panels:
        local, group = (above(panel, line, "hfedavg", results) for line in ("local_correction", "group_correction"))
        if local.holds is None or group.holds is None:
            found.append(Finding(label(panel), None, ""))
        else:
            better = local if local.holds else group
            found.append(better)
    return found


def _gain_is_largest(results: Results) -> list[Finding]:
    found = []
    for data in _data(results):
        panels = [(data, each) for each in ("client", "group", "both")]
        gains = {panel[1]: _gap(results, panel, "mtgc", ["hfedavg"], panels) for panel in panels}
        known = [gain for gain in gains.values() if gain is not None]
        holds = None if len(known) < 3 else gains["both"] == max(known)
        said = ", ".join(f"{each} {_points(gain)}" for each, gain in gains.items()) + _at(results, panels)
        found.append(Finding(label((data,)), holds, said))
    return found


def _clients_matter_more(results: Results) -> list[Finding]:
    """With every increase of the clients in a group, correcting them gains on correcting groups."""
    panels = sorted(results.panels, key=lambda panel: int(panel[0].partition("x")[2]))
    leads = [_gap(results, panel, "local_correction", ["group_correction"], panels) for panel in panels]
    return [
        Finding(f"from {label(few)} to {label(many)}", None if a is None or b is None else b > a,
                f"local over group correction {_points(a)}, {_points(b)}{_at(results, panels)}")
        for (few, a), (many, b) in pairwise(zip(panels, leads, strict=True))
    ]  # fmt: skip


def _groups_matter_more(results: Results) -> list[Finding]:
    many = max(results.panels, key=lambda panel: int(panel[0].partition("x")[0]), default=None)
    return [] if many is None else [above(many, "group_correction", "local_correction", results)]


def _faster_with(what: str) -> Callable[[Results], list[Finding]]:
    def findings(results: Results) -> list[Finding]:
        lines = [line for line in results.lines((what,)) if results.method((what,), line) == "mtgc"]
        rounds = [(line, results.reach((what,), line)) for line in lines]
        known = [(line, value) for line, value in rounds if value is not None]
        if len(known) < max(len(lines), 2):
            return [Finding(f"rounds to {results.target:.0%}", None, "")]
        said = ", ".join(f"{line} {value.text()}" for line, value in known)
        return [Finding(f"rounds to {results.target:.0%}", less(known[-1][1], known[0][1]), said)]

    return findings


def _sends(results: Results) -> list[Finding]:
    """What a client exchanges in a round, counted in models: HFedAvg's E up and E down, and MTGC's
    one more."""
    found = []
    for panel in results.panels:
        ours, plain = results.get(panel, "mtgc"), results.get(panel, "hfedavg")
        if ours is None or plain is None:
            found.append(Finding(label(panel), None, ""))
            continue
        e = ours.case.config.schedule.periods[0]
        more = extra_models(ours, plain, e)
        ratio = f"(E+1)/E = {communication_ratio(e):.3f}"
        said = f"{more:.2f} models more a round; with one more, its downloads are {ratio} times HFedAvg's"
        found.append(Finding(label(panel), abs(more - 1) < 0.01, said))
    return found


def _better_for_the_same_bytes(results: Results) -> list[Finding]:
    found = []
    for panel in results.panels:
        lines = {line: results.get(panel, line) for line in results.lines(panel)}
        if any(m is None for m in lines.values()) or "mtgc" not in lines or len(lines) < 2:
            found.append(Finding(label(panel), None, ""))
            continue
        known = {line: m for line, m in lines.items() if m is not None}
        most = min(curve.sent[-1] for m in known.values() for curve in m.curves)
        for share in (0.25, 0.5, 1.0):
            scores = {line: m.at_cost(share * most) or 0.0 for line, m in known.items()}
            rival = max((line for line in scores if line != "mtgc"), key=lambda line: scores[line])
            said = f"{100 * scores['mtgc']:.1f} %, {METHODS[rival]} {100 * scores[rival]:.1f} %"
            spent = share * most / 1e6
            found.append(Finding(f"at {spent:,.{0 if spent > 10 else 2}f} MB", scores["mtgc"] > scores[rival], said))
    return found


def _first_in_time(results: Results) -> list[Finding]:
    found = []
    for panel in results.panels:
        goal = results.target or 1.0
        lines = results.lines(panel)
        times_to = {line: m.seconds_to(goal) if (m := results.get(panel, line)) else None for line in lines}
        ours = times_to.get("mtgc")
        for line in lines:
            if line != "mtgc":
                theirs = times_to[line]
                said = " and ".join("?" if v is None else v.text(unit=" s") for v in (ours, theirs))
                found.append(Finding(f"against {METHODS[line]}", less(ours, theirs), said))
    return found


def _little_overhead(results: Results) -> list[Finding]:
    found = []
    for panel in results.panels:
        lines = [results.get(panel, line) for line in ("mtgc", "hfedavg")]
        a, b = (None if m is None else Value.of([c.seconds[-1] / c.rounds[-1] for c in m.curves]) for m in lines)
        ratio = times(a, b)
        holds = None if ratio is None else ratio.mean <= SMALL_OVERHEAD
        said = "" if ratio is None else f"a round takes {ratio.mean:.2f} times HFedAvg's"
        found.append(Finding(label(panel), holds, said))
    return found


def _in_panels(part: str, high: str, low: str) -> Callable[[Results], list[Finding]]:
    return lambda results: [above(panel, high, low, results) for panel in _with(results, part)]


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
    *TABLE_CLAIMS,
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


def claims_of(recipe: str) -> list[Claim]:
    """The paper's claims about what a recipe measures."""
    return [claim for claim in CLAIMS if claim.recipe == recipe]
