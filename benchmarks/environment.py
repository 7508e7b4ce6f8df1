"""Where a result comes from: commit, versions and hardware."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

import torch

import stratafl


def environment() -> dict[str, str | int | bool]:
    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", *arguments],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=False,
        )
        return done.stdout.strip()

    return {
        "stratafl": stratafl.__version__,
        "commit": git("rev-parse", "--short=12", "HEAD"),
        "changed_since_commit": bool(git("status", "--porcelain", "--", "*.py")),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "processor": _processor(),
        "cores": os.cpu_count() or 0,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
