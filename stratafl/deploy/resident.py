"""The socket between a site's ClientApp and its resident process. What comes over it is sealed, or refused."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path

from stratafl.errors import InvalidInput
from stratafl.store.files import make_folder

LENGTH = struct.Struct("!BQ")
LARGEST = 1 << 34
PATIENCE = 60.0
"""Seconds: the other side is on this machine and has all its bytes at hand."""


class Resident:
    """Answers one request after another until it is told to stop."""

    def __init__(self, path: Path, handle: Callable[[bytes], bytes], say: Callable[[str], None]):
        self._handle, self._say = handle, say
        make_folder(path.parent)
        os.chmod(path.parent, 0o700)
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            self._socket = socket.socket(socket.AF_UNIX)
            # by way of the folder's handle, since the name of a socket must be short
            self._socket.bind(f"/proc/self/fd/{folder}/{path.name}")
            self._socket.listen(8)
        finally:
            os.close(folder)

    def serve(self, go_on: Callable[[], bool]) -> None:
        self._socket.settimeout(0.2)
        while go_on():
            try:
                connection, _ = self._socket.accept()
            except TimeoutError:
                continue
            with connection:
                connection.settimeout(PATIENCE)
                try:
                    self._answer(connection)
                except OSError as problem:
                    self._say(f"a request was not finished: {problem}")

    def _answer(self, connection: socket.socket) -> None:
        _, length = LENGTH.unpack(_receive(connection, LENGTH.size))
        if length > LARGEST:
            raise OSError(f"a request of {length:,} bytes")
        try:
            status, data = 0, self._handle(_receive(connection, length))
        except InvalidInput as refused:
            self._say(f"refused: {refused}")
            status, data = 1, str(refused).encode()
        connection.sendall(LENGTH.pack(status, len(data)) + data)

    def close(self) -> None:
        self._socket.close()


def _receive(connection: socket.socket, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        part = connection.recv(min(length - len(data), 1 << 20))
        if not part:
            raise OSError("the connection ended early")
        data += part
    return bytes(data)
