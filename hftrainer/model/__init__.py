"""Inspecting a model, and the changes that arguments make to it."""
