"""What a run puts into its checkpoints, and takes from them."""
