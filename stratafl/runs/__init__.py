"""Run directories: written while a run goes on, read by everything else. docs/runs.md describes the
files."""

from stratafl.runs.reader import StoredRun, list_runs, read_run

__all__ = ["StoredRun", "list_runs", "read_run"]
