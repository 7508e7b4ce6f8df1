"""Groups of stored runs: collected from folders and archives, grouped by config, named by what
differs."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path, PurePath
from typing import Any

from stratafl.base.errors import InvalidInput, escape_control, join_names
from stratafl.base.plotting import METHODS, LineStyle, line_styles
from stratafl.runs import StoredRun, format, read_run
from stratafl.runs.curves import ABSENT, Curve, CurveCache, MetricInfo, Points, mean_curve, metric_infos
from stratafl.runs.format import DONE, flat_config, is_locked
from stratafl.runs.provenance import NOT_DECISIVE, complete, files_of, identity
from stratafl.runs.reader import ENDINGS, READ_FILES, UnreadableRun, scan, stamp_of, unpacked

Flat = Mapping[str, object]
"""Config with dotted keys."""

METHOD, RULES, PERIODS = "method.name", "method.rules", "schedule.periods"
SELF_EXPLANATORY = (METHOD, RULES, "model.name", "data.source", "data.partition")
"""Keys whose values are shown without the key."""

SECTIONS = ("method", "data", "model", "client", "loss", "schedule", "tree", "aggregation", "network")
"""Sections in the order of their importance; unknown ones come after them."""

LAST = ("rounds", "seed", "plugins", "evaluation", *NOT_DECISIVE)
"""Sections that name a group only if nothing else differs: length, measurements and execution."""

MAX_NAMED_KEYS = 3
"""Maximum number of differing keys that are all named; of more, only those needed to distinguish
groups."""

MAX_VALUE_LENGTH = 48
"""Maximum length of a value in a name."""


def group_names(flats: Sequence[Flat]) -> list[str]:
    """Choose one name per group. Names are equal if values differ only beyond their maximum
    length."""
    keys = sorted({key for flat in flats for key in flat}, key=_rank)
    differing = [key for key in keys if key != METHOD and len({_value(flat, key) for flat in flats}) > 1]
    # a rate is also in the schedule that it begins: one key with these values is enough
    differing = list({(_word(key), *(_value(flat, key) for flat in flats)): key for key in differing[::-1]}.values())
    differing.sort(key=_rank)
    # keys that some do not have are often parameters of another method, or of a later version;
    # length and place of execution come last
    preferred = [key for key in differing if len({_value(flat, key) for flat in flats if key in flat}) > 1]
    preferred = [key for key in preferred if key.partition(".")[0] not in LAST]
    chosen = preferred if len(preferred) <= MAX_NAMED_KEYS else []
    for key in differing:
        if key not in chosen and len(_distinct(flats, [*chosen, key])) > len(_distinct(flats, chosen)):
            chosen = [*chosen, key]
    chosen.sort(key=_rank)
    names: list[str] = []
    # folders are shown only if nothing else differs
    for shown_flats in ([{key: _file(value) for key, value in flat.items()} for flat in flats], flats):
        names = [_name(flat, chosen, shown_flats) for flat in shown_flats]
        if len(set(names)) == len(names):
            break
    return names


def _file(value: object) -> object:
    """File name of a full path; other values as they are."""
    return PurePath(value).name if isinstance(value, str) and value.startswith(os.sep) else value


def method_label(flat: Flat) -> str:
    """Name of a config's method, or of its rules, root first."""
    if METHOD in flat:
        name = str(flat[METHOD])
        return METHODS.get(name, name)
    return value_text(flat[RULES]) if RULES in flat else ""


