"""What the paper reads from Table 1: rounds to a target, and how many times fewer than HFedAvg
needs."""

from __future__ import annotations

from collections.abc import Sequence

from stratafl.paper.recipes.figures import EH
from stratafl.paper.recipes.settings import DISTRIBUTIONS, METHODS, eh_name
from stratafl.paper.reproduce.judge import Claim, Finding, label
from stratafl.paper.reproduce.measure import Results, Value, less, times

WHERE = "Section 5.2, Table 1"


def _settings(results: Results) -> list[str]:
    return [eh_name(e, h) for e, h in EH[results.options.scale]]


def _chains(results: Results) -> list[list[str]]:
    """The settings in which H grows, and those in which E does; both begin with the base."""
    base, h2, h3, e2, e3 = _settings(results)
    return [[base, h2, h3], [base, e2, e3]]


def speedup(results: Results, distribution: str, eh: str, line: str = "mtgc") -> Value | None:
    """How many times fewer rounds a line takes to the target than HFedAvg does."""
    panel = (distribution, eh)
    return times(results.reach(panel, "hfedavg"), results.reach(panel, line))


def _text(value: Value | None, unit: str = "") -> str:
    return "?" if value is None else value.text(unit=unit)


def _fewest(results: Results) -> list[Finding]:
    found = []
    for panel in results.panels:
        ours = results.reach(panel, "mtgc")
        others = {line: results.reach(panel, line) for line in results.lines(panel) if line != "mtgc"}
        answers = [less(ours, other) for other in others.values()]
        holds = False if False in answers else None if None in answers or not answers else True
        said = ", ".join([_text(ours), *(f"{METHODS[line]} {_text(value)}" for line, value in others.items())])
        found.append(Finding(label(panel), holds, said))
    return found


def _monotone(labels: str, values: Sequence[Value | None], rising: bool) -> Finding:
    """Somewhere it moves the right way and nowhere it certainly moves the other; it may stand
    still."""
    known = [value for value in values if value is not None]
    if len(known) < 2:
        return Finding(labels, None, "")
    pairs = [(a, b) if rising else (b, a) for i, a in enumerate(known) for b in known[i + 1 :]]
    right, wrong = (any(less(*pair[::way]) for pair in pairs) for way in (1, -1))
    level = all(less(*pair) is False for pair in pairs)
    holds = False if wrong or level else True if right else None
    return Finding(labels, holds, ", ".join(_text(value) for value in known))


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
    found = []
    for eh in _settings(results):
        client, group, both = (results.reach((d, eh), "hfedavg") for d in ("client", "group", "both"))
        answers = [less(client, both), less(group, both)]
        holds = False if False in answers else None if None in answers else True
        found.append(Finding(eh, holds, f"{_text(client)} and {_text(group)}, both levels {_text(both)}"))
    return found


def _mtgc_is_stable(results: Results) -> list[Finding]:
    """From the easier of the two one-level settings to both levels, its rounds grow by a smaller
    factor."""
    found = []
    for eh in _settings(results):
        growth = {line: _growth(results, eh, line) for line in ("mtgc", "hfedavg")}
        said = f"MTGC {_text(growth['mtgc'], '×')}, HFedAvg {_text(growth['hfedavg'], '×')}"
        found.append(Finding(eh, less(growth["mtgc"], growth["hfedavg"]), said))
    return found


def _growth(results: Results, eh: str, line: str) -> Value | None:
    easier = [value for d in ("client", "group") if (value := results.reach((d, eh), line)) is not None]
    if len(easier) < 2:
        return None
    return times(results.reach(("both", eh), line), min(easier, key=lambda value: value.mean))


def _gain_is_largest(results: Results) -> list[Finding]:
    found = []
    for eh in _settings(results):
        client, group, both = (speedup(results, d, eh) for d in ("client", "group", "both"))
        answers = [less(client, both), less(group, both)]
        holds = False if False in answers else None if None in answers else True
        said = f"{_text(client, '×')} and {_text(group, '×')}, both levels {_text(both, '×')}"
        found.append(Finding(eh, holds, said))
    return found


TABLE_CLAIMS = (
    Claim("table1_fewest", "table1", WHERE, "MTGC needs the fewest global rounds to TARGET in every setting", _fewest),
    Claim("table1_falls", "table1", WHERE, "MTGC needs fewer rounds as E or H grows", _falls),
    Claim("table1_speedup", "table1", WHERE, "MTGC's speed-up over HFedAvg grows with E and H", _speedup_grows),
    Claim("table1_hfedavg", "table1", WHERE, "HFedAvg needs more rounds where both levels are non-i.i.d.",
          _hfedavg_suffers),
    Claim("table1_stable", "table1", WHERE, "MTGC's rounds grow less than HFedAvg's from one non-i.i.d. level to both",
          _mtgc_is_stable),
    Claim("table1_gain", "table1", WHERE, "MTGC's speed-up is largest where both levels are non-i.i.d.",
          _gain_is_largest),
)  # fmt: skip
