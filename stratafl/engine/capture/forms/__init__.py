"""The form of an operation over all clients: one file for each kind of operation."""
