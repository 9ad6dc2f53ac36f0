"""Puts a Trainer together: all its parts, and what its arguments decide when it is made."""
