"""Capturing modules as graphs, and running these for all clients."""
