"""An epoch, its micro-batches and optimizer steps: their order, the data and the loss."""
