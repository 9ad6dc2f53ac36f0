"""Prepares the Trainer for a pass over a data set, starts Lightning's loop, and reports."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.data import DataLoader

from hftrainer.arguments import old_names
from hftrainer.base.messages import log_facts, log_once
from hftrainer.base.nested import nested_detach
from hftrainer.base.part import Part, temporary_attributes
from hftrainer.base.signatures import accepted_args, call_with_accepted
from hftrainer.base.tracebacks import add_note, describe_type
from hftrainer.callbacks.progress_bar import close_bars
from hftrainer.compat import libraries
from hftrainer.compat.overrides import is_overridden
from hftrainer.errors import InvalidArgument
from hftrainer.evaluation.collecting import make_metrics_gather, select_predictions
from hftrainer.evaluation.evaluation_pass import EvaluationPass
from hftrainer.parallel import devices
from hftrainer.parallel.process_group import CollectiveCall
from hftrainer.reporting.metrics import mean_loss
from hftrainer.trainer_utils import EvalLoopOutput, PredictionOutput, speed_metrics
from hftrainer.training.steps.loss import split_losses
from hftrainer.training.steps.sums import LoggedMetrics

logger = logging.getLogger(__name__)

_MEMORY_HINT = (
    "compute_metrics needs the predictions of all samples in memory. Metrics of torchmetrics need one batch at a time; "
    "preprocess_logits_for_metrics can reduce each batch, such as by argmax; eval_memmap_dir keeps predictions on disk."
)


class EvaluationRunner(Part):
    """Prepares a Trainer and a pass over a dataset for one of Lightning's loops.

    Args:
        parts: the parts of the Trainer.
    """

    #: Whether the last pass has measured the time to prepare the model.
    _has_measured_preparation = False

    def evaluate_sets(
        self, datasets: Mapping[str, Any], ignore_keys: list[str] | None, prefix: str, *, uses_names: bool
    ) -> dict[str, float]:
        """Evaluate several sets with `Trainer.evaluate`, with their names in the metric prefixes.

        Args:
            datasets: sets by name.
            ignore_keys: model outputs to exclude.
            prefix: prefix before the name.
            uses_names: whether to pass the names of the sets, since they are the Trainer's own.
        """
        metrics: dict[str, float] = {}
        with self.parts.engine.evaluation_group() as group_metrics:
            for name, dataset in datasets.items():
                metrics |= self.trainer.evaluate(
                    name if uses_names else dataset, ignore_keys=ignore_keys, metric_key_prefix=f"{prefix}_{name}"
                )
            group_metrics |= mean_loss(metrics, datasets, prefix)
        return metrics

    def evaluate(self, dataset: Any, ignore_keys: list[str] | None, prefix: str) -> dict[str, float]:
        """Evaluate one set, log the metrics and return them; see `Trainer.evaluate`."""
        dataloader = self.trainer.get_eval_dataloader(dataset)
        loss_only = True if self.trainer.compute_metrics is None else None
        _, metrics = self._run_timed_loop(dataloader, "Evaluation", loss_only, ignore_keys, prefix)
        self.trainer.log(metrics)
        self.parts.print_xla_metrics()
        self.parts.call_callbacks("on_evaluate", metrics)
        return metrics

    def predict(self, test_dataset: Any, ignore_keys: list[str] | None, prefix: str) -> PredictionOutput:
        """Predict, and compute the metrics if there are labels; see `Trainer.predict`."""
        dataloader = self.trainer.get_test_dataloader(test_dataset)
        output, metrics = self._run_timed_loop(dataloader, "Prediction", None, ignore_keys, prefix)
        self.parts.call_callbacks("on_predict", metrics)
        return PredictionOutput(output.predictions, output.label_ids, metrics)

    def evaluation_loop(
        self,
        dataloader: DataLoader[Any],
        description: str,
        prediction_loss_only: bool | None,
        ignore_keys: list[str] | None,
        prefix: str,
    ) -> EvalLoopOutput:
        """Run one of Lightning's loops over a loader; see `Trainer.evaluation_loop`."""
        trainer = self.trainer
        if not trainer.is_in_train:
            self.parts.trainer_setup.apply_arguments_to_engine(trainer.args)
        loss_only = trainer.args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        examples: Any = trainer.num_examples(dataloader) if libraries.has_length(dataloader) else "unknown"
        batch_size = getattr(dataloader, "batch_size", None) or trainer.args.eval_batch_size
        log_facts(logger, f"Running {description} begins.", {"Number of examples": examples, "Batch size": batch_size})
        model = self._prepare_model(dataloader)
        is_prediction = description == "Prediction"
        step = functools.partial(call_with_accepted, trainer.prediction_step, model)
        evaluation = EvaluationPass(
            self.parts,
            dataloader,
            step,
            prefix=prefix,
            returns_predictions=is_prediction,
            loss_only=loss_only,
            ignore_keys=ignore_keys,
        )
        stage: Literal["predict", "test", "validate"]
        stage = "predict" if is_prediction else "test" if prefix.startswith("test") else "validate"
        try:
            precision = self._evaluation_precision(model)
            with (
                # An evaluation must not change training's values.
                temporary_attributes(self.run, mems=None),
                temporary_attributes(self.run.attempt, logged_metrics=LoggedMetrics()),
                devices.error_hints(),
                trainer.accelerator.gradient_state.limit_to_loader(dataloader),
                CollectiveCall("the other ranks in an evaluation"),
                precision,
            ):
                self.parts.engine.evaluate(evaluation, trainer.model, stage)
        except BaseException as error:
            if not trainer.is_in_train:
                close_bars(trainer.callback_handler.callbacks)
            if devices.is_out_of_memory(error):
                add_note(error, "A smaller per_device_eval_batch_size needs less memory.")
                if not loss_only and trainer.compute_metrics is not None:
                    add_note(error, _MEMORY_HINT)
            raise
        finally:
            # A subclass's `evaluate` may have set another function for this pass only.
            trainer.gather_function = make_metrics_gather(trainer.accelerator, trainer.args)
            # Lightning keeps logged numbers on the device.
            self.parts.strategy.run_recorded_xla_operations()
        return self._make_output(evaluation, description)

    def _make_output(self, evaluation: EvaluationPass, description: str) -> EvalLoopOutput:
        """Return the output of a finished pass, and record how long preparing the model took.

        Raises:
            InvalidArgument: when there was no batch.
        """
        trainer = self.trainer
        output = evaluation.output
        evaluation.output = None
        if output is None or not evaluation.seen_batches:
            raise InvalidArgument(
                f"{description} has no batches: the dataset is empty, or smaller than a batch with "
                "dataloader_drop_last, or lightning_config limits it to 0 batches."
            )
        metrics_were_possible = evaluation.has_metrics or evaluation.has_labels or trainer.compute_metrics is None
        if not (evaluation.returns_predictions or metrics_were_possible):
            label_advice = f"no batch has all of the labels {trainer.label_names}; add them, or correct label_names"
            reason = "prediction_loss_only=True" if evaluation.loss_only else label_advice
            log_once(logger, f"compute_metrics is not called: {reason}.")
        if evaluation.preparation_time is not None:
            self._has_measured_preparation |= math.isnan(trainer.model_preparation_time)
            trainer.model_preparation_time = evaluation.preparation_time
        return output

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], loss_only: bool, ignore_keys: list[str] | None
    ) -> tuple[torch.Tensor | None, Any, Any]:
        """Loss, logits and labels of one batch; see `Trainer.prediction_step`."""
        trainer = self.trainer
        inputs = trainer._prepare_inputs(inputs)
        ignore_keys = self._ignored_keys() if ignore_keys is None else ignore_keys
        names = trainer.label_names
        has_labels = bool(names) and all(inputs.get(name) is not None for name in names)
        returns_loss = inputs.get("return_loss")
        returns_loss = trainer.can_return_loss if returns_loss is None else returns_loss
        labels = loss = None
        with torch.no_grad():
            if has_labels or (not names and returns_loss):
                labels = nested_detach(_unwrap_single(tuple(inputs.get(name) for name in names)))
                loss, outputs = self._loss_and_outputs(model, inputs, loss_only)
                loss = _copy_mean_loss(loss)
                logits = select_predictions(outputs, ignore_keys, has_loss=True)
            else:
                with trainer.compute_loss_context_manager():
                    outputs = model(**inputs)
                logits = select_predictions(outputs, ignore_keys, has_loss=False)
                if self.parts.past_index >= 0:
                    self.run.mems = outputs[self.parts.past_index - 1]
        if loss_only:
            return loss, None, None
        return loss, nested_detach(_unwrap_single(logits)), labels

    def _loss_and_outputs(self, model: nn.Module, inputs: Any, loss_only: bool) -> tuple[Any, Any]:
        """What `Trainer.compute_loss` returns for a batch with labels. Only this process's items divide the loss."""
        trainer = self.trainer
        parts = self.parts
        is_averaged = parts.averages_tokens
        with temporary_attributes(parts, averages_tokens=False) if is_averaged else contextlib.nullcontext():
            divides_by_items = parts.policy.divides_eval_loss_by_items
            num_items = trainer._get_num_items_in_batch([inputs], trainer.args.device) if divides_by_items else None
            context, inputs = trainer._prepare_context_parallel_inputs(model, inputs)
            if loss_only and trainer.args.use_liger_kernel and parts.policy.skips_logits:
                # With `skip_logits`, Liger's fused loss keeps no logits.
                inputs = {**inputs, "skip_logits": True}
            settings = {"return_outputs": True, "num_items_in_batch": num_items}
            keywords: dict[str, Any] = accepted_args(trainer.compute_loss, settings)
            # An override for v4.1 returns only the loss, so a separate forward pass computes the outputs.
            has_only_loss = "return_outputs" not in keywords
            with trainer.compute_loss_context_manager(), context():
                outputs = model(**inputs) if has_only_loss and not loss_only else ()
                loss_and_outputs = trainer.compute_loss(model, inputs, **keywords)
        if has_only_loss:
            return loss_and_outputs, outputs
        if not (isinstance(loss_and_outputs, tuple) and len(loss_and_outputs) == 2):
            raise InvalidArgument(
                f"{type(trainer).__name__}.compute_loss returned {describe_type(loss_and_outputs)} for "
                "return_outputs=True, which evaluations pass: return (loss, outputs) in that case."
            )
        return loss_and_outputs

    def _ignored_keys(self) -> list[str]:
        """Outputs that the model's config excludes from predictions."""
        config = getattr(self.trainer.model, "config", None)
        excludes_cache = config is not None and self.parts.policy.excludes_past_key_values
        cache = libraries.cache_output_name()
        ignored_keys = list(getattr(config, "keys_to_ignore_at_inference", [cache] if excludes_cache else []))
        # Models for earlier releases list the cache under an old name; their outputs use the current name.
        return [*ignored_keys, cache] if set(ignored_keys) & {"past_key_values", "cache_params"} else ignored_keys

    def _run_timed_loop(
        self, dataloader: DataLoader[Any], description: str, loss_only: bool | None, ignore_keys: Any, prefix: str
    ) -> tuple[EvalLoopOutput, dict[str, float]]:
        """Run `evaluation_loop`, or `prediction_loop` where arguments or overrides need it.

        Returns:
            The output of the loop, and its metrics with its speed.
        """
        start_time = time.time()
        trainer = self.trainer
        overrides_new, overrides_old = (is_overridden(trainer, f"{name}_loop") for name in ("evaluation", "prediction"))
        is_asked_for = old_names.old_argument(trainer.args, "use_legacy_prediction_loop")
        uses_old = is_asked_for or (overrides_old and not overrides_new)
        loop: Callable[..., Any] = trainer.prediction_loop if uses_old else trainer.evaluation_loop
        settings = {"prediction_loss_only": loss_only, "ignore_keys": ignore_keys, "metric_key_prefix": prefix}
        has_override = overrides_new or overrides_old
        with self.parts.engine.autocast_forward(trainer.model) if has_override else contextlib.nullcontext():
            output: Any = loop(dataloader, description, **accepted_args(loop, settings))
        # Overrides for v4.4 do not return the number of samples.
        if isinstance(output, tuple) and len(output) == len(PredictionOutput._fields):
            predictions, label_ids, metrics = output
            output = EvalLoopOutput(predictions, label_ids, metrics, trainer.num_examples(dataloader))
        metrics = output.metrics or {}
        samples = output.num_samples or 0
        # This pass included the preparation: exclude it from the speed.
        if self._has_measured_preparation:
            start_time += metrics.get(f"{prefix}_model_preparation_time", 0)
            self._has_measured_preparation = False
        size = trainer.args.eval_batch_size * trainer.accelerator.processes.data_world_size
        speed = speed_metrics(prefix, start_time, num_samples=samples, num_steps=math.ceil(samples / size))
        return output, metrics | speed

    def _prepare_model(self, dataloader: DataLoader[Any]) -> nn.Module:
        """Set model and optimizer to evaluation mode.

        Returns:
            The prepared model.
        """
        trainer = self.trainer
        parts = self.parts
        parts.model_setup.prepare_for_evaluation()
        model = trainer._wrap_model(trainer.model, training=False)
        if not trainer.accelerator._models and model is trainer.model:
            model = trainer.accelerator.prepare_model(model, evaluation_mode=True)
            # Not measured yet: this evaluation measures the time, and later ones report it.
            trainer.model_preparation_time = math.nan
        trainer.callback_handler.eval_dataloader = dataloader
        if callable(getattr(trainer.optimizer, "eval", None)):
            trainer.optimizer.eval()
        model.eval()
        return model

    def _evaluation_precision(self, model: nn.Module) -> contextlib.AbstractContextManager[None]:
        """A context with half precision, for `fp16_full_eval` and `bf16_full_eval` outside of training."""
        trainer, args = self.trainer, self.trainer.args
        casts = args.fp16_full_eval or args.bf16_full_eval
        # DeepSpeed has cast its weights already.
        if not casts or trainer.is_in_train or trainer.deepspeed is not None:
            return contextlib.nullcontext()
        model.to(device=args.device)
        return cast_weights(model, torch.float16 if args.fp16_full_eval else torch.bfloat16)


