"""The random numbers that a module draws while it trains, from each client's own stream."""
