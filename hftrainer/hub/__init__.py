"""The Hugging Face Hub: opens a repository, uploads in the background, and downloads to resume."""
