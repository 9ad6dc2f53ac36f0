"""From dataset to micro-batch: collators, samplers, loaders, and the position in the data."""
