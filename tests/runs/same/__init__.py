"""Which run it is, whether it is current, and how one goes further."""
