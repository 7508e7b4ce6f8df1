"""What a federation is: rules' contract, leaf's step, schedule, rows of a module, meetings,
records."""
