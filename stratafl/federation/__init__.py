"""The algorithm on a tree: aggregation and the state of all nodes."""
