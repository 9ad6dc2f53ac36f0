"""Trackers by Lightning's loggers, with the names that transformers writes."""
