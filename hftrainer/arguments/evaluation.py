"""When to evaluate the model, and what evaluation returns."""

from __future__ import annotations

from dataclasses import dataclass

from hftrainer.arguments._field import arg
from hftrainer.arguments.choices import IntervalStrategy


@dataclass(kw_only=True)
class EvaluationArguments:
    """Evaluation, during training and on its own."""

    eval_strategy: IntervalStrategy | str = arg("no", "When to evaluate: 'no', 'steps' or 'epoch'.")
    eval_steps: float | None = arg(
        None, "Optimizer steps between evaluations; below 1 a fraction of all steps; None uses `logging_steps`."
    )
    eval_delay: float = arg(0, "Epochs or optimizer steps, after `eval_strategy`, before the first evaluation.")
    eval_on_start: bool = arg(False, "Evaluate once before the first optimizer step.")
    per_device_eval_batch_size: int = arg(8, "Samples per device in an evaluation batch.")
    prediction_loss_only: bool = arg(False, "Return the loss only, no predictions.")
    eval_accumulation_steps: int | None = arg(
        None, "Batches whose outputs stay on the device before they move to the CPU; None moves each batch at once."
    )
    eval_do_concat_batches: bool = arg(True, "Concatenate the outputs of all batches; False returns a list.")
    eval_use_gather_object: bool = arg(
        False, "Gather lists of any objects from all processes, one item per sample; otherwise only tensors."
    )
    eval_memmap_dir: str | None = arg(
        None,
        "Folder for predictions in memory-mapped temporary files; None keeps them in memory. Only hftrainer has this "
        "argument.",
    )
    include_for_metrics: list[str] = arg(
        help="What `compute_metrics` gets besides predictions and labels: 'inputs', 'loss'.", factory=list
    )
    batch_eval_metrics: bool = arg(
        False,
        "Call `compute_metrics(prediction, compute_result=...)` batch by batch; the last call returns the metrics.",
    )
    metric_for_best_model: str | None = arg(None, "Metric that compares models, with or without 'eval_'.")
    greater_is_better: bool | None = arg(
        None, "Whether a greater metric is better; None: yes, unless its name ends in 'loss'."
    )
