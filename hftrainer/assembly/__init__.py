"""Builds a Trainer: engine, accelerator, callbacks, and the rooms behind `_hftrainer`."""
