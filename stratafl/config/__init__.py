"""A run as data, and from there to what a run is made of."""
