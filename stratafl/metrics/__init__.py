"""What is measured and recorded during a run."""
