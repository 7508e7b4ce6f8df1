"""Data sets that ship with the package or are prepared from published files."""
