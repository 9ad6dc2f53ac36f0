"""From dataset to micro-batch: collators, samplers, loaders, and the position in the data.

`epoch_reader.py` has this position: a checkpoint's `RunProgress` holds `EpochReader.state_dict`, with that of a stream.
"""
