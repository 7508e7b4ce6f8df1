"""Files that are never half written, and never somewhere else than they seem to be.

Everything is written aside, synced and renamed, so a reader sees the old file or the new one. No
symbolic link is followed inside a run directory: one in the place of a file is replaced or refused,
and what it points at stays.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, BinaryIO

from stratafl.base.errors import InvalidInput

PARTIAL = ".partial"
PRIVATE = 0o600
"""The mode of what nobody but its owner is to read."""
LARGEST_TEXT = 1 << 30
"""Bytes of a JSON file of ours, or of a text that a user gives: parsing a larger one could take all
memory. States, records and models may be as large as they are."""


def cannot_write(path: Path, problem: OSError) -> InvalidInput:
    """The complaint about a file that cannot be written."""
    return InvalidInput("file", path, f"cannot be written: {problem.strerror or problem}")


def cannot_read(path: Path, reason: str) -> InvalidInput:
    """The complaint about a file that cannot be read, or is not what it should be."""
    return InvalidInput("file", path, f"cannot be read: {reason}")


@contextlib.contextmanager
def atomic_write(path: Path, *, sync: bool = True, mode: int = 0o644) -> Iterator[BinaryIO]:
    """A file to fill; it gets its name when the block ends well, and leaves nothing behind when it
    does not."""
    partial = path.with_name(f".{path.name}.{os.getpid()}{PARTIAL}")
    try:
        with create_exclusive(partial, mode) as file:
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
    """Write a value as a JSON file, whole or not at all; one that could not be read is refused."""
    text = json.dumps(value, indent=indent).encode() + b"\n"
    if len(text) > LARGEST_TEXT:
        raise InvalidInput("file", path, f"cannot be written: {_too_large(len(text), LARGEST_TEXT)}")
    with atomic_write(path, sync=sync, mode=mode) as file:
        file.write(text)


def create_exclusive(path: Path, mode: int = 0o644) -> BinaryIO:
    """A new file to write. One left there by a process that died is removed first; a link is not
    followed."""
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode), "wb")


def open_to_append(path: Path) -> BinaryIO:
    """Unbuffered, so that a line is in the file when it is written."""
    try:
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    except OSError as problem:
        raise cannot_write(path, problem) from None
    return os.fdopen(handle, "ab", buffering=0)


def append(file: BinaryIO, path: Path, line: bytes) -> None:
    """Write all of a line at the end of an open file."""
    try:
        while line:
            line = line[file.write(line) :]
    except OSError as problem:
        raise cannot_write(path, problem) from None


def read_bytes(path: Path, largest: int | None = None) -> bytes:
    """The contents of a plain file, or the complaint; also about one of more bytes than the
    largest."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(handle, "rb") as file:
            found = os.fstat(handle)
            if not stat.S_ISREG(found.st_mode):
                raise cannot_read(path, "not a plain file")
            if largest is not None and found.st_size > largest:
                raise cannot_read(path, _too_large(found.st_size, largest))
            return file.read()
    except OSError as problem:
        raise cannot_read(path, problem.strerror or str(problem)) from None


def _too_large(size: int, largest: int) -> str:
    return f"{size:,} bytes, more than the {largest:,} that such a file may have"


def read_bounded(path: Path) -> bytes:
    """The contents of a file that is to be parsed as a whole, which has a limit."""
    return read_bytes(path, LARGEST_TEXT)


def read_json(path: Path) -> Any:
    """The value in a JSON file, or the complaint."""
    return parse_json(path, read_bounded(path))


def parse_json(path: Path, text: bytes) -> Any:
    """The value in a JSON text, or a complaint that names the file it is from."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise cannot_read(path, f"not valid JSON ({problem})") from None


@contextlib.contextmanager
def atomic_folder(path: Path, *, mode: int = 0o777) -> Iterator[Path]:
    """A new folder to fill; it gets its name when the block ends well, and leaves nothing behind
    when it does not."""
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
    """What was written so far is on the disk when this returns."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Have the disk hold the names in a folder before anything else goes on."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def check_writable(option: str, path: Path, *, is_file: bool = False) -> None:
    """Refuse a folder, or a file's, that nothing can be written in, before the work and not after;
    it may be there yet or not."""
    there = path.absolute().parent if is_file else path.absolute()
    while not there.exists():
        there = there.parent
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise InvalidInput(option, path, f"cannot write in {there}")


def make_folder(folder: Path) -> None:
    """Make a folder, with those that it is in, or complain."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise cannot_write(folder, problem) from None


def remove_tree(path: Path) -> None:
    """A file or a whole folder; a link itself, not what it points at."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def remove_partials(folder: Path) -> None:
    """What processes that died left behind."""
    if not folder.is_dir():
        return
    for path in folder.iterdir():
        if path.name.startswith(".") and path.name.endswith(PARTIAL):
            remove_tree(path)
