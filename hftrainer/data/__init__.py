"""From dataset to micro-batch: collators, samplers, loaders, accumulation windows, and the position in the data."""
