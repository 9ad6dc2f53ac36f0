"""The parts of a model card: results, hyperparameters, the provenance of model and data, and the files."""
