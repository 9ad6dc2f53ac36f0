"""Arguments of the newest release of transformers, and those that scripts pass by position, with metadata.

The stated releases are among v4.1, v4.15, v4.30, v4.40, v4.48, v4.57, v5.0 and v5.23, so an argument may be slightly
older. Old arguments have their exact releases.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

from hftrainer.arguments.choices import (
    LOG_LEVELS,
    HubStrategy,
    IntervalStrategy,
    OptimizerNames,
    SaveStrategy,
    SchedulerType,
)
from hftrainer.arguments.fields.argument import SCRIPT_SUBJECT, arg, begin_subject, old_name, to_name

_EVALUATION = "Evaluation"


@dataclass
class CurrentArguments:
    """The arguments of training, by subject.

    The first ones may be passed by position, in the order on which v4.15 to v4.57 agree.
    """

    begin_subject("Output folder and batch size")

    output_dir: str | None = arg(
        None,
        "Folder for checkpoints and the final model; None means 'trainer_output'. Required until v4.48.",
        "4.1",
        "mapped: default_root_dir",
        read_once=False,
        neutral_value="trainer_output",
    )
    overwrite_output_dir: bool = arg(
        False, "Whether your script overwrites the folder.", "4.0", "inert: a switch for your script", until="4.57"
    )
    do_train: bool = arg(
        False, "Whether your script trains.", "4.1", "inert: a switch for your script", subject=SCRIPT_SUBJECT
    )
    do_eval: bool = arg(
        False,
        "Whether your script evaluates.",
        "4.1",
        "inert: a switch for your script, which eval_strategy sets too",
        subject=SCRIPT_SUBJECT,
    )
    do_predict: bool = arg(
        False, "Whether your script predicts.", "4.1", "inert: a switch for your script", subject=SCRIPT_SUBJECT
    )
    eval_strategy: IntervalStrategy | str = arg(
        "no", "When to evaluate: 'no', 'steps' or 'epoch'.", "4.48", choices=IntervalStrategy, subject=_EVALUATION
    )
    prediction_loss_only: bool = arg(False, "Return the loss only, no predictions.", "4.1", subject=_EVALUATION)
    per_device_train_batch_size: int = arg(
        8, "Samples per device in a micro-batch, one forward and backward pass.", "4.1", minimum=1, read_once=True
    )
    per_device_eval_batch_size: int = arg(8, "Samples per device in an evaluation batch.", "4.1", minimum=1)
    per_gpu_train_batch_size: int | None = old_name(None, to_name("per_device_train_batch_size"), "4.0", "4.57")
    per_gpu_eval_batch_size: int | None = old_name(None, to_name("per_device_eval_batch_size"), "4.0", "4.57")
    gradient_accumulation_steps: int = arg(
        1, "Micro-batches in an optimizer step.", "4.1", "mapped: accumulate_grad_batches", minimum=1, read_once=False
    )
    eval_accumulation_steps: int | None = arg(
        None,
        "Evaluation batches whose outputs stay on the device; None moves each immediately.",
        "4.1",
        subject=_EVALUATION,
    )
    _: KW_ONLY

    begin_subject("Length of training and learning-rate schedule")

    num_train_epochs: float = arg(3.0, "Epochs, passes over the data, of training; 2.5 ends within the third.", "4.1")
    max_steps: int = arg(-1, "Optimizer steps of training; a value above 0 overrides `num_train_epochs`.", "4.1")
    lr_scheduler_type: SchedulerType | str = arg(
        "linear", "How the learning rate changes after warm-up: 'linear' falls to 0.", "4.15", choices=SchedulerType
    )
    lr_scheduler_kwargs: dict[str, Any] | str | None = arg(
        None, "Further keyword arguments of the scheduler, as a dict or a JSON object.", "4.40", json=True
    )
    warmup_steps: float = arg(
        0, "Optimizer steps of linear warm-up from 0; a value below 1 is a fraction of all steps.", "4.1", minimum=0
    )
    auto_find_batch_size: bool = arg(False, "Retry with a smaller micro-batch after running out of memory.", "4.30")

    begin_subject("Optimizer, loss and gradients")

    learning_rate: float = arg(5e-5, "Peak, after warm-up; then it follows `lr_scheduler_type`.", "4.1", minimum=0)
    optim: OptimizerNames | str = arg(
        "adamw_torch_fused",
        "Name of the optimizer (v4.0: always AdamW).",
        "4.30",
        choices=OptimizerNames,
        past_defaults={"4.30": "adamw_hf", "4.53": "adamw_torch"},
    )
    optim_args: str | None = arg(None, "Further settings of the optimizer, as 'name=value,name=value'.", "4.30")
    optim_target_modules: None | str | list[str] = arg(
        None, "Modules whose gradients GaLore or APOLLO projects, by name or regular expression.", "4.40"
    )
    weight_decay: float = arg(
        0.0, "Decoupled weight decay, except for biases and normalization layers.", "4.1", minimum=0
    )
    adam_beta1: float = arg(0.9, "Decay of Adam's first moment, per optimizer step.", "4.1", minimum=0, upper_bound=1)
    adam_beta2: float = arg(
        0.999, "Decay of Adam's second moment, per optimizer step.", "4.1", minimum=0, upper_bound=1
    )
    adam_epsilon: float = arg(1e-8, "Adam's epsilon.", "4.1", minimum=0)
    max_grad_norm: float = arg(
        1.0, "Clip the 2-norm of all gradients to this value; 0 or None disables clipping.", "4.1"
    )
    average_tokens_across_devices: bool = arg(
        True, "Count `num_items_in_batch` over all processes.", "4.48", past_defaults={"4.53": False}
    )
    label_smoothing_factor: float = arg(
        0.0, "Probability mass taken from the label, below 1.", "4.15", minimum=0, upper_bound=1, read_once=True
    )
    neftune_noise_alpha: float | None = arg(
        None, "Scale of NEFTune's noise on the embeddings.", "4.40", minimum=0, read_once=True
    )

    begin_subject("Precision, compilation, activation checkpointing")

    bf16: bool = arg(
        False, "Forward pass under bfloat16 autocast; weights stay float32.", "4.15", "mapped: precision: bf16-mixed"
    )
    fp16: bool = arg(
        False,
        "Forward pass under float16 autocast with loss scaling.",
        "4.1",
        "mapped: precision: 16-mixed, on a CPU too, where transformers trains in float32",
    )
    bf16_full_eval: bool = arg(False, "Cast the weights to bfloat16 for evaluation.", "4.15")
    fp16_full_eval: bool = arg(False, "Cast the weights to float16 for evaluation.", "4.15")
    tf32: bool | None = arg(
        None, "Allow TF32 matrix products; None allows them in compiled models.", "4.15", read_once=True
    )
    activation_checkpointing: bool | None = arg(
        None,
        "Recompute activations to save memory; older name: `gradient_checkpointing`; either works.",
        "5.23",
        const=True,
        neutral_value=False,
    )
    activation_checkpointing_kwargs: dict[str, Any] | str | None = arg(
        None, "Keyword arguments of `activation_checkpointing`, as a dict or a JSON object.", "5.23", json=True
    )
    gradient_checkpointing: bool | None = arg(
        None,
        "Recompute activations to save memory; since v5.23 also named `activation_checkpointing`.",
        "4.15",
        const=True,
        neutral_value=False,
    )
    gradient_checkpointing_kwargs: dict[str, Any] | str | None = arg(
        None, "Keyword arguments of `gradient_checkpointing`, as a dict or a JSON object.", "4.40", json=True
    )
    torch_compile: bool = arg(False, "Compile the model with `torch.compile`.", "4.30", read_once=True)
    torch_compile_backend: str | None = arg(
        None, "Backend of `torch.compile`; setting it turns compilation on.", "4.30", read_once=True
    )
    torch_compile_mode: str | None = arg(
        None, "Mode of `torch.compile`; setting it turns compilation on.", "4.30", read_once=True
    )
    use_liger_kernel: bool = arg(False, "Replace layers with Liger kernels.", "4.48")
    liger_kernel_config: dict[str, Any] | str | None = arg(
        None, "Which Liger kernels to apply, as a dict or as a JSON object.", "4.57", json=True
    )
    use_cache: bool = arg(False, "The model's `config.use_cache` during training.", "5.0", read_once=True)
    torch_empty_cache_steps: int | None = arg(
        None, "Optimizer steps after which the device's cache is emptied again; None never empties it.", "4.48"
    )

    begin_subject("Data and batches")

    seed: int = arg(42, "Seed of Python, NumPy and torch, set when the Trainer is built.", "4.1", minimum=0)
    data_seed: int | None = arg(
        None, "Seed of the data order; None uses torch's seed when training starts.", "4.30", read_once=True
    )
    full_determinism: bool = arg(
        False, "Use only torch's deterministic kernels, which are slower.", "4.30", "mapped: deterministic"
    )
    dataloader_drop_last: bool = arg(False, "Drop the last batch if it is not full.", "4.1")
    dataloader_num_workers: int = arg(
        0, "Loader workers per training process; 0 loads in the training process.", "4.1", minimum=0
    )
    dataloader_pin_memory: bool = arg(True, "Load batches into pinned memory if the run uses an accelerator.", "4.15")
    dataloader_persistent_workers: bool = arg(False, "Keep the loader workers alive between epochs.", "4.40")
    dataloader_prefetch_factor: int | None = arg(None, "Batches prefetched per worker.", "4.40")
    dataloader_multiprocessing_context: str | None = arg(
        None, "Start method of the loader workers.", "5.23", choices=["fork", "spawn", "forkserver"]
    )
    dataloader_in_order: bool = arg(True, "Yield batches in the sampler's order, not as workers finish them.", "5.23")
    remove_unused_columns: bool = arg(True, "Drop the columns that the model's `forward` does not accept.", "4.1")
    label_names: list[str] | None = arg(
        None, "Inputs that are labels; None finds them in the signature of `forward`.", "4.1", read_once=True
    )
    train_sampling_strategy: str = arg(
        "random",
        "Order of the training samples.",
        "5.23",
        choices=["random", "sequential", "group_by_length", "batch_rebalance"],
    )
    length_column_name: str = arg("length", "Column with sample lengths, for 'group_by_length'.", "4.15")

    begin_subject("Logging and trackers")

    logging_strategy: IntervalStrategy | str = arg(
        "steps", "When to log: 'no', 'steps' or 'epoch'.", "4.15", choices=IntervalStrategy
    )
    logging_steps: float = arg(
        500, "Optimizer steps between two log lines; a value below 1 is a fraction of all steps.", "4.1"
    )
    logging_first_step: bool = arg(False, "Also log the first optimizer step.", "4.1")
    logging_nan_inf_filter: bool = arg(
        True, "Exclude nan and inf losses from the logged mean; gradients do not change.", "4.15"
    )
    log_on_each_node: bool = arg(True, "With several nodes, log on the main process of each node.", "4.15")
    log_level: str = arg(
        "passive",
        "Level of the library's messages on the main process; 'passive' changes nothing.",
        "4.15",
        choices=LOG_LEVELS,
        read_once=True,
    )
    log_level_replica: str = arg(
        "warning",
        "Level of the library's messages on the other processes.",
        "4.15",
        choices=LOG_LEVELS,
        read_once=True,
        past_defaults={"4.15": "passive"},
    )
    disable_tqdm: bool | None = arg(
        None,
        "Print log lines instead of a progress bar; None decides by the log level.",
        "4.1",
        read_once=True,
        neutral_value=False,
    )
    include_num_input_tokens_seen: str | bool = arg("no", "Count input tokens: 'no', 'all' or 'non_padding'.", "4.40")
    report_to: None | str | list[str] = arg(
        "none",
        "Trackers to write to, a name or a list: 'none', 'all', 'azure_ml', 'clearml', 'codecarbon', 'comet_ml', "
        "'csv', 'dagshub', 'dvclive', 'flyte', 'kubeflow', 'mlflow', 'swanlab', 'tensorboard', 'trackio', 'wandb'.",
        "4.15",
        read_once=True,
        past_defaults={"4.57": "all"},
    )
    run_name: str | None = arg(None, "Name of the run in the trackers.", "4.1")
    project: str = arg("huggingface", "Name of the project in Trackio.", "4.57")
    trackio_space_id: str | None = arg(
        None, "Space that shows the Trackio dashboard.", "4.57", past_defaults={"5.5": "trackio"}
    )
    trackio_bucket_id: str | None = arg(None, "Bucket that stores the Trackio data.", "5.23")
    trackio_static_space_id: str | None | Literal[False] = arg(None, "Static Space for the Trackio dashboard.", "5.23")

    begin_subject(_EVALUATION)

    eval_steps: float | None = arg(
        None,
        "Optimizer steps between evaluations; a value below 1 is a fraction of all steps; None uses `logging_steps`.",
        "4.1",
    )
    eval_delay: float = arg(
        0, "Epochs or optimizer steps (the unit of `eval_strategy`) before the first evaluation.", "4.30"
    )
    eval_on_start: bool = arg(False, "Evaluate once before the first optimizer step.", "4.48")
    eval_do_concat_batches: bool = arg(True, "Concatenate the outputs of all batches; False returns a list.", "4.40")
    eval_use_gather_object: bool = arg(
        False, "Gather lists of any objects from all processes, one item per sample.", "4.48"
    )
    include_for_metrics: list[str] = arg(list, "Additional inputs of `compute_metrics`: 'inputs', 'loss'.", "4.48")
    batch_eval_metrics: bool = arg(False, "Call `compute_metrics(..., compute_result=...)` for each batch.", "4.48")
    metric_for_best_model: str | None = arg(None, "Metric that tells the best checkpoint, as 'f1' or 'eval_f1'.", "4.1")
    greater_is_better: bool | None = arg(
        None, "Whether a greater metric is better; None means yes, unless its name ends in 'loss'.", "4.1"
    )

    begin_subject("Saving and resuming")

    save_strategy: SaveStrategy | str = arg(
        "steps", "When to save: 'no', 'steps', 'epoch' or 'best' (at each new best).", "4.15", choices=SaveStrategy
    )
    save_steps: float = arg(
        500, "Optimizer steps between checkpoints; a value below 1 is a fraction of all steps.", "4.1"
    )
    save_total_limit: int | None = arg(
        None, "Checkpoints to keep, always including the best and the newest; None and 0 keep all.", "4.1"
    )
    save_only_model: bool = arg(
        False, "Save no optimizer, scheduler or random states; such a run cannot resume.", "4.40"
    )
    save_on_each_node: bool = arg(False, "With several nodes, write to the disk of each node.", "4.15")
    enable_jit_checkpoint: bool = arg(False, "On SIGTERM, save once and return from train().", "5.0", read_once=True)
    load_best_model_at_end: bool = arg(False, "Load the weights of the best checkpoint after training.", "4.1")
    resume_from_checkpoint: str | None = arg(
        None,
        "A folder, or 'auto' for the newest, which your script passes to `train()`.",
        "4.15",
        "inert: for your script",
    )
    ignore_data_skip: bool = arg(
        False, "On resume, restart the epoch's data, instead of skipping the batches already used.", "4.1"
    )
    restore_callback_states_from_checkpoint: bool = arg(
        False, "On resume, restore callbacks that export their state.", "4.48"
    )

    begin_subject("The Hugging Face Hub")

    push_to_hub: bool = arg(False, "Upload model and model card to the Hub, as `hub_strategy` says.", "4.15")
    hub_model_id: str | None = arg(None, "Repository 'owner/name'; None takes the name of `output_dir`.", "4.15")
    hub_strategy: HubStrategy | str = arg(
        "every_save",
        "When to upload: 'end', 'every_save', 'checkpoint' (also the last checkpoint at every save) or "
        "'all_checkpoints' (also every checkpoint).",
        "4.15",
        choices=HubStrategy,
    )
    hub_token: str | None = arg(None, "Token for the upload; None uses the token of `hf auth login`.", "4.15")
    hub_private_repo: bool | None = arg(
        None, "Whether a new repository is private.", "4.30", past_defaults={"4.40": False}
    )
    hub_always_push: bool = arg(
        False, "Wait for a running upload; otherwise a save during an upload is not uploaded.", "4.40"
    )
    hub_revision: str | None = arg(None, "Branch to upload to; it must exist.", "4.57")

    begin_subject("Devices and processes")

    use_cpu: bool = arg(False, "Train on the CPU even if an accelerator is available.", "4.40", "mapped: accelerator")
    local_rank: int = arg(
        -1,
        "Rank of this process on its node; launchers set it in the environment.",
        "4.1",
        "inert: launchers set it; the rank is read from the environment",
    )
    accelerator_config: dict[str, Any] | str | Any | None = arg(
        None,
        "How data is distributed to processes: an `AcceleratorConfig`, a dict of its keys, or the path of a JSON file.",
        "4.40",
        json=True,
        read_once=True,
    )
    parallelism_config: dict[str, Any] | str | Any | None = arg(
        None,
        "accelerate's `ParallelismConfig`, or a dict of its sizes, each a number of processes: `dp_shard_size`, ...",
        "4.57",
        "mapped: strategy: ModelParallelStrategy; dp_shard_size means FSDP2, also without fsdp",
        json=True,
    )
    ddp_find_unused_parameters: bool | None = arg(
        None, "DDP: whether some parameters may lack a gradient.", "4.15", "mapped: strategy: find_unused_parameters"
    )
    ddp_bucket_cap_mb: int | None = arg(
        None, "`bucket_cap_mb` of DDP, in MiB.", "4.15", "mapped: strategy: bucket_cap_mb"
    )
    ddp_broadcast_buffers: bool | None = arg(
        None, "`broadcast_buffers` of DDP.", "4.40", "mapped: strategy: broadcast_buffers"
    )
    ddp_static_graph: bool | None = arg(None, "`static_graph` of DDP.", "5.23", "mapped: strategy: static_graph")
    ddp_backend: str | None = arg(
        None, "Communication backend: 'nccl', 'gloo', ...", "4.30", "mapped: strategy: process_group_backend"
    )
    ddp_timeout: int = arg(1800, "Seconds until a collective operation times out.", "4.30", "mapped: strategy: timeout")
    fsdp: str | None = arg(
        None,
        "Train with FSDP: options such as 'full_shard', separated by spaces.",
        "4.30",
        "mapped: strategy: FSDPStrategy or ModelParallelStrategy",
        const=True,
    )
    fsdp_config: dict[str, Any] | str | None = arg(
        None,
        "FSDP settings: a dict or the path of a JSON file.",
        "4.30",
        "mapped: how fsdp shards the model",
        json=True,
    )
    deepspeed: dict[str, Any] | str | None = arg(
        None,
        "Train with DeepSpeed, by these settings: a dict, or the path of a JSON file.",
        "4.15",
        "mapped: strategy: DeepSpeedStrategy",
        json=True,
    )

    begin_subject("Debugging aids")

    # With None as the second member, both argument parsers use `str`; `arg` sets `nargs`.
    debug: str | None | list[str] = arg(
        "",
        "Debugging aids, separated by spaces: 'underflow_overflow', on TPUs 'tpu_metrics_debug'.",
        "4.1",
        const=True,
        accepts_several=True,
    )
    skip_memory_metrics: bool = arg(True, "Do not report memory metrics.", "4.15", read_once=True)
