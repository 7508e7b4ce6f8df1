"""Runs of a program on several ranks, each a process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

ROOT = Path(__file__).parent.parent.parent
SECONDS = 300


def on_ranks(count: int, *arguments: object, codes: Sequence[int] | None = None) -> None:
    """Run a Python program on `count` ranks, and check its exit codes, which are 0 by default."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
        "WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0",
    }  # fmt: skip
    ranks = [
        subprocess.Popen(
            [sys.executable, *map(str, arguments)], env={**environment, "RANK": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(count)
    ]  # fmt: skip
    try:
        outputs = [rank.communicate(timeout=SECONDS)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == list(codes or [0] * count), "\n".join(outputs)
