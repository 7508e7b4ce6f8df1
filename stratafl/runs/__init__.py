"""Run folders: written during a run, read by all other commands. docs/runs.md describes the
files."""

from stratafl.runs.reader import StoredRun, list_runs, read_run

__all__ = ["StoredRun", "list_runs", "read_run"]
