"""What the papers share: series of experiments, their runs, results, claims and reports."""
