"""One call of `train()`: schedule, loop, losses, checkpoints, signals."""
