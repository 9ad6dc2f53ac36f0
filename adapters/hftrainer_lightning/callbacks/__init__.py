"""Support for Lightning's callbacks beyond their hooks: checkpoints, schedules, finders, pruning."""
