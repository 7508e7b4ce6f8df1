"""Shared by all papers: series of experiments, their runs, results, claims and reports."""
