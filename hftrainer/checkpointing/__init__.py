"""The `checkpoint-xxx` folder: its name and files; writing, rotating and reading it.

In signatures, a `folder` holds a checkpoint or a model, also while it is staged, and a `run_folder` the checkpoints of
a run. A `resume_folder` is the checkpoint from which a run resumes, a `shard_folder` that of one state in a checkpoint,
and a `staging_path` where a checkpoint is written before it has its name.

The position in the data, also that of a stream, is saved in `RunProgress` (`run_progress.py`), and made by
`data/epoch_reader.py`.
"""
