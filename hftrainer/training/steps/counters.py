"""Counts the tokens and floating-point operations of a run's batches."""

from __future__ import annotations

from typing import Any

import torch

from hftrainer.arguments import old_names
from hftrainer.arguments.choices import token_counting_mode
from hftrainer.base.nested import find_batch_size
from hftrainer.base.part import Part
from hftrainer.compat import libraries
from hftrainer.data.collators import count_tokens
from hftrainer.trainer_utils import speed_metrics


class Counters(Part):
    """Counts the tokens and floating-point operations of the batches of all ranks, for the state and the log lines.

    Attributes:
        model_and_flos_per_token: a model, and its floating-point operations per token.
    """

    model_and_flos_per_token: tuple[Any, int] | None = None

    def track_tokens(self, inputs: dict[str, Any]) -> None:
        """Count the input tokens of a micro-batch over all ranks, if an argument requests it."""
        if old_names.old_argument(self.trainer.args, "include_tokens_per_second") and "input_ids" in inputs:
            self.run.attempt.trained_tokens += (
                inputs["input_ids"].numel() * self.trainer.accelerator.processes.data_world_size
            )
        mode = token_counting_mode(self.trainer.args.include_num_input_tokens_seen)
        if mode == "no":
            return
        main_input = getattr(self.trainer.model, "main_input_name", "input_ids")
        tokens = count_tokens(inputs, main_input, mode, getattr(self.trainer.processing_class, "pad_token_id", None))
        if tokens is not None:
            self.trainer.state.num_input_tokens_seen += int(self.sum_over_data(tokens))

    def token_metrics(self, start_time: float | None) -> dict[str, float]:
        """Input tokens seen so far, and tokens per second since `start_time`, if arguments request them."""
        if token_counting_mode(self.trainer.args.include_num_input_tokens_seen) == "no":
            return {}
        tokens = self.trainer.state.num_input_tokens_seen
        metrics: dict[str, float] = {"num_input_tokens_seen": tokens}
        if start_time is not None and self.parts.policy.logs_tokens_per_second:
            metrics |= speed_metrics("train", start_time, num_tokens=tokens - self.run.attempt.initial_tokens_seen)
        return metrics

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Floating-point operations of forward and backward on a batch; 0 if unknown.

        These are 6 per token and parameter.
        """
        model: Any = self.trainer.model
        if not self.parts.policy.estimates_total_flos and hasattr(model, "floating_point_ops"):
            return model.floating_point_ops(inputs)
        per_token = self.count_flos_per_token()
        # In a plain module, torch would look for the name in vain at every step.
        main_input = getattr(model, "main_input_name", "input_ids") if per_token else None
        return int(inputs[main_input].numel()) * per_token if main_input in inputs else 0

    def count_flos_per_token(self) -> int:
        """Floating-point operations of forward and backward per token, counted once for each model."""
        model: Any = self.trainer.model
        if self.model_and_flos_per_token is None or self.model_and_flos_per_token[0] is not model:
            has_count = hasattr(model, "num_parameters")
            parameters = libraries.num_parameters(model, exclude_embeddings=True) if has_count else 0
            self.model_and_flos_per_token = (model, 6 * parameters)
        return self.model_and_flos_per_token[1]

    def sum_over_data(self, count: torch.Tensor) -> torch.Tensor:
        """The sum of a count over all ranks with distinct batches."""
        count = count.to(self.trainer.args.device)
        return self.trainer.accelerator.processes.gather_numbers(count, one_per_tp_group=True).sum()

    def store_flos(self) -> None:
        """Add the operations counted since the last call to `state.total_flos`."""
        flos = self.run.attempt.flos
        # The sum is in float32, as in transformers.
        if self.trainer.args.world_size > 1:
            flos = self.sum_over_data(torch.tensor([flos])).item()
        self.trainer.state.total_flos += flos
        self.run.attempt.flos = 0.0


def count_batch(trainer: Any, inputs: Any) -> tuple[int, int]:
    """Numbers of samples and input tokens of a micro-batch.

    Only an input of integers of shape `(batch, sequence)` has tokens.
    """
    name = getattr(trainer.model, "main_input_name", "input_ids")
    main_input = inputs.get(name) if hasattr(inputs, "get") else None
    if isinstance(main_input, torch.Tensor) and main_input.ndim == 2 and not main_input.is_floating_point():
        # With flatten_batches, a row has several samples.
        if trainer.args.flatten_batches and "position_ids" in inputs:
            return int((inputs["position_ids"] == 0).sum()), main_input.numel()
        return len(main_input), main_input.numel()
    return find_batch_size(inputs) or 0, 0
