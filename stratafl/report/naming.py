"""Settings named by what differs between them: the method first, then as much of the config as it
takes to tell them apart ("MTGC, lr 0.05, E = 10")."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import PurePath

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


def names(flats: Sequence[Flat]) -> list[str]:
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


def method_name(flat: Flat) -> str:
    """The method of a config, or its rules, root first."""
    if METHOD in flat:
        name = str(flat[METHOD])
        return METHODS.get(name, name)
    return plain(flat[RULES]) if RULES in flat else ""


def plain(value: object) -> str:
    """A value as people write it: a named table is its name and its values, a list is divided by
    strokes, and of what was in memory there is the beginning of its digest."""
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping) and "sha256" in value:
        return f"#{str(value['sha256'])[:6]}"
    if isinstance(value, Mapping):
        return " ".join(plain(each) for each in value.values())
    if isinstance(value, list | tuple):
        return " / ".join(map(plain, value))
    if isinstance(value, float) and float(f"{value:g}") == value:
        return f"{value:g}"
    return json.dumps(value, default=str)


def _name(flat: Flat, chosen: Sequence[str], flats: Sequence[Flat]) -> str:
    parts = [method_name(flat)]
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
    text = plain(value)
    text = text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"
    return text if key in SPEAKING else f"{word} {text}"


def _periods(flat: Flat, flats: Sequence[Flat]) -> list[str]:
    """E and H of a tree of two edge levels, as the paper has them, where they differ."""
    every = [each.get(PERIODS) for each in flats]
    pairs = [[plain(part) for part in each] for each in every if isinstance(each, list | tuple) and len(each) == 2]
    if len(pairs) < len(every):
        return [_part(PERIODS, flat[PERIODS])]
    own = pairs[flats.index(flat)]
    return [f"{letter} = {own[n]}" for n, letter in enumerate("EH") if len({pair[n] for pair in pairs}) > 1]


def _kinds(flats: Sequence[Flat], chosen: Sequence[str]) -> set[tuple[str, ...]]:
    """Settings that the method and these keys tell apart."""
    return {(method_name(flat), *(_value(flat, key) for key in chosen)) for flat in flats}


def _value(flat: Flat, key: str) -> str:
    return json.dumps(flat[key], sort_keys=True, default=str) if key in flat else ""


def _rank(key: str) -> tuple[int, bool, bool, str]:
    section, _, word = key.partition(".")
    place = SECTIONS.index(section) if section in SECTIONS else len(SECTIONS) - 2
    return place, word != "name", word not in ("lr", "partition"), key
