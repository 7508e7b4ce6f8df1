"""Metrics, drift and communication of a run, and the records of its rounds."""
