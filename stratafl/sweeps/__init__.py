"""Sweeps: a grid of named experiments, executors that run them, and a table over seeds."""

from stratafl.sweeps.executors import Executor, Job, LocalExecutor, RayExecutor, SlurmExecutor
from stratafl.sweeps.grid import Sweep, SweepEntry, note_target, noted_target
from stratafl.sweeps.state import RunState, run_states, summary_line
from stratafl.sweeps.sweep import Outcome, SweepResult, run_all
from stratafl.sweeps.table import GroupSummary, table
from stratafl.sweeps.task import RunTask

__all__ = [
    "Executor",
    "GroupSummary",
    "Job",
    "LocalExecutor",
    "Outcome",
    "RayExecutor",
    "RunState",
    "RunTask",
    "SlurmExecutor",
    "Sweep",
    "SweepEntry",
    "SweepResult",
    "note_target",
    "noted_target",
    "run_all",
    "run_states",
    "summary_line",
    "table",
]
