"""Runs on several processes, called ranks, each with a part of the tree."""
