"""Checkpoints of a run, verified by checksums."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from stratafl.base import files
from stratafl.base.files import cannot_read
from stratafl.base.state_dict import StateDict, from_json_and_tensors, to_json_and_tensors
from stratafl.runs import format
from stratafl.runs.provenance import Provenance
from stratafl.runs.round_log import LogDigest, read_verified

NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}

CHUNK = 1 << 24

AHEAD = 16
"""Chunks that may wait to be hashed: they keep what a GPU sent in memory."""


def write_tensors(file: BinaryIO, tensors: Mapping[str, Tensor]) -> str:
    """The SHA-256 of what was written."""
    digest = hashlib.sha256()
    # hashing lets go of the interpreter's lock, so that a second core does it while this one hands
    # bytes to the disk
    with ThreadPoolExecutor(1) as beside:
        waiting: deque[Future[None]] = deque()
        for part in _parts(tensors):
            waiting.append(beside.submit(digest.update, part))
            file.write(part)
            if len(waiting) > AHEAD:
                waiting.popleft().result()
    return digest.hexdigest()


def _parts(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    # the wider ones first, so that each begins at a multiple of its width
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    header, end = {}, 0
    for name in order:
        tensor = tensors[name]
        begin, end = end, end + tensor.numel() * tensor.dtype.itemsize
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in order:
        flat = tensors[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        view = memoryview(flat.numpy().data)
        for begin in range(0, len(view), CHUNK):
            yield view[begin : begin + CHUNK]


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, or the complaint."""
    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError) as problem:
        raise cannot_read(path, f"not a safetensors file ({problem})") from None


FORMAT = 4
"""Version of the format of checkpoints. The first held all records themselves, and did not say what
a run depends on; in the second, a federation's state was a list of levels for each kind of thing,
instead of one record per level; the third had other names for its fields."""

KEPT = 2

STATE, TENSORS, SUMS = "state.json", "tensors.safetensors", "SHA256SUMS"

CHANGED = "its checksums are not those of its files"

_NAME = re.compile(r"(\d{6,})(?:-(\d{6,}))?")


class Progress(NamedTuple):
    """How far a run has come; a later one is greater."""

    round: int
    """Global rounds that are done."""
    meetings: int = 0
    """How often the leaves have met their parents in the global round after those."""

    @property
    def name(self) -> str:
        """The name of the checkpoint's folder."""
        return f"{self.round:06d}" + (f"-{self.meetings:06d}" if self.meetings else "")

    @staticmethod
    def named(name: str) -> Progress | None:
        found = _NAME.fullmatch(name)
        place = None if found is None else Progress(int(found[1]), int(found[2] or 0))
        return place if place is not None and place.name == name else None

    def __str__(self) -> str:
        return f"round {self.round}" + (f" and {self.meetings} meetings of the next" if self.meetings else "")


