"""Partition of a data set over the clients of a tree."""
