"""Reports of a run: metrics, trackers, memory, plots."""
