"""Which periods, participation, learning rate, batch and method are cheapest on a network: found by
training and pricing, not by a bound."""
