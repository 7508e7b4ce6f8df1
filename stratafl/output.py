"""What a finished run leaves in a folder: its config, one JSON line per round, a summary and the root's model."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from stratafl.config import Config
from stratafl.errors import InvalidInput
from stratafl.simulate import Result


def summary(result: Result) -> dict[str, Any]:
    """The run in numbers."""
    communication = result.communication
    last = next((r.metrics for r in reversed(result.history) if r.metrics), {})
    return {
        "rounds": len(result.history),
        "final": last,
        "seconds": sum(r.seconds for r in result.history),
        "refused": result.refused,
        "bytes_per_client": communication.bytes_per_client,
        "communication": [
            {"level": level, **dataclasses.asdict(communication.level(level))}
            for level in range(1, result.tree.depth + 1)
        ],
    }


def check_free(folder: Path) -> None:
    """Refuse early what `write` could not do at the end."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InvalidInput("--out", str(folder), "already exists; choose another folder")
    _check_parent(folder)


def check_picture(path: Path) -> None:
    """Refuse a place for a picture before the work that it is to show."""
    if path.is_dir() or path.suffix not in (".png", ".svg", ".pdf"):
        raise InvalidInput("--out", str(path), "must be a file that ends in .png, .svg or .pdf")
    _check_parent(path)


def _check_parent(path: Path) -> None:
    parent = path.absolute().parent
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise InvalidInput("--out", str(path), f"cannot write in {parent}")


def write(folder: Path, config: Config, result: Result) -> None:
    """All of it or nothing: the folder gets its name when it is complete."""
    partial = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    try:
        partial.mkdir(parents=True)
        (partial / "config.json").write_text(json.dumps(config.as_dict(), indent=2) + "\n")
        with (partial / "rounds.jsonl").open("w") as lines:
            for each in result.history:
                lines.write(json.dumps(dataclasses.asdict(each)) + "\n")
        (partial / "summary.json").write_text(json.dumps(summary(result), indent=2) + "\n")
        tensors = {k: v.contiguous() for k, v in result.module.state_dict().items()}
        save_file(tensors, partial / "model.safetensors")
        if folder.exists():
            folder.rmdir()
        partial.rename(folder)
    except OSError as problem:
        raise InvalidInput("--out", str(folder), problem.strerror or str(problem)) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
