"""From the operations that a module really executes to a program over all clients at once."""
