"""The `checkpoint-xxx` folder: its name and files; writing, rotating and reading it."""
