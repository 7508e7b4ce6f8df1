"""Comparison of every kernel with PyTorch in float64."""
