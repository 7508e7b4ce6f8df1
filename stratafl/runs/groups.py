"""Stored runs, collected from folders and archives, grouped by settings, named by what differs."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path, PurePath

from stratafl.base.errors import InvalidInput, escape_control, join_names
from stratafl.runs import StoredRun, format, read_run
from stratafl.runs.curves import ABSENT, Curve, MetricInfo, Points, curve_of, main_metric, mean_curve, measures
from stratafl.runs.format import DONE, flat_config
from stratafl.runs.provenance import EXECUTION, STORAGE, files_of, identity
from stratafl.runs.reader import ENDINGS, Reader, UnreadableRun, scan, stamp_of, unpacked

Flat = Mapping[str, object]
"""A config by dotted keys."""

METHODS = {
    "hfedavg": "HFedAvg",
    "mtgc": "MTGC",
    "local_correction": "local correction",
    "group_correction": "group correction",
    "scaffold": "SCAFFOLD",
    "fedprox": "FedProx",
    "feddyn": "FedDyn",
    "momentum": "FedAvgM",
    "adam": "FedAdam",
    "yogi": "FedYogi",
}
"""Methods as papers write them; others have the name they go by."""

METHOD, RULES, PERIODS = "method.name", "method.rules", "schedule.periods"

SPEAKING = (METHOD, RULES, "model.name", "data.name", "data.partition")
"""Keys whose values speak for themselves."""

SECTIONS = ("method", "data", "model", "leaf", "objective", "schedule", "tree", "run")
"""Sections in the order in which they are of interest; others come before the last."""

FEW = 3
"""So many keys that differ are all named; of more, those that it takes to tell settings apart."""

LONGEST = 48
"""Letters that a value may have in a name."""


def group_names(flats: Sequence[Flat]) -> list[str]:
    """One name per setting. Names may be alike where values are that differ only further on than a
    name shows."""
    keys = sorted({key for flat in flats for key in flat}, key=_rank)
    differing = [key for key in keys if key != METHOD and len({_value(flat, key) for flat in flats}) > 1]
    # a rate is also in the schedule that it begins: one of the same word and values says it all
    differing = list({(_word(key), *(_value(flat, key) for flat in flats)): key for key in differing[::-1]}.values())
    differing.sort(key=_rank)
    # what some do not have at all is often a parameter of another method, or of a later version;
    # and how long or where a run ran is the last thing to name it by
    first = [key for key in differing if len({_value(flat, key) for flat in flats if key in flat}) > 1]
    first = [key for key in first if not key.startswith("run.")]
    chosen = first if len(first) <= FEW else []
    for key in differing:
        if key not in chosen and len(_kinds(flats, [*chosen, key])) > len(_kinds(flats, chosen)):
            chosen = [*chosen, key]
    chosen.sort(key=_rank)
    made: list[str] = []
    # where files lie is of interest only where it is all that differs
    for given in ([{key: _file(value) for key, value in flat.items()} for flat in flats], flats):
        made = [_name(flat, chosen, given) for flat in given]
        if len(set(made)) == len(made):
            break
    return made


def _file(value: object) -> object:
    """A full path as the file's own name; anything else as it is."""
    return PurePath(value).name if isinstance(value, str) and value.startswith(os.sep) else value


def method_label(flat: Flat) -> str:
    """The method of a config, or its rules, root first."""
    if METHOD in flat:
        name = str(flat[METHOD])
        return METHODS.get(name, name)
    return value_text(flat[RULES]) if RULES in flat else ""


def value_text(value: object) -> str:
    """A value as people write it: a named table is its name and its values, a list is divided by
    strokes, and of what was in memory there is the beginning of its digest."""
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping) and "sha256" in value:
        return f"#{str(value['sha256'])[:6]}"
    if isinstance(value, Mapping):
        return " ".join(value_text(each) for each in value.values())
    if isinstance(value, list | tuple):
        return " / ".join(map(value_text, value))
    if isinstance(value, float) and float(f"{value:g}") == value:
        return f"{value:g}"
    return json.dumps(value, default=str)


def _name(flat: Flat, chosen: Sequence[str], flats: Sequence[Flat]) -> str:
    parts = [method_label(flat)]
    for key in chosen:
        if key in flat and not (key == RULES and METHOD not in flat):
            parts += _periods(flat, flats) if key == PERIODS else [_part(key, flat[key])]
    return ", ".join(filter(None, parts)) or "run"


def _word(key: str) -> str:
    return key.rpartition(".")[2]