class Checkpoints:
    """The checkpoints of one run. Only the process that holds the run's lock may write."""

    def __init__(self, folder: Path, run: str):
        self.run_folder, self.folder, self.run = folder, folder / format.CHECKPOINTS, run
        self.kept = sorted(self._present())
        """The places of checkpoints that may be good."""

    def _present(self) -> list[Progress]:
        try:
            places = [Progress.named(path.name) for path in self.folder.iterdir() if path.is_dir()]
            return [place for place in places if place is not None]
        except FileNotFoundError:
            return []
        except OSError as problem:
            raise files.cannot_read(self.folder, problem.strerror or str(problem)) from None

    def path(self, place: Progress) -> Path:
        return self.folder / place.name

    def write(self, place: Progress, state: StateDict, records: LogDigest, origins: Provenance) -> None:
        """One more; then all but the last two are removed. If it cannot be written, they stay as
        they are.

        records: those of all rounds so far, which take the place of the state's history.
        """
        final = self.path(place)
        files.make_folder(self.folder)
        with files.atomic_folder(final) as partial:
            self._fill(partial, place, state, records, origins)
            if final.exists() or final.is_symlink():
                # one that was found damaged: those that are good are of other places
                files.remove_tree(final)
        self.keep_only(*[*(before for before in self.kept if before < place), place][-KEPT:])

    def _fill(self, folder: Path, place: Progress, state: StateDict, records: LogDigest, origins: Provenance) -> None:
        packed, tensors = to_json_and_tensors({name: value for name, value in state.items() if name != "history"})
        described = {
            "format": FORMAT,
            "run": self.run,
            **place._asdict(),
            "created": format.now(),
            "records": records._asdict(),
            "inputs": origins._asdict(),
            "state": packed,
        }
        text = json.dumps(described).encode()
        with files.create_exclusive(folder / TENSORS) as file:
            digest = write_tensors(file, tensors)
            files.sync_file(file)
        sums = _sum(hashlib.sha256(text).hexdigest(), STATE) + _sum(digest, TENSORS)
        for name, contents in ((STATE, text), (SUMS, sums)):
            with files.create_exclusive(folder / name) as file:
                file.write(contents)
                files.sync_file(file)
        files.sync_folder(folder)

    def read(self, place: Progress) -> StateDict:
        """A checkpoint whose every byte is as it was written, with the records it belongs to, or
        the complaint."""
        folder = self.path(place)
        described, sums = self._described(place)
        if sums != _sum(_digest(folder / TENSORS), TENSORS):
            raise files.cannot_read(folder, CHANGED)
        mark = described["records"]
        format.check_fields(folder / STATE, mark, {"size": int, "sha256": str})
        history = read_verified(self.run_folder, LogDigest(mark["size"], mark["sha256"]))
        if len(history) != place.round:
            raise files.cannot_read(folder, f"its records are not those of {place.round} rounds")
        try:
            state = from_json_and_tensors(described["state"], read_tensors(folder / TENSORS))
        except RecursionError:
            raise files.cannot_read(folder, "nested too deeply") from None
        if ("within" in state) != (place.meetings > 0):
            raise files.cannot_read(folder, f"its state is not that of {place}")
        return {**state, "history": history}

    def origins(self, place: Progress) -> Provenance:
        """What the run depended on when this one was written."""
        return Provenance.read(self.path(place) / STATE, self._described(place)[0]["inputs"])

    def _described(self, place: Progress) -> tuple[dict[str, Any], bytes]:
        """The checked contents of state.json, and the other checksums."""
        folder = self.path(place)
        if folder.is_symlink() or not folder.is_dir():
            raise files.cannot_read(folder, "not a plain folder")
        text = files.read_bytes(folder / STATE)
        mine, sums = _sum(hashlib.sha256(text).hexdigest(), STATE), files.read_bytes(folder / SUMS)
        if not sums.startswith(mine):
            raise files.cannot_read(folder, CHANGED)
        described = files.parse_json(folder / STATE, text)
        format.check_fields(folder / STATE, described, {"format": int, "run": str, "round": int, "state": dict})
        if described["format"] != FORMAT:
            raise files.cannot_read(folder, f"format {described['format']}; this version reads {FORMAT}")
        format.check_fields(folder / STATE, described, {"records": dict, "inputs": dict})
        # not noted before there were checkpoints inside a round
        format.check_fields(folder / STATE, {"meetings": 0, **described}, {"meetings": int})
        its_place = Progress(described["round"], described.get("meetings", 0))
        if (described["run"], its_place) != (self.run, place):
            raise files.cannot_read(folder, f"it belongs to {its_place} of run {described['run']}")
        return described, sums.removeprefix(mine)

    def newest_first(self) -> Iterator[Progress]:
        return reversed(self.kept)

    def believe(self, place: Progress) -> None:
        """Take this one and those before it for good: the next write removes the others."""
        self.kept = [each for each in self.kept if each <= place]

    def keep_only(self, *places: Progress) -> None:
        for place in self._present():
            if place not in places:
                files.remove_tree(self.path(place))
        self.kept = list(places)


def _sum(digest: str, name: str) -> bytes:
    """A line of the checksums."""
    return f"{digest}  {name}\n".encode()


def _digest(path: Path) -> str:
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except (OSError, ValueError) as problem:
        raise files.cannot_read(path, getattr(problem, "strerror", None) or str(problem)) from None
