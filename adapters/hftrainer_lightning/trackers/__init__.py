"""Trackers that write through Lightning's loggers, with the names that transformers uses."""
