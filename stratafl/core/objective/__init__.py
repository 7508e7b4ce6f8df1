"""What a run is after: its loss, its metrics, and the values of them at which it may stop."""
