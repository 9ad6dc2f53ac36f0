"""Passes over evaluation and test sets: what they collect, and the metrics computed from it."""
