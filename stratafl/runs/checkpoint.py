"""Append-only log of round records, and checkpoints verified by checksums.

The log (rounds.jsonl) has one line per round. A checkpoint does not repeat these lines, but has
their size and digest.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
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
from stratafl.metrics.records import RoundResult
from stratafl.runs import format
from stratafl.runs.provenance import Provenance


class LogDigest(NamedTuple):
    """Size in bytes and SHA-256 of the first lines of the log."""

    size: int
    sha256: str


class RoundLog:
    """Log that is open for appending. Only the process that holds the run's lock may write."""

    def __init__(self, folder: Path, history: Iterable[RoundResult] = ()):
        """Write these records; other lines of the file are dropped."""
        self.path = folder / format.ROUNDS
        text = b"".join(_line(record) for record in history)
        with files.atomic_write(self.path) as file:
            file.write(text)
        self._file = files.open_to_append(self.path)
        self._size, self._digest = len(text), hashlib.sha256(text)

    def add(self, record: RoundResult) -> None:
        line = _line(record)
        files.append(self._file, self.path, line)
        self._size += len(line)
        self._digest.update(line)

    def sync(self) -> LogDigest:
        """Flush all lines to the disk and return their digest."""
        try:
            os.fsync(self._file.fileno())
        except OSError as problem:
            raise files.cannot_write(self.path, problem) from None
        return LogDigest(self._size, self._digest.hexdigest())

    def close(self) -> None:
        self._file.close()


def read_verified(folder: Path, digest: LogDigest) -> list[dict[str, Any]]:
    """Read the records that a digest covers; raises if they have changed."""
    path = folder / format.ROUNDS
    text = files.read_bytes(path)[: digest.size]
    if (len(text), hashlib.sha256(text).hexdigest()) != digest:
        raise files.cannot_read(path, "its lines are no longer those that the checkpoint was written after")
    return [files.parse_json(path, line) for line in text.splitlines()]


def _line(record: RoundResult) -> bytes:
    values = dataclasses.asdict(record)
    if not record.traffic:
        # lines of earlier versions keep their bytes, which their checkpoints have the digest of
        del values["traffic"]
    return json.dumps(values).encode() + b"\n"


