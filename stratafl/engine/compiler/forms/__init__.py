"""Batching rules: how an operation is run for many clients at a time."""
