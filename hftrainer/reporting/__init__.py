"""What a run tells: log lines, progress bars, trackers, memory, plots."""
