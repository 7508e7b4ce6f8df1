"""What is measured, counted and recorded of a run; nothing here changes it."""