def _part(key: str, value: object) -> str:
    word = _word(key)
    if value is None or value is False:
        return f"no {word}"
    if value is True:
        return word
    text = value_text(value)
    text = text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"
    return text if key in SPEAKING else f"{word} {text}"


def _periods(flat: Flat, flats: Sequence[Flat]) -> list[str]:
    """E and H of a tree of two edge levels, as the paper has them, where they differ."""
    every = [each.get(PERIODS) for each in flats]
    pairs = [[value_text(part) for part in each] for each in every if isinstance(each, list | tuple) and len(each) == 2]
    if len(pairs) < len(every):
        return [_part(PERIODS, flat[PERIODS])]
    own = pairs[flats.index(flat)]
    return [f"{letter} = {own[n]}" for n, letter in enumerate("EH") if len({pair[n] for pair in pairs}) > 1]


def _kinds(flats: Sequence[Flat], chosen: Sequence[str]) -> set[tuple[str, ...]]:
    """Settings that the method and these keys tell apart."""
    return {(method_label(flat), *(_value(flat, key) for key in chosen)) for flat in flats}


def _value(flat: Flat, key: str) -> str:
    return json.dumps(flat[key], sort_keys=True, default=str) if key in flat else ""


def _rank(key: str) -> tuple[int, bool, bool, str]:
    section, _, word = key.partition(".")
    place = SECTIONS.index(section) if section in SECTIONS else len(SECTIONS) - 2
    return place, word != "name", word not in ("lr", "partition"), key


SEED = "run.seed"


@dataclass(frozen=True)
class RunGroup:
    """Runs with one config but for the seed."""

    label: str
    runs: list[StoredRun]
    curves: list[Curve]
    """One curve per run."""
    mean: Curve

    @property
    def seeds(self) -> list[int | str | None]:
        found = [flat_config(run.config).get(SEED) for run in self.runs]
        return [seed if seed is None or type(seed) is int else _text(seed) for seed in found]


def group_runs(runs: Sequence[StoredRun], further: Mapping[Path, Mapping[str, Points]] | None = None) -> list[RunGroup]:
    """The runs by setting, one of each seed, in the order in which each setting first appears.
    further: by run, axes of its curve besides its own."""
    groups: dict[str, list[StoredRun]] = {}
    for run in one_of_each(runs)[0]:
        groups.setdefault(identity(run, seed=False), []).append(run)
    families = list(groups.values())
    found = []
    for label, family in zip(_labels(families), families, strict=True):
        curves = [curve_of(run, (further or {}).get(run.path)) for run in family]
        found.append(RunGroup(label, family, curves, mean_curve(curves)))
    return found


def one_of_each(runs: Sequence[StoredRun]) -> tuple[list[StoredRun], list[str]]:
    """Of the runs of one setting and seed the newest that is complete, or else the longest; and a
    line for the others."""
    same: dict[str, list[StoredRun]] = {}
    for place, run in enumerate(runs):
        # of runs that do not say their seed nobody knows whether it is one
        which = identity(run) if SEED in flat_config(run.config) else str(place)
        same.setdefault(which, []).append(run)
    kept, told = [], []
    for family in same.values():
        newest = max(family, key=lambda run: run.id)
        chosen = max(family, key=lambda run: (run.status == DONE, run.status == DONE or run.round, run.id))
        kept.append(chosen)
        if len(family) > 1:
            which = "newer" if len(family) == 2 else "newest"
            shown = which if chosen is newest else f"{which} that is complete" if chosen.status == DONE else "longest"
            others = join_names([run.id for run in family if run is not chosen])
            counted = f"{len(family)} runs of seed {flat_config(chosen.config)[SEED]}{_ways(family)}"
            told.append(f"{chosen.name}: {counted}: the {shown} is shown, not {others}")
    return kept, told


def _ways(family: Sequence[StoredRun]) -> str:
    """How runs differ that are the same up to how they were computed."""
    flats = [flat_config(run.config) for run in family]
    found = {key: dict.fromkeys(_text(flat.get(f"run.{key}")) for flat in flats) for key in EXECUTION}
    told = [f"{key} {' and '.join(values)}" for key, values in found.items() if len(values) > 1]
    return f" ({', '.join(told)})" if told else ""


def config_differences(found: Sequence[RunGroup]) -> dict[str, list[str]]:
    """Config keys whose values are not the same everywhere, each with one text per setting."""
    flats = [_shown(setting.runs) for setting in found]
    keys = sorted({key for flat in flats for key in flat})
    return {key: values for key in keys if len(set(values := [flat.get(key, ABSENT) for flat in flats])) > 1}


