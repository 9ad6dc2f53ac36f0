"""Inspects a model, and makes the changes to it that arguments request."""
