"""Environment of a result: commit, versions and hardware."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

import numpy as np
import torch

from stratafl.base.version import __version__


def environment() -> dict[str, str | int | bool]:
    """Versions, commit of the source tree, and hardware that a run is computed with."""
    return {
        "stratafl": __version__,
        **_source(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count() or 0,
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
    }


def usable_cores() -> int:
    """Number of cores this process may use, which can be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _source() -> dict[str, str | bool]:
    """Commit of the source tree, if the package is imported from a Git checkout."""

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", *arguments], cwd=Path(__file__).parent, capture_output=True, text=True, check=False, timeout=10
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    # an installed package may lie inside somebody else's repository, whose commit says nothing
    # about it
    if git("ls-files", "--error-unmatch", Path(__file__).name) is None:
        return {"commit": "unknown", "changed_since_commit": False}
    return {
        "commit": git("rev-parse", "--short=12", "HEAD") or "unknown",
        "changed_since_commit": bool(git("status", "--porcelain", "--", ":/*.py")),
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
