"""The contents and files of a model card."""
