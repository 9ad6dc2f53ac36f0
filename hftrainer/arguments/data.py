"""From dataset to batch."""

from __future__ import annotations

from dataclasses import dataclass

from hftrainer.arguments._field import arg


@dataclass(kw_only=True)
class DataArguments:
    """Seeds, samplers, loader workers, and which columns reach the model."""

    seed: int = arg(42, "Seed of Python, NumPy and torch, set when the Trainer is built.")
    data_seed: int | None = arg(None, "Seed of the data order; None uses torch's seed at the start of training.")
    full_determinism: bool = arg(False, "Deterministic torch kernels only; slower, for debugging.")
    dataloader_drop_last: bool = arg(False, "Drop the last batch if it is not full.")
    dataloader_num_workers: int = arg(0, "Processes that load data, per training process; 0 loads in this one.")
    dataloader_pin_memory: bool = arg(True, "Load batches into page-locked memory when there is an accelerator.")
    dataloader_persistent_workers: bool = arg(False, "Keep the loading processes alive between epochs.")
    dataloader_prefetch_factor: int | None = arg(None, "Batches loaded in advance, per loading process.")
    dataloader_multiprocessing_context: str | None = arg(
        None, "How loading processes are started.", choices=["fork", "spawn", "forkserver"]
    )
    dataloader_in_order: bool = arg(True, "Yield batches in the sampler's order, not as workers finish them.")
    remove_unused_columns: bool = arg(True, "Drop the columns that the model's `forward` does not take.")
    label_names: list[str] | None = arg(None, "Keys of the inputs that are labels; None finds them in `forward`.")
    train_sampling_strategy: str = arg(
        "random",
        "Order of the training samples.",
        choices=["random", "sequential", "group_by_length", "batch_rebalance"],
    )
    length_column_name: str = arg("length", "Column with sample lengths, for 'group_by_length'.")
