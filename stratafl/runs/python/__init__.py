"""Runs of a Python program: the public function, and how they are kept in a run directory."""
