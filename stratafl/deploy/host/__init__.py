"""A host's sites: their processes, watched over, started again, looked at and stopped."""
