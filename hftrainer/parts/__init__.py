"""The parts of a Trainer, made from its arguments: loaders, model and optimizer, uploads."""
