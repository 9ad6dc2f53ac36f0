"""Passes over evaluation and test sets: their outputs, and the metrics computed from these."""
