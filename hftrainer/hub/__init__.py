"""The Hugging Face Hub: a repository, the uploads to it in the background, and resuming from it."""
