"""Trackers: which ones a run has, and the callbacks that write to them."""
