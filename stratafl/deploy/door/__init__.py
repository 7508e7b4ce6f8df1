"""What is let in at a port: who, how much, for how long."""
