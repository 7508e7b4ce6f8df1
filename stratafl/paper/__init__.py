"""The paper's experiments: its tables and figures, run again and judged."""
