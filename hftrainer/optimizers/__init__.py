"""Optimizers that torch lacks, and parameter groups that arguments select."""
