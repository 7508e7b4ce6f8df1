"""Utilities without machine learning: errors, trees, random streams, files, states."""
