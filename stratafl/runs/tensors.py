"""Tensors written as a safetensors file at the speed of the disk, with a checksum made on the way.

The library's own writer wants all bytes in memory a second time and knows no checksum. The format
is simple: eight bytes for the header's length, a JSON header, and the tensors' bytes one after
another. The library reads it.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from stratafl.base.files import unreadable

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
        raise unreadable(path, f"not a safetensors file ({problem})") from None
