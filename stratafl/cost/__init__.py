"""What stored runs cost on a network: time, energy, traffic, money."""