def value_text(value: object) -> str:
    """Format a value for people.

    A named table is its name and its values, a list is separated by slashes, and an object in
    memory is the beginning of its digest.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping) and "sha256" in value:
        return f"#{str(value['sha256'])[:6]}"
    if isinstance(value, Mapping):
        return " ".join(value_text(entry) for entry in value.values())
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
    text = text if len(text) <= MAX_VALUE_LENGTH else f"{text[: MAX_VALUE_LENGTH - 1]}…"
    return text if key in SELF_EXPLANATORY else f"{word} {text}"


def _periods(flat: Flat, flats: Sequence[Flat]) -> list[str]:
    """Periods as E and H, as in the paper, if all trees have two edge levels."""
    values = [value.get(PERIODS) for value in flats]
    pairs = [
        [value_text(part) for part in value] for value in values if isinstance(value, list | tuple) and len(value) == 2
    ]
    if len(pairs) < len(values):
        return [_part(PERIODS, flat[PERIODS])]
    periods = pairs[flats.index(flat)]
    return [f"{letter} = {periods[n]}" for n, letter in enumerate("EH") if len({pair[n] for pair in pairs}) > 1]


def _distinct(flats: Sequence[Flat], chosen: Sequence[str]) -> set[tuple[str, ...]]:
    """Distinct combinations of the method and these keys."""
    return {(method_label(flat), *(_value(flat, key) for key in chosen)) for flat in flats}


def _value(flat: Flat, key: str) -> str:
    return json.dumps(flat[key], sort_keys=True, default=str) if key in flat else ""


def _rank(key: str) -> tuple[int, bool, bool, str]:
    section, _, word = key.partition(".")
    ranks = {name: rank for rank, name in enumerate((*SECTIONS, "", *LAST))}
    return ranks.get(section, ranks[""]), word not in ("name", "source"), word not in ("lr", "partition"), key


SEED = "seed"


def flat_options(run: StoredRun) -> dict[str, Any]:
    """Options of a run by dotted key, with their defaults.

    Parameters of the model and of the method stand in their section, as in a file, and an object of
    a program stands there with its name.
    """
    flat: dict[str, Any] = {}
    for key, value in flat_config(complete(run.config) or run.config).items():
        for nested, short in NESTED.items():
            if key.startswith(nested):
                key = short + key.removeprefix(nested)
        flat[key] = value
    return {key: value for key, value in flat.items() if value is not None or key not in (METHOD, RULES)}


NESTED = {
    "model.params.": "model.",
    "method.params.": "method.",
    "model.name.": "model.",
    "data.source.name": "data.source",
}
"""Beginnings of keys that are shorter in a file, or for a run without objects of a program."""


@dataclass(frozen=True)
class RunGroup:
    """Runs with the same config except for the seed."""

    label: str
    runs: list[StoredRun]
    curves: list[Curve]
    """Curves of the runs."""
    mean: Curve
    style: LineStyle
    """Style of its line in every figure."""

    @property
    def seeds(self) -> list[int | str | None]:
        seeds = [run.config.get(SEED) for run in self.runs]
        return [seed if seed is None or type(seed) is int else _text(seed) for seed in seeds]


def group_runs(
    runs: Sequence[StoredRun],
    extra_axes: Mapping[Path, Mapping[str, Points]] | None = None,
    cache: CurveCache | None = None,
) -> list[RunGroup]:
    """Group runs by their config, one per seed, in the order of the first run of each group.

    extra_axes: further axes of the runs' curves. cache: curves of an earlier call.
    """
    by_identity: dict[str, list[StoredRun]] = {}
    for run in one_of_each(runs)[0]:
        by_identity.setdefault(identity(run, seed=False), []).append(run)
    groups, cache = list(by_identity.values()), cache or CurveCache()
    styles = line_styles([method_of(group[0]) for group in groups])
    run_groups = []
    for label, group, style in zip(_labels(groups), groups, styles, strict=True):
        curves = [cache.curve_of(run, (extra_axes or {}).get(run.path)) for run in group]
        run_groups.append(RunGroup(label, group, curves, mean_curve(curves), style))
    return run_groups


def method_of(run: StoredRun) -> str:
    """Name of a run's method, or of its rules, root first."""
    flat = flat_options(run)
    return str(flat[METHOD]) if METHOD in flat else method_label(flat)


def one_of_each(runs: Sequence[StoredRun]) -> tuple[list[StoredRun], list[str]]:
    """Select one run per config and seed: the newest complete one, or else the longest.

    Returns the runs, and remarks about the others.
    """
    duplicates: dict[str, list[StoredRun]] = {}
    for index, run in enumerate(runs):
        # runs without a seed cannot be compared
        key = identity(run) if SEED in run.config else str(index)
        duplicates.setdefault(key, []).append(run)
    selected, remarks = [], []
    for copies in duplicates.values():
        newest = max(copies, key=lambda run: run.id)
        chosen = max(copies, key=lambda run: (run.status == DONE, run.status == DONE or run.round, run.id))
        selected.append(chosen)
        if len(copies) > 1:
            word = "newer" if len(copies) == 2 else "newest"
            description = (
                word if chosen is newest else f"{word} that is complete" if chosen.status == DONE else "longest"
            )
            others = join_names([run.id for run in copies if run is not chosen])
            count = f"{len(copies)} runs of seed {chosen.config[SEED]}{_execution_differences(copies)}"
            remarks.append(f"{chosen.name}: {count}: the {description} is shown, not {others}")
    return selected, remarks


def _execution_differences(runs: Sequence[StoredRun]) -> str:
    """Differences in device, engine and precision between equal runs."""
    flats = [flat_options(run) for run in runs]
    keys = dict.fromkeys(key for flat in flats for key in flat if key.startswith("execution."))
    values_by_key = {_word(key): dict.fromkeys(_text(flat.get(key)) for flat in flats) for key in keys}
    differences = [f"{word} {' and '.join(values)}" for word, values in values_by_key.items() if len(values) > 1]
    return f" ({', '.join(differences)})" if differences else ""


def split_config(runs: Sequence[StoredRun]) -> tuple[dict[str, str], list[dict[str, str]]]:
    """Options that all runs have in common, and the other options of each run, as texts."""
    texts = [_config_texts(run) for run in runs]
    keys = sorted({key for config in texts for key in config})
    differing = [key for key in keys if len({config.get(key, ABSENT) for config in texts}) > 1]
    common = {key: texts[0].get(key, ABSENT) for key in keys if key not in differing}
    return common, [{key: config[key] for key in differing if key in config} for config in texts]


