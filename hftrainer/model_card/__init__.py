"""The parts of a model card: its contents, and its files."""
