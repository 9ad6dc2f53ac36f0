"""Reports of a run: metrics, memory, plots."""
