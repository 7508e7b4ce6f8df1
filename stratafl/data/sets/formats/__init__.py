"""Readers of the forms in which data sets are published; none of them runs code found in a file."""
