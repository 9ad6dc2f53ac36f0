"""Searches of hyperparameters with Ray Tune."""
