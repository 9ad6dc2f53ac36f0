"""The training arguments: their declarations, checks and parsed values."""
