"""Optimizers and schedules that torch lacks."""
