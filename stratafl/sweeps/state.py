"""State of each run of a sweep: what is current, and what has to be trained, gone on with or
trained again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stratafl.experiment.experiment import Experiment
from stratafl.experiment.sections import Execution
from stratafl.runs import format
from stratafl.runs.provenance import changes_since, extensions, other_settings, shorten
from stratafl.runs.reader import StoredRun, scan

CURRENT, STALE, INTERRUPTED, FAILED, SHORTER, NEW, RUNNING = STATES = (
    *("current", "stale", "interrupted", "failed", "shorter", "new", "running"),
)
"""done as its experiment would compute it now; computed with something that was changed since;
stopped on the way; failed; done, and to go on for more rounds; not begun; being written by another
process."""


@dataclass(frozen=True)
class RunState:
    """State of one run of a sweep before the sweep."""

    name: str
    state: str
    rounds: int
    """Planned rounds."""
    round: int = 0
    """Rounds of the run that is current or goes on."""
    path: Path | None = None
    """Folder of the run that is current or goes on; None for one that begins."""
    reason: str = ""
    """What was changed since a stale run, or why a failed one failed."""
    messages: tuple[str, ...] = ()
    """What the user should know when the run is trained, or is not."""

    @property
    def is_settled(self) -> bool:
        """Whether there is nothing to do."""
        return self.state in (CURRENT, RUNNING)

    def __str__(self) -> str:
        progress = f" at round {self.round} of {self.rounds}" if self.state in (INTERRUPTED, SHORTER) else ""
        reason = f" ({self.reason})" if self.reason else ""
        return f"{self.state}{progress}{reason}"

    def as_dict(self) -> dict[str, Any]:
        return {**vars(self), "path": str(self.path or ""), "messages": list(self.messages)}


def run_states(
    experiments: Mapping[str, Experiment],
    folder: Path,
    say: Callable[[str], None] = lambda text: None,
    keep_stale: bool = False,
    computed_alike: bool = False,
) -> dict[str, RunState]:
    """State of each experiment's run in a folder, which need not exist."""
    stored: dict[str, list[StoredRun]] = {name: [] for name in experiments}
    for run in scan(folder) if folder.is_dir() else ():
        if not isinstance(run, StoredRun):
            say(f"not looked at: {run.reason}")
        elif run.name in experiments and (not computed_alike or is_computed_alike(run, experiments[run.name])):
            stored[run.name].insert(0, run)
    return {name: _state(name, stored[name], experiment, keep_stale) for name, experiment in experiments.items()}


def _state(name: str, runs: Sequence[StoredRun], experiment: Experiment, keep_stale: bool) -> RunState:
    """State by the runs of a name, the newest first."""
    # such as for lack of memory, of which there may be more on another device
    failed = [run for run in runs if run.status == format.FAILED and not is_computed_alike(run, experiment)]
    runs = [run for run in runs if run not in failed]
    changed = {run.id: changes_since(run, experiment) for run in runs}
    current = _preferred(run for run in runs if not changed[run.id])
    running = next((run for run in runs if run.status == format.RUNNING), None)

    def state_of(run: StoredRun, state: str, *messages: str, reason: str = "") -> RunState:
        return RunState(name, state, experiment.rounds, run.round, run.path, reason, messages)

    def state_to_go_on(run: StoredRun, *messages: str) -> RunState:
        if run.status == format.DONE:
            is_shorter = bool(extensions(run.config, experiment.to_table()))
            return state_of(run, SHORTER if is_shorter else CURRENT, *messages)
        reason = run.reason if run.status == format.FAILED else ""
        return state_of(run, FAILED if run.status == format.FAILED else INTERRUPTED, *messages, reason=reason)

    if running is not None and (current is None or current.status != format.DONE):
        return state_of(running, RUNNING)
    if current is not None:
        return state_to_go_on(current, *_other_execution(current, experiment))
    longer = next((run for run in runs if _goes_further(run, experiment)), None)
    if longer is not None:
        further = [f"goes on: {text}" for text in extensions(longer.config, experiment.to_table())]
        return state_to_go_on(longer, *further)
    if not runs:
        message = ["failed on another device, engine or precision; run again"] if failed else []
        state = FAILED if failed else NEW
        return RunState(name, state, experiment.rounds, reason=failed[0].reason if failed else "", messages=(*message,))
    if keep_stale:
        kept = _preferred(run for run in runs if not other_settings(run.config, experiment.to_table()))
        if kept is not None:
            return state_to_go_on(kept, f"{shorten(changed[kept.id])} since; kept all the same")
    reason = shorten(changed[runs[0].id])
    return RunState(name, STALE, experiment.rounds, reason=reason, messages=(f"{reason} since; run again",))


def _preferred(runs: Iterable[StoredRun]) -> StoredRun | None:
    """The newest run that is done, or else the newest."""
    runs = list(runs)
    return next((run for run in runs if run.status == format.DONE), runs[0] if runs else None)


def _goes_further(run: StoredRun, experiment: Experiment) -> bool:
    """Whether a run becomes that of an experiment by more rounds, and has something to go on
    from."""
    before, table = run.config.get("evaluation", {}), experiment.to_table()
    if before.get("stop_when") != table["evaluation"]["stop_when"] or run.round > experiment.rounds:
        return False
    has_state = run.status != format.DONE or any((run.path / format.CHECKPOINTS).glob("*"))
    return has_state and changes_since(run, experiment) == extensions(run.config, table)


def is_computed_alike(run: StoredRun, experiment: Experiment) -> bool:
    """Whether a stored run was computed where and how exactly an experiment asks for."""
    defaults, asked = Execution().__dict__, experiment.execution.__dict__
    return {**defaults, **run.config.get("execution", {})} == {**defaults, **asked}


def _other_execution(run: StoredRun, experiment: Experiment) -> list[str]:
    """A precision that was asked for and is not that of the run."""
    asked = experiment.execution.precision
    was = run.config.get("execution", {}).get("precision", asked)
    return [] if was == asked else [f"was computed in {was}, and is not again in {asked}"]


def summary_line(states: Iterable[RunState]) -> str:
    """Number of runs in each state, with what was changed since the stale ones, in one line."""
    states = list(states)
    counts = Counter(state.state for state in states)
    parts = []
    for name in STATES:
        if counts[name]:
            alike = [state for state in states if state.state == name]
            about = alike[0] if name == INTERRUPTED and len(alike) == 1 else None
            reasons = list(dict.fromkeys(state.reason for state in alike)) if name == STALE else []
            detail = f" at round {about.round} of {about.rounds}" if about else ""
            parts.append(f"{counts[name]} {name}{detail}" + (f" ({shorten(reasons)})" if reasons else ""))
    runs = f"{len(states)} run{'' if len(states) == 1 else 's'}"
    return f"{runs}: {', '.join(parts)}"
