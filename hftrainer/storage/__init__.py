"""The output folder at a URL: uploads checkpoints in the background, and fetches them to resume."""
