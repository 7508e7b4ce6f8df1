"""Description of an experiment: its options, its TOML files, and what it is made of."""
