"""XLA devices: detection, and sharding a model over them."""
