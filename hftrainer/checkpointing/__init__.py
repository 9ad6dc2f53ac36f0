"""The `checkpoint-xxx` folder: its name, its files, how it is written, rotated and read."""
