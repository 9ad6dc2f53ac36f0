"""Parts of a Trainer that outlive one `train()`: loaders, model, optimizer, uploads."""
