"""What a model card is made of: the run's results and hyperparameters, and where model and data come from."""
