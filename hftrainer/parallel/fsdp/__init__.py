"""FSDP: its settings, their limits, and sharding a model with torch."""
