"""Reproductions of the experiments of publications with stratafl."""
