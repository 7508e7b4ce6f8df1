"""Hierarchical federated learning on trees of any depth, with multi-timescale gradient correction."""

__version__ = "0.1.0"
