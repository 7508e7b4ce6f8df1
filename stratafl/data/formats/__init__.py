"""Readers of published file formats."""
