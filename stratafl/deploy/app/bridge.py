"""A site's ClientApp: hands a message to the site's resident process over a socket, and its reply back.

Flower starts a process for every message. This one imports neither torch nor the package, so that it starts fast, and
has no keys: messages are sealed, and it can only pass them on.
"""

import os
import socket
import struct
from pathlib import Path

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()
LENGTH = struct.Struct("!BQ")


@app.train()
def train(message: Message, context: Context) -> Message:
    refused, data = ask(Path(str(context.node_config["socket"])), message.content["stratafl"]["data"])
    record = ConfigRecord({"refused": refused, "data": data})
    return Message(RecordDict({"stratafl": record}), reply_to=message)


def ask(path: Path, data: bytes) -> tuple[bool, bytes]:
    """Whether it was refused, and the reply or the reason."""
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            # by way of the folder's handle, since the name of a socket must be short
            connection.connect(f"/proc/self/fd/{folder}/{path.name}")
            connection.sendall(LENGTH.pack(0, len(data)) + data)
            status, length = LENGTH.unpack(receive(connection, LENGTH.size))
            return bool(status), receive(connection, length)
    finally:
        os.close(folder)


def receive(connection: socket.socket, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        part = connection.recv(min(length - len(data), 1 << 20))
        if not part:
            raise ConnectionError("the site's process ended before its reply was whole")
        data += part
    return bytes(data)
