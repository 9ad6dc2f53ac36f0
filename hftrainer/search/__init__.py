"""Hyperparameter search: one module per backend, and their shared parts."""
