"""Hyperparameter search with Ray Tune."""
