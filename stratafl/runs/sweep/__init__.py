"""Sweeps: a plan of named configs, worker processes that run them, and a table over seeds."""

from stratafl.runs.sweep.plan import Plan, PlannedRun, note_target, noted_target
from stratafl.runs.sweep.pool import Outcome, run_all
from stratafl.runs.sweep.table import Row, table

__all__ = ["Outcome", "Plan", "PlannedRun", "Row", "note_target", "noted_target", "run_all", "table"]
