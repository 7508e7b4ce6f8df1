"""Stored runs put on the time line of a network: who took part, what was sent, what that took."""
