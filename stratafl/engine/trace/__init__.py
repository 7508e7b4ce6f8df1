"""From a plain module to operations on all clients at once."""
