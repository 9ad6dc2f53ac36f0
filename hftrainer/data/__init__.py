"""From dataset to micro-batch: collators, column removal, samplers, and windows of micro-batches."""

from hftrainer.data.collators import DataCollatorWithPadding, default_data_collator

__all__ = ["DataCollatorWithPadding", "default_data_collator"]
