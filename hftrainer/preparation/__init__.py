"""What a run trains with: loaders, mixtures, the model with its optimizer and schedule."""
