"""Search for the cheapest setting that reaches a target."""
