"""The output folder at a URL: background uploads, and downloads of checkpoints to resume."""
