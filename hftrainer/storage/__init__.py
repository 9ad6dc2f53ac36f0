"""The output folder at a URL: checkpoints are written locally, uploaded in the background, and fetched to resume."""
