"""The commands of the command line, one module each: its flags, and what it does."""
