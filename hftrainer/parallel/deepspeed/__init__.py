"""DeepSpeed: its configuration, its start, its engine in a run."""
