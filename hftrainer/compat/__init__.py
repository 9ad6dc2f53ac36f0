"""What may or may not be installed, what users put in the place of our methods, and transformers itself."""
