"""What a pass over an evaluation or test set collects, and the metrics it makes of that."""
