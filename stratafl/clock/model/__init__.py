"""Links and devices, what is drawn of them for each node, and the time line of a global round."""
