"""A site's folder: made from a topology, and from there to a node with its keys and its state."""