DTYPE_NAMES = {
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
MAX_PENDING_CHUNKS = 16
"""Maximum number of chunks that wait to be hashed, since they stay in memory."""


def write_tensors(file: BinaryIO, tensors: Mapping[str, Tensor]) -> str:
    """Write tensors in the safetensors format; returns the SHA-256 of the file."""
    digest = hashlib.sha256()
    # hashing releases the interpreter lock, so a second core hashes while this one writes
    with ThreadPoolExecutor(1) as executor:
        pending: deque[Future[None]] = deque()
        for part in _parts(tensors):
            pending.append(executor.submit(digest.update, part))
            file.write(part)
            if len(pending) > MAX_PENDING_CHUNKS:
                pending.popleft().result()
    return digest.hexdigest()


def _parts(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    # wide types first, so that each tensor is aligned to its width
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    header, end = {}, 0
    for name in order:
        tensor = tensors[name]
        begin, end = end, end + tensor.numel() * tensor.dtype.itemsize
        header[name] = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in order:
        flat = tensors[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        view = memoryview(flat.numpy().data)
        for begin in range(0, len(view), CHUNK):
            yield view[begin : begin + CHUNK]


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file; raises if it is damaged."""
    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError) as problem:
        raise cannot_read(path, f"not a safetensors file ({problem})") from None


FORMAT = 4
"""Version of the format of checkpoints. Version 1 contained all records, and no provenance; version
2 had a list of levels per kind of state, where there now is one record per level."""

KEPT_CHECKPOINTS = 2
STATE, TENSORS, SUMS = "state.json", "tensors.safetensors", "SHA256SUMS"
CHANGED = "its checksums are not those of its files"
_NAME = re.compile(r"(\d{6,})(?:-(\d{6,}))?")


class Progress(NamedTuple):
    """Progress of a run, ordered by time."""

    round: int
    """Number of completed global rounds."""
    meetings: int = 0
    """Number of the clients' synchronisations so far in the global round in progress."""

    @property
    def name(self) -> str:
        """Name of the checkpoint's folder."""
        return f"{self.round:06d}" + (f"-{self.meetings:06d}" if self.meetings else "")

    @staticmethod
    def named(name: str) -> Progress | None:
        match = _NAME.fullmatch(name)
        progress = None if match is None else Progress(int(match[1]), int(match[2] or 0))
        return progress if progress is not None and progress.name == name else None

    def __str__(self) -> str:
        return f"round {self.round}" + (f" and {self.meetings} meetings of the next" if self.meetings else "")


class Checkpoints:
    """Checkpoints of one run. Only the process that holds the run's lock may write."""

    def __init__(self, folder: Path, run: str):
        self.run_folder, self.folder, self.run = folder, folder / format.CHECKPOINTS, run
        self.available = sorted(self._existing())
        """Progress of each checkpoint that is not known to be damaged."""

    def _existing(self) -> list[Progress]:
        try:
            existing = [Progress.named(path.name) for path in self.folder.iterdir() if path.is_dir()]
            return [progress for progress in existing if progress is not None]
        except FileNotFoundError:
            return []
        except OSError as problem:
            raise files.cannot_read(self.folder, problem.strerror or str(problem)) from None

    def path(self, progress: Progress) -> Path:
        return self.folder / progress.name

    def write(self, progress: Progress, state: StateDict, records: LogDigest, provenance: Provenance) -> None:
        """Write a checkpoint, and keep only it and the newest one before it.

        If it cannot be written, all others stay.

        records: digest of the log so far, stored in place of the state's history.
        """
        final = self.path(progress)
        files.make_folder(self.folder)
        with files.atomic_folder(final) as partial:
            self._fill(partial, progress, state, records, provenance)
            if final.exists() or final.is_symlink():
                # only a damaged checkpoint can have this name
                files.remove_tree(final)
        self.keep_only(*[*(before for before in self.available if before < progress), progress][-KEPT_CHECKPOINTS:])

    def _fill(
        self, folder: Path, progress: Progress, state: StateDict, records: LogDigest, provenance: Provenance
    ) -> None:
        packed, tensors = to_json_and_tensors({name: value for name, value in state.items() if name != "history"})
        described = {
            "format": FORMAT,
            "run": self.run,
            **progress._asdict(),
            "created": format.now(),
            "records": records._asdict(),
            "inputs": provenance._asdict(),
            "state": packed,
        }
        text = json.dumps(described).encode()
        with files.create_anew(folder / TENSORS) as file:
            digest = write_tensors(file, tensors)
            files.sync_file(file)
        sums = _sum(hashlib.sha256(text).hexdigest(), STATE) + _sum(digest, TENSORS)
        for name, contents in ((STATE, text), (SUMS, sums)):
            with files.create_anew(folder / name) as file:
                file.write(contents)
                files.sync_file(file)
        files.sync_folder(folder)

    def read(self, progress: Progress) -> StateDict:
        """Read a checkpoint, verified by checksums, with its round records; raises if it is
        damaged."""
        folder = self.path(progress)
        described, sums = self._read_description(progress)
        if sums != _sum(_digest(folder / TENSORS), TENSORS):
            raise files.cannot_read(folder, CHANGED)
        digest = described["records"]
        format.check_fields(folder / STATE, digest, {"size": int, "sha256": str})
        history = read_verified(self.run_folder, LogDigest(digest["size"], digest["sha256"]))
        if len(history) != progress.round:
            raise files.cannot_read(folder, f"its records are not those of {progress.round} rounds")
        try:
            state = from_json_and_tensors(described["state"], read_tensors(folder / TENSORS))
        except RecursionError:
            raise files.cannot_read(folder, "nested too deeply") from None
        # "within" is the part of the state that exists only inside a global round
        if ("within" in state) != (progress.meetings > 0):
            raise files.cannot_read(folder, f"its state is not that of {progress}")
        return {**state, "history": history}

    def provenance(self, progress: Progress) -> Provenance:
        """Provenance of the run when this checkpoint was written."""
        return Provenance.read(self.path(progress) / STATE, self._read_description(progress)[0]["inputs"])

    def _read_description(self, progress: Progress) -> tuple[dict[str, Any], bytes]:
        """Verified contents of state.json, and the other checksums."""
        folder = self.path(progress)
        if folder.is_symlink() or not folder.is_dir():
            raise files.cannot_read(folder, "not a plain folder")
        text = files.read_bytes(folder / STATE)
        own_sum, sums = _sum(hashlib.sha256(text).hexdigest(), STATE), files.read_bytes(folder / SUMS)
        if not sums.startswith(own_sum):
            raise files.cannot_read(folder, CHANGED)
        described = files.parse_json(folder / STATE, text)
        format.check_fields(folder / STATE, described, {"format": int, "run": str, "round": int, "state": dict})
        if described["format"] != FORMAT:
            raise files.cannot_read(folder, f"format {described['format']}; this version reads {FORMAT}")
        format.check_fields(folder / STATE, described, {"records": dict, "inputs": dict})
        # missing before there were checkpoints within rounds
        format.check_fields(folder / STATE, {"meetings": 0, **described}, {"meetings": int})
        stored_progress = Progress(described["round"], described.get("meetings", 0))
        if (described["run"], stored_progress) != (self.run, progress):
            raise files.cannot_read(folder, f"it belongs to {stored_progress} of run {described['run']}")
        return described, sums.removeprefix(own_sum)

    def newest_first(self) -> Iterator[Progress]:
        return reversed(self.available)

    def discard_newer_than(self, progress: Progress) -> None:
        """Mark this checkpoint as the newest valid one; newer ones are deleted at the next
        write."""
        self.available = [other for other in self.available if other <= progress]

    def keep_only(self, *kept: Progress) -> None:
        for progress in self._existing():
            if progress not in kept:
                files.remove_tree(self.path(progress))
        self.available = list(kept)


def _sum(digest: str, name: str) -> bytes:
    """Line of the checksums."""
    return f"{digest}  {name}\n".encode()


def _digest(path: Path) -> str:
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except (OSError, ValueError) as problem:
        raise files.cannot_read(path, getattr(problem, "strerror", None) or str(problem)) from None
