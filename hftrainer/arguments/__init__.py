"""The training arguments by subject, their checks, and their parsed values."""
