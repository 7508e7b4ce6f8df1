"""What a reader should know of a run before its numbers: one line per run that has something to
say."""

from __future__ import annotations

from collections.abc import Sequence

from stratafl.base.errors import listed
from stratafl.report.curves import Curve
from stratafl.runs import StoredRun, layout


def notes(run: StoredRun, curve: Curve) -> tuple[bool, list[str]]:
    """Whether something went wrong with it, and what there is to say."""
    bad = []
    if curve.diverged is not None:
        bad.append(f"diverged at round {curve.diverged}: from there on its test loss is not finite")
    if run.status in (layout.FAILED, layout.INTERRUPTED):
        why = f": {run.reason}" if run.reason else ""
        bad.append(f"{run.status} after {run.round} of {run.total} rounds{why}")
    told = bad + _left_out(run)
    # a run that has noted these itself says it better
    noted = {note.partition(" ")[0] for note in run.notes}
    found = {"engine": _engine(run), "precision": _precision(run)}
    told += [line for word, line in found.items() if line and word not in noted]
    told += run.notes
    for each in run.continued:
        changed = each.get("changed")
        told += [f"went on after round {each['after']} with {listed(layout.texts(changed))}"] if changed else []
    return bool(bad), told


def _left_out(run: StoredRun) -> list[str]:
    """Who was refused, and in which rounds, and who was absent: a line for each."""
    lines = []
    for why in ("refused", "absent"):
        rounds: dict[str, list[int]] = {}
        for record in run.rounds:
            for name in dict.fromkeys(layout.nodes_in(record, why)):
                rounds.setdefault(name, []).append(record["round"])
        told = [f"{name} in {_rounds_text(numbers)}" for name, numbers in rounds.items()]
        lines += [f"{why}: {listed(told)}"] if told else []
    return lines


def _engine(run: StoredRun) -> str:
    """Why it was trained in another way than was asked for."""
    asked = _asked(run, "engine")
    _, because, reason = run.how.partition(": ")
    if because and asked != run.engine:
        return f"trained by the {run.engine} engine: {reason}"
    is_other = asked not in ("", "auto", run.engine)
    return f"engine {asked} was asked for, and {run.engine} trained it" if is_other else ""


def _precision(run: StoredRun) -> str:
    asked = _asked(run, "precision")
    if not asked or not run.precision or asked == run.precision:
        return ""
    return f"precision {asked} was asked for, and it was computed in {run.precision}"


def _asked(run: StoredRun, key: str) -> str:
    table = run.config.get("run")
    value = table.get(key) if isinstance(table, dict) else None
    return value if isinstance(value, str) else ""


def _rounds_text(numbers: Sequence[int]) -> str:
    """Which rounds, as in "rounds 1-3, 7"."""
    spans: list[list[int]] = []
    for round in numbers:
        if spans and spans[-1][-1] == round - 1:
            spans[-1].append(round)
        else:
            spans.append([round])
    texts = [str(span[0]) if len(span) == 1 else f"{span[0]}-{span[-1]}" for span in spans]
    return f"round{'' if len(numbers) == 1 else 's'} {listed(texts)}"
