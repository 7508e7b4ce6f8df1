"""Ways to train the leaves; the loop engine is the reference."""
