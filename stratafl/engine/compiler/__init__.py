"""A module's operations, captured once and run for many clients at a time."""
