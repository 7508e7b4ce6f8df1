"""Identity of runs, whether they are current, and how they are extended."""
