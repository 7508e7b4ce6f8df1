"""The state of a simulated tree, level by level."""
