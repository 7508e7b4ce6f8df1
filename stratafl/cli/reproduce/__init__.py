"""The command that makes the paper's tables and figures."""
