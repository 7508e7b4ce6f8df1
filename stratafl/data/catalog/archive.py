"""Folders, archives and single files as named byte strings.

Archives are read in place and never unpacked, so that no member can be written anywhere. An archive
with a member outside its folder is refused.
"""

from __future__ import annotations

import gzip
import io
import lzma
import re
import tarfile
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator
from pathlib import Path, PurePosixPath

import numpy as np

from stratafl.base.errors import InvalidInput

# Far above any file read here, far below what a forged one could ask for.
UNPACKED_LIMIT = 4 << 30
_BROKEN = (OSError, EOFError, zlib.error, lzma.LZMAError, tarfile.TarError, zipfile.BadZipFile)


class FileTree(ABC):
    """Named files in a folder or an archive."""

    def __init__(self, path: Path):
        self.path = path
        try:
            self.names = sorted(self._list())
        except (*_BROKEN, RuntimeError, NotImplementedError) as error:
            raise self.corrupt(path.name, "a readable folder or archive", error) from error

    @abstractmethod
    def _list(self) -> list[str]: ...

    @abstractmethod
    def _iterate(self, names: Collection[str]) -> Iterator[tuple[str, bytes]]: ...

    def read_many(self, names: Collection[str]) -> Iterator[tuple[str, bytes]]:
        """Read several files, in stored order: any other order is slow in a .tar.gz."""
        try:
            yield from self._iterate(frozenset(names))
        except (*_BROKEN, RuntimeError, NotImplementedError) as error:
            raise self.corrupt(self.path.name, "a whole, readable file", error) from error

    def read(self, name: str) -> bytes:
        """Read one file; it is decompressed if its name ends in .gz or .xz."""
        (data,) = (data for _, data in self.read_many([name]))
        return self.decompress(name, data)

    def decompress(self, name: str, data: bytes) -> bytes:
        """Decompress a file's data if its name ends in .gz or .xz."""
        if not name.endswith((".gz", ".xz")):
            return data
        raw = io.BytesIO(data)
        try:
            with gzip.open(raw) if name.endswith(".gz") else lzma.open(raw) as stream:
                plain: bytes = stream.read(UNPACKED_LIMIT + 1)
        except _BROKEN as error:
            raise self.corrupt(name, "a whole compressed file", error) from error
        if len(plain) > UNPACKED_LIMIT:
            raise self.corrupt(name, f"at most {UNPACKED_LIMIT:,} bytes once unpacked", "more")
        return plain

    def matching(self, pattern: str) -> list[str]:
        """Names whose last part matches a regular expression in full."""
        return [name for name in self.names if re.fullmatch(pattern, name.rsplit("/", maxsplit=1)[-1])]

    def find_one(self, pattern: str, what: str) -> str:
        """The only name that matches a regular expression."""
        matches = self.matching(pattern)
        if len(matches) != 1:
            raise self.corrupt(what, "one such file", f"{len(matches)}: {', '.join(matches[:4])}")
        return matches[0]

    def _safe(self, name: str, size: int) -> str:
        """Check that an archive member stays inside the archive and is not too large."""
        path = PurePosixPath(name.replace("\\", "/"))
        if path.is_absolute() or ".." in path.parts or re.match("[A-Za-z]:", name):
            raise self.corrupt(name, "an archive whose members stay inside it", "one that leaves it")
        if size > UNPACKED_LIMIT:
            raise self.corrupt(name, f"at most {UNPACKED_LIMIT:,} bytes", f"{size:,}")
        return name

    def corrupt(self, name: str, expected: str, present: object) -> InvalidInput:
        """Build the error about a file with wrong contents."""
        text = " ".join(str(present).split()) or type(present).__name__
        return InvalidInput("source", str(self.path), f"{name}: expected {expected}, found {text}")


class _Folder(FileTree):
    def _list(self) -> list[str]:
        return [path.relative_to(self.path).as_posix() for path in self.path.rglob("*") if path.is_file()]

    def _iterate(self, names: Collection[str]) -> Iterator[tuple[str, bytes]]:
        for name in sorted(names):
            yield name, (self.path / name).read_bytes()


class _Single(FileTree):
    def _list(self) -> list[str]:
        return [self.path.name]

    def _iterate(self, names: Collection[str]) -> Iterator[tuple[str, bytes]]:
        for name in names:
            yield name, self.path.read_bytes()


class _Tar(FileTree):
    def _list(self) -> list[str]:
        with tarfile.open(self.path) as archive:
            # Links are left out: a data file that points elsewhere is not data.
            return [self._safe(member.name, member.size) for member in archive if member.isreg()]

    def _iterate(self, names: Collection[str]) -> Iterator[tuple[str, bytes]]:
        with tarfile.open(self.path) as archive:
            for member in archive:
                if member.isreg() and member.name in names:
                    stream = archive.extractfile(member)
                    assert stream is not None
                    data = stream.read()
                    if len(data) != member.size:
                        raise self.corrupt(member.name, f"{member.size:,} bytes", f"{len(data):,}")
                    yield member.name, data


class _Zip(FileTree):
    def _list(self) -> list[str]:
        with zipfile.ZipFile(self.path) as archive:
            return [self._safe(entry.filename, entry.file_size) for entry in archive.infolist() if not entry.is_dir()]

    def _iterate(self, names: Collection[str]) -> Iterator[tuple[str, bytes]]:
        with zipfile.ZipFile(self.path) as archive:
            for entry in archive.infolist():
                if entry.filename in names:
                    yield entry.filename, archive.read(entry)


def open_files(path: Path) -> FileTree:
    """Open a folder, an archive or a single file as named files."""
    if path.is_dir():
        return _Folder(path)
    if not path.is_file():
        raise InvalidInput("source", str(path), "no such file or folder")
    if re.search(r"\.(tar|tgz|tar\.(gz|bz2|xz))$", path.name):
        return _Tar(path)
    if path.suffix == ".zip":
        return _Zip(path)
    return _Single(path)


def numpy_archive(files: FileTree, name: str, keys: Collection[str]) -> dict[str, np.ndarray]:
    """Read named arrays of an .npz file; object arrays, which contain pickles, are refused."""
    data = files.read(name)
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as archive:
            missing = sorted(set(keys) - set(archive.files))
            if missing:
                raise files.corrupt(name, f"arrays {', '.join(keys)}", f"no {', '.join(missing)}")
            return {key: archive[key] for key in keys}
    except InvalidInput:
        raise
    except (*_BROKEN, ValueError, AttributeError) as error:
        raise files.corrupt(name, "an .npz of plain arrays", error) from error
