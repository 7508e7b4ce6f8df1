"""Checkpoints: where a run stood after a round, kept twice, and checked before it is believed.

checkpoints/000010/
    state.json            which run and round, what the run depends on, and the state's plain part
    tensors.safetensors   its tensors and arrays
    SHA256SUMS            of both files; `sha256sum -c SHA256SUMS` checks them, too

The folder gets its name when all three are on the disk, so a checkpoint is whole or not there. The records of the
rounds so far are in rounds.jsonl, and a checkpoint knows them again: its size does not grow with them.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from stratafl.state import State
from stratafl.store import files, layout
from stratafl.store.inputs import Inputs
from stratafl.store.pack import pack, unpack
from stratafl.store.records import Mark, read_marked
from stratafl.store.tensors import read_tensors, write_tensors

FORMAT = 2
"""Of checkpoints; the first one's held all records themselves, and did not say what a run depends on."""
KEPT = 2
STATE, TENSORS, SUMS = "state.json", "tensors.safetensors", "SHA256SUMS"
CHANGED = "its checksums are not those of its files"
_NAME = re.compile(r"\d{6,}")


class Checkpoints:
    """Those of one run. Only the process that holds the run's lock may write."""

    def __init__(self, folder: Path, run: str):
        self.run_folder, self.folder, self.run = folder, folder / layout.CHECKPOINTS, run
        self.kept = sorted(self._present())
        """The rounds of those that may be good."""

    def _present(self) -> list[int]:
        try:
            return [int(p.name) for p in self.folder.iterdir() if _NAME.fullmatch(p.name) and p.is_dir()]
        except FileNotFoundError:
            return []
        except OSError as problem:
            raise files.unreadable(self.folder, problem.strerror or str(problem)) from None

    def path(self, round: int) -> Path:
        return self.folder / f"{round:06d}"

    def write(self, round: int, state: State, records: Mark, inputs: Inputs) -> None:
        """One more; then all but the last two are removed. If it cannot be written, they stay as they are.

        records: those of all rounds so far, which take the place of the state's history.
        """
        final = self.path(round)
        partial = self.folder / f".{final.name}.{os.getpid()}{files.PARTIAL}"
        try:
            self.folder.mkdir(exist_ok=True)
            files.remove(partial)
            partial.mkdir()
            self._fill(partial, round, state, records, inputs)
            if final.exists() or final.is_symlink():
                # one that was found damaged: those that are good have other rounds
                files.remove(final)
            partial.rename(final)
            files.sync_folder(self.folder)
        except OSError as problem:
            files.remove(partial)
            raise files.unwritable(final, problem) from None
        except BaseException:
            files.remove(partial)
            raise
        self.keep_only(*[*(r for r in self.kept if r < round), round][-KEPT:])

    def _fill(self, folder: Path, round: int, state: State, records: Mark, inputs: Inputs) -> None:
        packed, tensors = pack({name: value for name, value in state.items() if name != "history"})
        described = {
            "format": FORMAT,
            "run": self.run,
            "round": round,
            "created": layout.now(),
            "records": records._asdict(),
            "inputs": inputs._asdict(),
            "state": packed,
        }
        text = json.dumps(described).encode()
        with files.create(folder / TENSORS) as file:
            digest = write_tensors(file, tensors)
            _sync(file)
        sums = _sum(hashlib.sha256(text).hexdigest(), STATE) + _sum(digest, TENSORS)
        for name, contents in ((STATE, text), (SUMS, sums)):
            with files.create(folder / name) as file:
                file.write(contents)
                _sync(file)
        files.sync_folder(folder)

    def read(self, round: int) -> State:
        """A checkpoint whose every byte is as it was written, with the records it belongs to, or the complaint."""
        folder = self.path(round)
        described, sums = self._described(round)
        if sums != _sum(_digest(folder / TENSORS), TENSORS):
            raise files.unreadable(folder, CHANGED)
        mark = described["records"]
        layout.check_fields(folder / STATE, mark, {"size": int, "sha256": str})
        history = read_marked(self.run_folder, Mark(mark["size"], mark["sha256"]))
        if len(history) != round:
            raise files.unreadable(folder, f"its records are not those of {round} rounds")
        try:
            state = unpack(described["state"], read_tensors(folder / TENSORS))
        except RecursionError:
            raise files.unreadable(folder, "nested too deeply") from None
        return {**state, "history": history}

    def inputs(self, round: int) -> Inputs:
        """What the run depended on when this one was written."""
        return Inputs.read(self.path(round) / STATE, self._described(round)[0]["inputs"])

    def _described(self, round: int) -> tuple[dict[str, Any], bytes]:
        """The checked contents of state.json, and the other checksums."""
        folder = self.path(round)
        if folder.is_symlink() or not folder.is_dir():
            raise files.unreadable(folder, "not a plain folder")
        text = files.read_bytes(folder / STATE)
        mine, sums = _sum(hashlib.sha256(text).hexdigest(), STATE), files.read_bytes(folder / SUMS)
        if not sums.startswith(mine):
            raise files.unreadable(folder, CHANGED)
        described = files.parse_json(folder / STATE, text)
        layout.check_fields(folder / STATE, described, {"format": int, "run": str, "round": int, "state": dict})
        if described["format"] != FORMAT:
            raise files.unreadable(folder, f"format {described['format']}; this version reads {FORMAT}")
        layout.check_fields(folder / STATE, described, {"records": dict, "inputs": dict})
        if (described["run"], described["round"]) != (self.run, round):
            raise files.unreadable(folder, f"it belongs to round {described['round']} of run {described['run']}")
        return described, sums.removeprefix(mine)

    def newest_first(self) -> Iterator[int]:
        return reversed(self.kept)

    def believe(self, round: int) -> None:
        """Take this one and those before it for good: the next write removes the others."""
        self.kept = [r for r in self.kept if r <= round]

    def keep_only(self, *rounds: int) -> None:
        for round in self._present():
            if round not in rounds:
                files.remove(self.path(round))
        self.kept = list(rounds)


def _sum(digest: str, name: str) -> bytes:
    """A line of the checksums."""
    return f"{digest}  {name}\n".encode()


def _digest(path: Path) -> str:
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except (OSError, ValueError) as problem:
        raise files.unreadable(path, getattr(problem, "strerror", None) or str(problem)) from None


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
