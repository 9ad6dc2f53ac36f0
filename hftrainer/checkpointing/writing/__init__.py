"""Writes a checkpoint folder, whole or not at all, at once or in the background."""
