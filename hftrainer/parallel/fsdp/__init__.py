"""FSDP: its settings, and sharding a model with torch."""
