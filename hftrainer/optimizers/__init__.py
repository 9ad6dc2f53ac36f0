"""Optimizers by name, learning-rate schedules, and parameter groups."""
