"""From dataset to micro-batch: collators, column removal, samplers, and windows of micro-batches."""
