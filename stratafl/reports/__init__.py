"""Comparison of stored runs: tables, figures, and a page that opens offline."""
