"""Harness of all papers: series of experiments, their runs, results, claims and reports."""
