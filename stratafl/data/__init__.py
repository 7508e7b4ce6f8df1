"""Data sets, their partition over a tree, and batches of clients."""
