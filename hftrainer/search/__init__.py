"""Hyperparameter search: a module for each backend, and what they share."""
