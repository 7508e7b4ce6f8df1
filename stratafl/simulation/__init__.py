"""A run: schedule, rules and engine, as a stream of round results."""
