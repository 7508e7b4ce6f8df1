"""What makes the change of a leaf's model out of its directions."""
