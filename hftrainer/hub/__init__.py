"""The Hugging Face Hub: opening a repository, uploading to it in the background, and resuming from it."""
