"""Compatibility: optional libraries, overrides of our methods, and transformers itself."""
