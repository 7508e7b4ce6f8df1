"""What knows nothing of learning: errors, trees, random streams, files, states."""
