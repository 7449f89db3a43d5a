"""The command line: a file per command, and what the commands share."""
