"""Checks for unsupported combinations of arguments, before anything runs; each yields sentences."""
