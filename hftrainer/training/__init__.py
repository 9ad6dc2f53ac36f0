"""One call of `train()`: schedule, events, losses, checkpoints, signals."""
