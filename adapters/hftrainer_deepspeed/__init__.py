"""DeepSpeed: its configuration, initialization, and engine."""
