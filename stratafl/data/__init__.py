"""Data sets, ways to split them over a tree, and the batches a client draws."""
