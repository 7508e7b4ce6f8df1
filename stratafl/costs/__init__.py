"""Cost of stored runs on a network: time, energy, traffic, money."""
