"""Recordings of modules, and training by them."""
