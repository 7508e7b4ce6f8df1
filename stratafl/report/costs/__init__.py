"""What settings cost on networks: numbers over seeds, tables, pictures."""
