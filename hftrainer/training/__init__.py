"""One call of `train()`: its schedule, its loop, its losses, its interruption."""
