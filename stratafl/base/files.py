"""Atomic writes, JSON, and reads that do not follow symbolic links.

A file is written under a temporary name, synced and renamed: readers see the old file or the new
one. A symbolic link in place of a file is replaced or refused, and its target is not touched.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import shutil
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, BinaryIO

from stratafl.base.errors import InvalidInput

PARTIAL = ".partial"
PRIVATE = 0o600
"""Mode of a file that only its owner may read."""
LARGEST_TEXT = 1 << 30
"""Most bytes of a JSON file, or of a text from a user, that are parsed.

Parsing a larger one could use up all memory. Tensors and records have no such limit.
"""


def cannot_write(path: Path, problem: OSError) -> InvalidInput:
    """Build the error about a file that cannot be written."""
    return InvalidInput("file", path, f"cannot be written: {problem.strerror or problem}")


def cannot_read(path: Path, reason: str) -> InvalidInput:
    """Build the error about a file that cannot be read or has wrong contents."""
    return InvalidInput("file", path, f"cannot be read: {reason}")


@contextlib.contextmanager
def atomic_write(path: Path, *, sync: bool = True, mode: int = 0o644) -> Iterator[BinaryIO]:
    """Open a file that gets its name when the block succeeds, and is deleted otherwise."""
    partial = path.with_name(f".{path.name}.{os.getpid()}{PARTIAL}")
    try:
        with create_anew(partial, mode) as file:
            yield file
            if sync:
                sync_file(file)
        os.replace(partial, path)
        if sync:
            sync_folder(path.parent)
    except OSError as problem:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise cannot_write(path, problem) from None
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


def write_json(path: Path, value: object, *, indent: int | None = 2, sync: bool = True, mode: int = 0o644) -> None:
    """Write a value as a JSON file atomically; a value too large to be read back is refused."""
    text = json.dumps(value, indent=indent).encode() + b"\n"
    if len(text) > LARGEST_TEXT:
        raise InvalidInput("file", path, f"cannot be written: {_too_large(len(text), LARGEST_TEXT)}")
    with atomic_write(path, sync=sync, mode=mode) as file:
        file.write(text)


def create_anew(path: Path, mode: int = 0o644) -> BinaryIO:
    """Create a new file for writing.

    Any file or symbolic link at its path is removed first: a process that died may have left one.
    """
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode), "wb")


def open_to_append(path: Path) -> BinaryIO:
    """Open a file for appending, unbuffered: a line is in the file once it is written."""
    try:
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    except OSError as problem:
        raise cannot_write(path, problem) from None
    return os.fdopen(handle, "ab", buffering=0)


def append(file: BinaryIO, path: Path, line: bytes) -> None:
    """Write all bytes of a line at the end of an open file."""
    try:
        while line:
            line = line[file.write(line) :]
    except OSError as problem:
        raise cannot_write(path, problem) from None


def read_bytes(path: Path, largest: int | None = None) -> bytes:
    """Read a regular file of at most `largest` bytes."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(handle, "rb") as file:
            status = os.fstat(handle)
            if not stat.S_ISREG(status.st_mode):
                raise cannot_read(path, "not a plain file")
            if largest is not None and status.st_size > largest:
                raise cannot_read(path, _too_large(status.st_size, largest))
            return file.read()
    except OSError as problem:
        raise cannot_read(path, problem.strerror or str(problem)) from None


def _too_large(size: int, largest: int) -> str:
    return f"{size:,} bytes, more than the {largest:,} that such a file may have"


def read_bounded(path: Path) -> bytes:
    """Read a text file that will be parsed as a whole; its size is limited."""
    return read_bytes(path, LARGEST_TEXT)


def csv_text(rows: Sequence[Mapping[str, object]]) -> str:
    """Format dicts as rows of a CSV file, with a column for every key; None is an empty cell."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(key for row in rows for key in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def read_json(path: Path) -> Any:
    """Read a JSON file."""
    return parse_json(path, read_bounded(path))


def parse_json(path: Path, text: bytes) -> Any:
    """Parse a JSON text; an error names the file it comes from."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise cannot_read(path, f"not valid JSON ({problem})") from None


@contextlib.contextmanager
def atomic_folder(path: Path, *, mode: int = 0o777) -> Iterator[Path]:
    """Create a folder that gets its name when the block succeeds, and is deleted otherwise."""
    partial = path.with_name(f".{path.name}{PARTIAL}")
    try:
        remove_tree(partial)  # of a process that died
        partial.mkdir(mode=mode)
        yield partial
        sync_folder(partial)
        partial.rename(path)
        sync_folder(path.parent)
    except OSError as problem:
        remove_tree(partial)
        raise cannot_write(path, problem) from None
    except BaseException:
        remove_tree(partial)
        raise


def sync_file(file: IO[Any]) -> None:
    """Sync an open file: its contents are on disk when this returns."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Sync a folder: the names in it are on disk when this returns."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def check_writable(option: str, path: Path, *, is_file: bool = False) -> None:
    """Check before a long computation that a file or folder can be created or written to.

    It may exist already.
    """
    there = path.absolute().parent if is_file else path.absolute()
    while not there.exists():
        there = there.parent
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise InvalidInput(option, path, f"cannot write in {there}")


def make_folder(folder: Path) -> None:
    """Create a folder and its parents, or raise `InvalidInput`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise cannot_write(folder, problem) from None


def remove_tree(path: Path) -> None:
    """Remove a file or a whole folder; of a symbolic link, the link alone."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def remove_partials(folder: Path) -> None:
    """Remove temporary files that processes left when they died."""
    if not folder.is_dir():
        return
    for path in folder.iterdir():
        if path.name.startswith(".") and path.name.endswith(PARTIAL):
            remove_tree(path)
