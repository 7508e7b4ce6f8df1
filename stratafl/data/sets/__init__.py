"""The data sets there are: prepared from their published files, and read."""