def _copy_mean_loss(losses: Any) -> torch.Tensor:
    """A copy of the mean loss. `losses` may be a mapping of several losses."""
    loss: torch.Tensor = split_losses(losses)[0].detach()
    # The mean of a single number takes three times as long as a copy.
    is_number = type(loss) is torch.Tensor and not loss.ndim
    return loss.clone() if is_number else loss.mean()


def _unwrap_single(values: Any) -> Any:
    return values[0] if isinstance(values, (tuple, list)) and len(values) == 1 else values


@contextlib.contextmanager
def cast_weights(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Cast a model's floating-point weights for the block, and restore them exactly afterwards.

    transformers leaves the model in half precision, and then trains and saves it that way. The weights are kept in
    CPU memory, so that the device holds only one copy.
    """
    originals: deque[torch.Tensor | None] = deque()

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        # A tied weight is visited twice, and has been converted at the second visit.
        if not tensor.is_floating_point() or tensor.dtype == dtype:
            originals.append(None)
            return tensor
        is_plain = type(tensor) in (torch.Tensor, nn.Parameter)
        originals.append(tensor.detach().cpu() if is_plain else tensor.detach())
        return tensor.to(dtype)

    def restore(tensor: torch.Tensor) -> torch.Tensor:
        original_weight = originals.popleft()
        return tensor if original_weight is None else original_weight.to(tensor.device)

    model._apply(convert)
    try:
        yield
    finally:
        # `_apply` visits the weights in the order in which it converted them.
        model._apply(restore)
