"""The transport: Flower's SuperLink, SuperNode and grid, in more of a hurry and in fewer
processes."""
