"""What is found out about a model, and what arguments change about it."""