def _labels(groups: Sequence[Sequence[StoredRun]]) -> list[str]:
    """Names by what differs, with the id if that is not enough."""
    ignored = (SEED, *NOT_DECISIVE)
    flats = [
        {key: value for key, value in flat_options(group[0]).items() if key.partition(".")[0] not in ignored}
        for group in groups
    ]
    labels = list(map(escape_control, group_names(flats)))
    return [
        label if labels.count(label) == 1 else f"{label} {escape_control(group[0].id)}"
        for label, group in zip(labels, groups, strict=True)
    ]


def _config_texts(run: StoredRun) -> dict[str, str]:
    """Config of a run as texts, with the engine and precision that were used, and its files."""
    texts = {key: _text(value) for key, value in flat_options(run).items()}
    used = {"execution.engine": run.engine, "execution.precision": run.precision}
    texts |= {key: value for key, value in used.items() if value}
    return texts | {f"files.{name}": f"#{digest[:6]}" for name, digest in files_of(run).items()}


def _text(value: object) -> str:
    if isinstance(value, str):
        return value
    return ABSENT if value is None else json.dumps(value, default=str)


def select_metric(groups: Sequence[RunGroup], name: str | None = None) -> tuple[list[MetricInfo], MetricInfo | None]:
    """Metrics of these groups, and the one by which they are compared."""
    curves = [curve for group in groups for curve in group.curves]
    metrics = metric_infos([run for group in groups for run in group.runs], curves)
    main = [metric for metric in metrics if name in (None, "", metric.name)][:1]
    return metrics, main[0] if main else None


Runs = list[StoredRun | UnreadableRun]


def read_archive(path: Path) -> Runs:
    """Read the runs of an archive, with those that cannot be read."""
    with unpacked(path) as folder:
        return scan(folder)


def collect_runs(
    folders: Sequence[Path], read: Callable[[Path], StoredRun] = read_run, unpack: Callable[[Path], Runs] = read_archive
) -> tuple[list[StoredRun], list[str]]:
    """Collect runs, each once and oldest first in each folder, and a line for each that cannot be
    read.

    Among copies of a run, as in an archive and in its own folder, the last updated one is taken.
    """
    runs: dict[tuple[str, str, str], StoredRun] = {}
    unreadable = []
    for folder in folders:
        results: Runs
        if folder.name.endswith(ENDINGS) and folder.is_file():
            results = unpack(folder)
        elif (folder / format.RUN).exists():
            try:
                results = [read(folder)]
            except InvalidInput as problem:
                results = [UnreadableRun(folder, str(problem))]
        else:
            results = scan(folder, read)
        for result in results:
            if isinstance(result, StoredRun):
                # a copy that was continued with another config is another run
                key = result.id, result.name, identity(result, extent=False)
                if key not in runs or _update_key(runs[key]) < _update_key(result):
                    runs[key] = result
            else:
                unreadable.append(result.reason)
    return list(runs.values()), list(dict.fromkeys(unreadable))


RunsLike = str | Path | StoredRun | Sequence[str | Path | StoredRun]
"""Run folders, folders of runs, archives of runs, or runs that were read."""


def given_runs(runs: RunsLike) -> tuple[list[StoredRun], list[str]]:
    """Read runs that are given by their places, at least one, and a line for each that cannot be
    read."""
    places = [runs] if isinstance(runs, str | Path | StoredRun) else list(runs)
    stored = [place for place in places if isinstance(place, StoredRun)]
    collected, unreadable = collect_runs([Path(place) for place in places if not isinstance(place, StoredRun)])
    if not (stored or collected):
        raise InvalidInput("runs", [str(place) for place in places], "no runs in it that can be read")
    return stored + collected, unreadable


class Gatherer:
    """Repeated collection: a run or an archive is read again only if it has changed, and is the
    same object otherwise."""

    def __init__(self) -> None:
        self._cache: dict[Path, tuple[object, Any]] = {}
        """Results by path, each with the stamp of the files that it was read from."""
        self._used: set[Path] = set()

    def __call__(self, folders: Sequence[Path]) -> tuple[list[StoredRun], list[str]]:
        """Collect runs as `collect_runs` does."""
        try:
            return collect_runs(folders, self._read_run, self._read_archive)
        finally:
            self._cache = {path: cached for path, cached in self._cache.items() if path in self._used}
            self._used.clear()

    def _read_run(self, path: Path) -> StoredRun:
        # a run whose process has ended is another one, too
        stamp = is_locked(path), *(stamp_of(path / name) for name in READ_FILES)
        run: StoredRun = self._cached(path, stamp, read_run)
        return run

    def _read_archive(self, path: Path) -> Runs:
        # archives are unpacked into a new folder each time, which does not identify their runs
        runs: Runs = self._cached(path, stamp_of(path), read_archive)
        return runs

    def _cached(self, path: Path, stamp: object, read: Callable[[Path], Any]) -> Any:
        """Result of the last reading, if the stamp is the same.

        The stamp is from before reading, so changes in between are read the next time.
        """
        self._used.add(path)
        if path not in self._cache or self._cache[path][0] != stamp:
            self._cache[path] = stamp, read(path)
        return self._cache[path][1]


def _update_key(run: StoredRun) -> tuple[datetime, int]:
    return datetime.fromisoformat(run.updated), run.round
