"""The command that writes a project to begin with."""
