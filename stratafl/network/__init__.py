"""Links and devices of a federation, and the time line of rounds on them."""
