"""Process of a sweep that takes runs from its standard input, one JSON line each, and answers in
JSON lines.

{"name": ..., "config": ..., "folder": ..., "resume": null or a run's path, "force": ...} ->
{"event": "began", "rounds": ..., "done": ...}, {"event": "round", ...}, {"event": "ended",
"status": ...}
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any, TextIO

import torch

from stratafl.base.errors import error_message
from stratafl.base.signals import Interrupted
from stratafl.experiment.experiment import Experiment
from stratafl.metrics.records import RoundResult
from stratafl.runs import format
from stratafl.runs.session import RunSession


class Answers:
    """Tells the sweep's process what a worker does, a line of JSON for each event."""

    def __init__(self, out: TextIO):
        self.out = out

    def send(self, event: str, **values: Any) -> None:
        try:
            self.out.write(json.dumps({"event": event, **values}) + "\n")
            self.out.flush()
        except OSError:
            # nobody listens any more: save the run and go, as if asked to
            os.kill(os.getpid(), signal.SIGTERM)


def work(task: dict[str, Any], answers: Answers) -> None:
    """Do one run of a sweep, and say how it goes on and ends."""
    path: Path | None = None

    def watch(record: RoundResult) -> None:
        answers.send("round", round=record.round, metrics=record.metrics)

    def say(text: str) -> None:
        answers.send("said", text=text)

    try:
        experiment = Experiment.from_table(task["config"]).one_of_many()
        if task["resume"] is not None:
            path = Path(task["resume"])
            session = RunSession.resume(path, experiment, say=say, force=task["force"])
        else:
            session = RunSession.start(experiment, task["name"], Path(task["folder"]))
            path = session.path
        for note in session.simulation.notes:
            say(note)
        answers.send("began", path=str(path), rounds=session.simulation.rounds, done=len(session.simulation.history))
        session.run(watch)
        status, reason = format.DONE, ""
    except Interrupted:
        status, reason = format.INTERRUPTED, "it was stopped"
    except Exception as problem:
        status, reason = format.FAILED, error_message(problem)
    answers.send("ended", status=status, reason=reason, path=str(path) if path else None)


def main() -> None:
    """Do the runs that the sweep names on the standard input."""
    # Ctrl-C reaches every process of a terminal; the sweep's own decides, and asks with SIGTERM
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # what a user's own code prints must not be taken for an answer
    answers = Answers(os.fdopen(os.dup(1), "w"))
    os.dup2(2, 1)
    threads, place = int(sys.argv[1]), int(sys.argv[2])
    if torch.cuda.is_available():
        torch.cuda.set_device(place % torch.cuda.device_count())
    answers.send("ready")
    for line in sys.stdin:
        if threads:
            torch.set_num_threads(threads)
        work(json.loads(line), answers)


if __name__ == "__main__":
    main()
