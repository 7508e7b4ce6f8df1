"""Stored runs, looked at: compared in tables, drawn as figures, and as one page that opens
offline."""
