"""XLA devices: finding them, and sharding a model over them."""
