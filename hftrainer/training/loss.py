"""Moves micro-batches to the device, computes their losses, and counts their tokens."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from hftrainer.arguments import legacy
from hftrainer.arguments.choices import token_counting_mode
from hftrainer.base.messages import log_once
from hftrainer.base.tracebacks import describe_type, note_batch
from hftrainer.compat import libraries
from hftrainer.compat.overrides import accepted_args, accepts, call_with_accepted, ignores_other_keywords, is_overridden
from hftrainer.data.collators import count_tokens
from hftrainer.data.loaders import to_device
from hftrainer.errors import InvalidArgument, UnsupportedArgument
from hftrainer.model.inspection import is_training, smoothing_shifts_labels
from hftrainer.parallel import devices
from hftrainer.parts.part import Part
from hftrainer.trainer_pt_utils import rebuild_container
from hftrainer.trainer_utils import speed_metrics

logger = logging.getLogger(__name__)

REMEDY = "let the model return (loss, ...) or {'loss': loss, ...}, pass compute_loss_func, or override compute_loss."


def extract_loss(outputs: Any, inputs: Mapping[str, Any]) -> Any:
    """The loss in the model's outputs.

    It is the entry 'loss' of a mapping, the first item of a tuple, or the first number of a tensor of shape `(n,)`.
    Such a tensor is rarely a loss. We warn, but train on its first number, as transformers does.

    Raises:
        InvalidArgument: if the outputs have no loss; the error names what the model returned.
    """
    if isinstance(outputs, Mapping):
        if "loss" in outputs:
            return outputs["loss"]
        returned = f"only {', '.join(map(str, outputs)) or 'an empty dict'}"
    elif isinstance(outputs, (tuple, list)) and outputs:
        return outputs[0]
    elif isinstance(outputs, torch.Tensor) and outputs.ndim == 1 and len(outputs):
        log_once(
            logger, f"The model returned a 1-D tensor; its first number is used as the loss. If that is wrong, {REMEDY}"
        )
        return outputs[0]
    else:
        returned = describe_type(outputs)
    raise InvalidArgument(
        f"The model returned no loss, {returned}, from the inputs {', '.join(map(str, inputs))}: "
        f"{'' if 'labels' in inputs else 'check that the model gets the labels; '}{REMEDY}"
    )


def check_loss(loss: Any, remedy: Callable[[], str]) -> torch.Tensor:
    """Return the loss if it is a tensor of shape `()`. `remedy` returns the end of the error message.

    Raises:
        InvalidArgument: if the loss is anything else.
    """
    if isinstance(loss, torch.Tensor) and loss.ndim == 0:
        return loss
    is_tensor = isinstance(loss, torch.Tensor)
    description = f"a tensor of shape {tuple(loss.shape)}" if is_tensor else describe_type(loss)
    advice = "return loss.mean() if these are losses; otherwise, " if is_tensor else ""
    raise InvalidArgument(f"The loss must be a tensor with one number, but is {description}: {advice}{remedy()}")


def split_losses(loss: Any) -> tuple[Any, Mapping[str, Any]]:
    """Split a dict of losses into the loss for backward ('loss', or the sum) and the other entries."""
    if not isinstance(loss, Mapping):
        return loss, {}
    other_losses = {name: value for name, value in loss.items() if name != "loss"}
    return loss["loss"] if "loss" in loss else sum(other_losses.values()), other_losses


@functools.lru_cache(maxsize=8)
def _accepts_items(function: Callable[..., Any]) -> bool:
    is_parameter = "num_items_in_batch" in inspect.signature(function).parameters
    return is_parameter or (accepts(function, "num_items_in_batch") and not ignores_other_keywords(function))


class LossComputer(Part):
    """Prepares micro-batches, computes their losses, and counts their tokens and operations.

    Attributes:
        flos_per_token: a model, and its floating-point operations per token.
    """

    flos_per_token: tuple[Any, int] | None = None

    def prepare_inputs(self, inputs: Any) -> Any:
        """The batch on the device; with `past_index` also the model's memory of earlier batches."""
        if inputs is None:
            raise InvalidArgument(
                "data_collator returned None: it must return the batch, a dict of the model's inputs."
            )
        if len(inputs) == 0:
            raise InvalidArgument(
                "The batch is empty: none of the samples' keys is a parameter of the model's forward "
                f"({', '.join(self.trainer._signature_columns or [])})."
            )
        inputs = self.trainer._prepare_input(inputs)
        # Set with `past_index`. Evaluation loops of transformers v4 delete the attribute.
        if getattr(self.run, "past", None) is not None:
            inputs["mems"] = self.run.past
        return inputs

    def prepare_input(self, data: Any) -> Any:
        """The data on the device. For a container, `Trainer._prepare_input` prepares each item."""
        if not isinstance(data, torch.Tensor) and isinstance(data, (dict, list, tuple, Mapping)):
            return rebuild_container(data, self.trainer._prepare_input)
        return self.parts.strategy.cast_batch(to_device(data, self.trainer.accelerator.device), self.trainer.model)

    # ---- The loss ----------------------------------------------------------------------------------------------

    def loss(self, model: nn.Module, inputs: Any, num_items_in_batch: Any) -> torch.Tensor:
        """The loss of one micro-batch, divided for accumulation unless already divided."""
        trainer = self.trainer
        if not is_training(model):
            model.train()
        # Schedule-free optimizers have a training mode too.
        if callable(getattr(trainer.optimizer, "train", None)):
            trainer.optimizer.train()
        inputs = trainer._prepare_inputs(inputs)
        if not self.run.has_checked_model:
            self._check_first_batch(model, inputs, num_items_in_batch)
            # A batch without labels cannot show whether the model divides its loss.
            self.run.has_checked_model = num_items_in_batch is not None or not trainer.args.elastic
        kwargs = accepted_args(trainer.compute_loss, {"num_items_in_batch": num_items_in_batch})
        try:
            with trainer.compute_loss_context_manager():
                loss = trainer.compute_loss(model, inputs, **kwargs)
        except Exception as error:
            step = trainer.state.global_step + 1
            note_batch(error, f"training step {step}", inputs, getattr(trainer.model, "config", None))
            raise
        # A rank that hangs in the forward pass is behind those that wait for it in backward.
        self.run.heartbeat.beat()
        interval = trainer.args.torch_empty_cache_steps
        if interval is not None and trainer.state.global_step % interval == 0:
            devices.empty_cache()
        loss, other_losses = split_losses(loss)
        loss = check_loss(loss, self._loss_remedy)
        return self._divide_losses(loss, other_losses, num_items_in_batch)

    def _divide_losses(self, loss: torch.Tensor, other_losses: Mapping[str, Any], items: Any) -> torch.Tensor:
        """Divide the loss for accumulation, unless the items have divided it, and log the other losses."""
        divisor = self.parts.policy.loss_divisor(self.run.accumulation_steps, self.trainer.args)
        if divisor > 1 and self._is_loss_scaled(items):
            divisor = 1
        for name, other_loss in other_losses.items():
            if other_loss is not None:
                self.run.logged_metrics.add(name, other_loss / divisor, count=0)
        return loss / divisor if divisor > 1 else loss

    def _loss_remedy(self) -> str:
        if not is_overridden(self.trainer, "compute_loss"):
            return REMEDY
        name = type(self.trainer).__name__
        return f"{name}.compute_loss must return the loss, or (loss, outputs) with return_outputs=True."

    def _check_first_batch(self, model: nn.Module, inputs: Any, items: Any) -> None:
        """Check on a run's first batch, in its precision, what `elastic` and `flatten_batches` require of the model."""
        args, counts_items = self.trainer.args, self.trainer.model_accepts_loss_kwargs and items is not None
        needs_division = args.elastic and counts_items and isinstance(inputs, Mapping)
        if not needs_division and not args.flatten_batches:
            return
        was_training = model.training
        # Dropout would draw random numbers.
        model.eval()
        try:
            with torch.no_grad():
                if needs_division:
                    self._detect_division(model, inputs, items)
                if args.flatten_batches:
                    self._require_separate_samples(model)
        finally:
            model.train(was_training)

    def _detect_division(self, model: nn.Module, inputs: Mapping[str, Any], items: Any) -> None:
        """Do not pass the number of items to a model that does not divide its loss by it.

        Classifiers such as BERT's accept `num_items_in_batch`, but return the mean of a micro-batch. transformers sums
        these means, so that the loss depends on the number of micro-batches and processes.
        """
        loss, loss_for_double = (
            extract_loss(model(**{**inputs, "num_items_in_batch": count}), inputs) for count in (items, 2 * items)
        )
        dividing_ranks = self.sum_over_data(torch.tensor([not torch.equal(loss, loss_for_double)]).int())
        self.trainer.model_accepts_loss_kwargs = bool(dividing_ranks.item())

    def _require_separate_samples(self, model: nn.Module) -> None:
        """Raise UnsupportedArgument if a sample's logits depend on other samples in its row."""
        model, collator = libraries.unwrap_compiled(model), self.parts.loaders.flat_collator()
        name = type(self.parts.unwrapped_model).__name__
        vocabulary = len(self.parts.unwrapped_model.get_input_embeddings().weight)
        first, second, other = ([token % vocabulary for token in range(begin, begin + 4)] for begin in (1, 5, 9))
        rows = []
        for pair in ((first, second), (first, other), (other, second)):
            batch = collator([{"input_ids": ids} for ids in pair])
            del batch["labels"]
            rows.append(model(**self.trainer._prepare_inputs(batch))["logits"][0])
        # Tokens, positions and shapes agree: the logits are equal to the bit, unless the model mixes samples.
        if not torch.equal(rows[0][:4], rows[1][:4]) or not torch.equal(rows[0][4:], rows[2][4:]):
            raise UnsupportedArgument(
                f"flatten_batches=True: in {name}, the samples of a row attend to each other: it does not build its "
                "mask from position_ids. Remove flatten_batches, or load the model with an attention implementation "
                "that does, such as attn_implementation='flash_attention_2'."
            )

    def _is_loss_scaled(self, num_items_in_batch: Any) -> bool:
        """Whether the loss is divided by the window's items, rather than a micro-batch's mean."""
        if self.trainer.loss_is_scaled_for_ga is not None:
            return self.trainer.loss_is_scaled_for_ga
        if not accepts(self.trainer.compute_loss, "num_items_in_batch"):
            # Overrides written before v4.46 do not accept the number of items.
            return False
        is_counted = num_items_in_batch is not None or not self.parts.policy.divides_uncounted_loss
        return (self.trainer.model_accepts_loss_kwargs and is_counted) or self._loss_function_accepts_items

    @property
    def _loss_function_accepts_items(self) -> bool:
        """Whether `compute_loss_func` accepts the number of items. Other functions return a batch's mean loss."""
        function = self.trainer.compute_loss_func
        return function is not None and _accepts_items(function)

    def compute_loss_and_outputs(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any) -> tuple[Any, Any]:
        """Implements `Trainer.compute_loss` with `compute_loss_func`, the label smoother, or the model itself."""
        trainer = self.trainer
        if not isinstance(inputs, Mapping):
            raise InvalidArgument(
                f"The batch is {describe_type(inputs)}, but the model is called with keyword arguments: let "
                "data_collator return a dict of the model's inputs, or override compute_loss."
            )
        needs_labels = trainer.compute_loss_func is not None or trainer.label_smoother is not None
        labels = inputs.pop("labels", None) if needs_labels else None
        if trainer.model_accepts_loss_kwargs and num_items_in_batch is not None:
            inputs = {**inputs, "num_items_in_batch": num_items_in_batch}
        outputs = model(**inputs)
        if self.parts.past_index >= 0:
            self.run.past = outputs[self.parts.past_index]
        if trainer.compute_loss_func is not None:
            loss = call_with_accepted(trainer.compute_loss_func, outputs, labels, num_items_in_batch=num_items_in_batch)
        elif trainer.label_smoother is not None and labels is not None:
            shift = smoothing_shifts_labels(trainer.accelerator.unwrap_model(model))
            items = num_items_in_batch if self.parts.policy.smooths_over_items else None
            loss = trainer.label_smoother(outputs, labels, shift_labels=shift, num_items_in_batch=items)
        else:
            if trainer.label_smoother is not None:
                log_once(
                    logger,
                    f"label_smoothing_factor={trainer.args.label_smoothing_factor} has no effect: it needs 'labels', "
                    f"and the batch has only {', '.join(inputs)}; the model computes its own loss.",
                )
            loss = extract_loss(outputs, inputs)
        accepts_items = trainer.model_accepts_loss_kwargs or self._loss_function_accepts_items
        if self.parts.averages_tokens and accepts_items and num_items_in_batch is not None:
            # Averaging the gradients divides the loss by this number.
            loss = loss * trainer.accelerator.processes.data_world_size
        return loss, outputs

    # ---- Counting ----------------------------------------------------------------------------------------------

    def num_items(self, batch_samples: list[Any], device: torch.device) -> torch.Tensor | int | None:
        """Number of labels that are not -100, over all micro-batches; None if unused."""
        policy = self.parts.policy
        is_used = self.trainer.model_accepts_loss_kwargs or self.trainer.compute_loss_func is not None
        if (not is_used and policy.counts_items_only_if_used) or not batch_samples or "labels" not in batch_samples[0]:
            return None
        labels = [policy.counted_labels(batch, shifts=self.trainer._loss_shifts_labels) for batch in batch_samples]
        if not all(isinstance(each, torch.Tensor) for each in labels):
            # The labels of detection models are lists of dicts.
            return None
        items = sum(each.ne(-100).sum() for each in labels).to(device)
        if self.parts.averages_tokens:
            items = self.sum_over_data(items)
        return policy.num_items(items)

    def track_tokens(self, inputs: dict[str, Any]) -> None:
        """Count the input tokens of a micro-batch over all ranks, if an argument requests it."""
        if legacy.old_argument(self.trainer.args, "include_tokens_per_second") and "input_ids" in inputs:
            self.run.tokens += inputs["input_ids"].numel() * self.trainer.accelerator.processes.data_world_size
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
            metrics |= speed_metrics("train", start_time, num_tokens=tokens - self.run.initial_tokens)
        return metrics

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Floating-point operations of forward and backward on a batch; 0 if unknown.

        These are 6 per token and parameter.
        """
        model: Any = self.trainer.model
        if not self.parts.policy.estimates_total_flos and hasattr(model, "floating_point_ops"):
            return model.floating_point_ops(inputs)
        main_input = getattr(model, "main_input_name", "input_ids")
        return int(inputs[main_input].numel()) * self.count_flos_per_token() if main_input in inputs else 0

    def count_flos_per_token(self) -> int:
        """Floating-point operations of forward and backward per token, counted once for each model."""
        model: Any = self.trainer.model
        if self.flos_per_token is None or self.flos_per_token[0] is not model:
            has_count = hasattr(model, "num_parameters")
            parameters = libraries.num_parameters(model, exclude_embeddings=True) if has_count else 0
            self.flos_per_token = (model, 6 * parameters)
        return self.flos_per_token[1]

    def sum_over_data(self, count: torch.Tensor) -> torch.Tensor:
        """The sum of a count over all ranks with distinct batches."""
        count = count.to(self.trainer.args.device)
        return self.trainer.accelerator.processes.gather_numbers(count, one_per_tp_group=True).sum()

    def store_flos(self) -> None:
        """Add the operations counted since the last call to `state.total_flos`."""
        flos = self.run.flos
        # The sum is in float32, as in transformers.
        if self.trainer.args.world_size > 1:
            flos = self.sum_over_data(torch.tensor([flos])).item()
        self.trainer.state.total_flos += flos
        self.run.flos = 0.0
