"""The parts of a model card: what it tells, and its files."""
