"""Stand-in for SLURM's commands: jobs are processes of this machine, described in $SLURM_STUB.

A job is a shell script, whose exit code is noted when it ends. `requeue ID` kills a job as a node
does that is lost, and starts it again.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

STATE = Path(os.environ["SLURM_STUB"])
JOB = """
bash "$1.sh" >> "$2" 2>&1 &
echo $! > "$1.new"; mv "$1.new" "$1.pid"
wait $!
echo $? > "$1.new"; mv "$1.new" "$1.code"
"""
FLAGS = ("--parsable", "--requeue", "--batch", "--noheader", "--parsable2", "--allocations")


def options(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """Options of a command line, --key=value or --key value, and the other words."""
    given: dict[str, str] = {}
    others = []
    while words:
        key, equals, value = words.pop(0).partition("=")
        if not key.startswith("--"):
            others.append(key)
        else:
            given[key] = value if equals or key in FLAGS else words.pop(0)
    return given, others


def start(id: str) -> None:
    for ending in ("pid", "code"):
        (STATE / f"{id}.{ending}").unlink(missing_ok=True)
    log = json.loads((STATE / f"{id}.json").read_text())["--output"]
    subprocess.Popen(
        ["bash", "-c", JOB, "job", str(STATE / id), log],
        start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    wait_for(STATE / f"{id}.pid")


def wait_for(path: Path) -> str:
    while not path.exists():
        time.sleep(0.01)
    return path.read_text().strip()


def state(id: str) -> str:
    code = STATE / f"{id}.code"
    if not code.exists():
        return "RUNNING"
    return "COMPLETED" if code.read_text() == "0\n" else "FAILED"


def sbatch(words: list[str]) -> None:
    given, _ = options(words)
    assert {"--parsable", "--requeue", "--wrap"} <= set(given) and given["--signal"] == "B:TERM@120"
    id = str(100 + len(list(STATE.glob("*.json"))))
    (STATE / f"{id}.sh").write_text(f"{given['--wrap']}\n")
    (STATE / f"{id}.json").write_text(json.dumps(given))
    start(id)
    print(f"{id};cluster")


def squeue(words: list[str]) -> None:
    ids = options(words)[0]["--jobs"].split(",")
    waiting = [id for id in ids if state(id) == "RUNNING"]
    if len(ids) == 1 and not waiting:
        sys.exit("slurm_load_jobs error: Invalid job id specified")
    print("\n".join(f"{id} RUNNING" for id in waiting))


def sacct(words: list[str]) -> None:
    if (STATE / "no_accounting").exists():
        sys.exit("Slurm accounting storage is disabled")
    id = options(words)[0]["--jobs"]
    print(f"{state(id)}|{wait_for(STATE / f'{id}.code')}:0")


def scancel(words: list[str]) -> None:
    given, (id,) = options(words)
    if state(id) == "RUNNING" and "--state" not in given:
        os.kill(int(wait_for(STATE / f"{id}.pid")), signal.SIGTERM if "--batch" in given else signal.SIGKILL)


def requeue(words: list[str]) -> None:
    (id,) = words
    os.kill(int(wait_for(STATE / f"{id}.pid")), signal.SIGKILL)
    wait_for(STATE / f"{id}.code")
    start(id)


if __name__ == "__main__":
    _, command, *words = sys.argv
    {"sbatch": sbatch, "squeue": squeue, "sacct": sacct, "scancel": scancel, "requeue": requeue}[command](words)
