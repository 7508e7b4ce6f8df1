"""Contracts that every way to run a federation shares: rules, channels, schedules, a client's
training, and a model as rows of a matrix."""