def common_config(found: Sequence[RunGroup]) -> dict[str, str]:
    """The rest of the config: what all settings have in common."""
    differing = config_differences(found)
    first = _shown(found[0].runs) if found else {}
    return {key: value for key, value in sorted(first.items()) if key not in differing}


def _labels(families: Sequence[Sequence[StoredRun]]) -> list[str]:
    """What differs, and the time they were made where that is not enough."""
    ignored = (SEED, *(f"run.{key}" for key in (*EXECUTION, *STORAGE)))
    flats = [
        {key: value for key, value in flat_config(family[0].config).items() if key not in ignored}
        for family in families
    ]
    labels = list(map(escape_control, group_names(flats)))
    return [
        label if labels.count(label) == 1 else f"{label} {escape_control(family[0].id)}"
        for label, family in zip(labels, families, strict=True)
    ]


def _shown(family: Sequence[StoredRun]) -> dict[str, str]:
    """A setting's config as texts: its seeds are a list, and its engine and precision those that
    really trained it."""
    texts = {key: _text(value) for key, value in flat_config(family[0].config).items()}
    seeds = [flat_config(run.config).get(SEED) for run in family]
    if SEED in texts:
        texts[SEED] = ", ".join(map(_text, seeds))
    ran = {"run.engine": [run.engine for run in family], "run.precision": [run.precision for run in family]}
    texts |= {key: ", ".join(dict.fromkeys(values)) for key, values in ran.items() if all(values)}
    return texts | {f"files.{name}": f"#{digest[:6]}" for name, digest in files_of(family[0]).items()}


def _text(value: object) -> str:
    if isinstance(value, str):
        return value
    return ABSENT if value is None else json.dumps(value, default=str)


def select_metric(found: Sequence[RunGroup], name: str | None = None) -> tuple[list[MetricInfo], MetricInfo | None]:
    """All metrics of these settings, and the one they are compared by."""
    curves = [curve for setting in found for curve in setting.curves]
    metrics = measures([run for setting in found for run in setting.runs], curves)
    return metrics, next((each for each in metrics if each.name == name), None) if name else main_metric(metrics)


Found = list[StoredRun | UnreadableRun]


def in_archive(path: Path) -> Found:
    """The runs of an archive, and what cannot be read there."""
    with unpacked(path) as place:
        return scan(place)


def collect_runs(
    folders: Sequence[Path],
    read: Callable[[Path], StoredRun] = read_run,
    unpack: Callable[[Path], Found] = in_archive,
) -> tuple[list[StoredRun], list[str]]:
    """The runs, each once and oldest first in each folder, and a line for each that cannot be read.

    Of copies of a run, as in an archive and in its own folder, the one that was updated last.
    """
    runs: dict[tuple[str, str, str], StoredRun] = {}
    unreadable = []
    for folder in folders:
        found: Found
        if folder.name.endswith(ENDINGS) and folder.is_file():
            found = unpack(folder)
        elif (folder / format.RUN).exists():
            try:
                found = [read(folder)]
            except InvalidInput as problem:
                found = [UnreadableRun(folder, str(problem))]
        else:
            found = scan(folder, read)
        for each in found:
            if isinstance(each, StoredRun):
                # a copy that went on with something else is another run
                which = each.id, each.name, identity(each, extent=False)
                if which not in runs or _age(runs[which]) < _age(each):
                    runs[which] = each
            else:
                unreadable.append(each.reason)
    return list(runs.values()), list(dict.fromkeys(unreadable))


class Gatherer:
    """Gathers again and again: a run or an archive is read anew only where it has changed, and is
    the same object otherwise."""

    def __init__(self) -> None:
        self._reader = Reader()
        self._archives: dict[Path, tuple[object, Found]] = {}

    def __call__(self, folders: Sequence[Path]) -> tuple[list[StoredRun], list[str]]:
        """As `gather` does."""
        try:
            return collect_runs(folders, self._reader, self._unpacked)
        finally:
            self._reader.forget_the_rest()

    def _unpacked(self, path: Path) -> Found:
        # it is unpacked elsewhere each time, so that its runs are not known by their folders
        stamp = stamp_of(path)
        if path not in self._archives or self._archives[path][0] != stamp:
            self._archives[path] = stamp, in_archive(path)
        return self._archives[path][1]


def _age(run: StoredRun) -> tuple[datetime, int]:
    return datetime.fromisoformat(run.updated), run.round
