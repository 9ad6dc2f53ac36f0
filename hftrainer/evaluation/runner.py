"""One pass of a Trainer over an evaluation or test set."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn
from torch.utils.data import DataLoader

from hftrainer.arguments import legacy
from hftrainer.assembly.rooms import Room
from hftrainer.compat.functions import has_length
from hftrainer.compat.messages import log_facts
from hftrainer.compat.overrides import accepts, call_with_accepted
from hftrainer.evaluation import gathering
from hftrainer.evaluation.evaluation_pass import EvaluationPass
from hftrainer.evaluation.metrics import TorchMetrics, as_metrics
from hftrainer.trainer_utils import EvalLoopOutput, PredictionOutput, speed_metrics
from hftrainer.training.deepspeed import prepare_for_evaluation as prepare_deepspeed_for_evaluation
from hftrainer.training.logged_metrics import split_losses

logger = logging.getLogger(__name__)


class EvaluationRunner(Room):
    """Prepares a Trainer for a pass over a set, and describes that pass to Lightning's loop."""

    def run(self, dataloader: DataLoader, description: str, **settings: Any) -> EvalLoopOutput:
        """`evaluation_loop`, or `prediction_loop` where the arguments or a subclass of v4.4 and before ask for it."""
        trainer = self.trainer
        loop: Callable[..., Any] = trainer.evaluation_loop
        own_old_loop = self.own.is_overridden("prediction_loop")
        if legacy.value(trainer.args, "use_legacy_prediction_loop") or (
            own_old_loop and not self.own.is_overridden("evaluation_loop")
        ):
            loop = trainer.prediction_loop
        own_loop = self.own.is_overridden("evaluation_loop", "prediction_loop")
        with self.own.engine.autocasting(trainer.model) if own_loop else contextlib.nullcontext():
            output: Any = call_with_accepted(loop, dataloader, description, **settings)
        if isinstance(output, tuple) and len(output) == len(PredictionOutput._fields):  # as overrides of v4.4 return
            predictions, label_ids, metrics = output
            return EvalLoopOutput(predictions, label_ids, metrics, trainer.num_examples(dataloader))
        return cast("EvalLoopOutput", output)

    def with_speed(self, output: EvalLoopOutput, prefix: str, start_time: float) -> dict[str, float]:
        """The metrics of a pass, and its speed."""
        metrics, samples = output.metrics or {}, output.num_samples or 0
        if self.own.preparation_measured:  # by this pass; later ones only report it
            start_time += metrics.get(f"{prefix}_model_preparation_time", 0)
            self.own.preparation_measured = False
        steps = math.ceil(
            samples / (self.trainer.args.eval_batch_size * self.trainer.accelerator.processes.data_processes)
        )
        return metrics | speed_metrics(prefix, start_time, num_samples=samples, num_steps=steps)

    def log_plan(self, description: str, dataloader: DataLoader) -> None:
        """Log the sizes of a pass."""
        count: Any = self.trainer.num_examples(dataloader) if has_length(dataloader) else "unknown"
        batch_size = getattr(dataloader, "batch_size", None) or self.trainer.args.eval_batch_size
        log_facts(logger, f"{description} begins.", {"Number of examples": count, "Batch size": batch_size})

    def prepare(self, dataloader: DataLoader) -> nn.Module:
        """Model and optimizer in evaluation mode; the weights in half precision where the arguments ask for it.

        Returns:
            The model as it is evaluated.
        """
        trainer, own = self.trainer, self.own
        if trainer.is_deepspeed_enabled:
            prepare_deepspeed_for_evaluation(trainer)
        else:
            own.run.prepare_model()
            own.states.share_buffers(trainer.model)
        model = trainer._wrap_model(trainer.model, training=False)
        if not trainer.accelerator._models and model is trainer.model:
            model = trainer.accelerator.prepare_model(model, evaluation_mode=True)
            trainer.model_preparation_time = math.nan  # this evaluation measures it, and all later ones report it
        casts = trainer.args.fp16_full_eval or trainer.args.bf16_full_eval
        if casts and not trainer.is_in_train and trainer.deepspeed is None:  # whose weights are of that type already
            dtype = torch.float16 if trainer.args.fp16_full_eval else torch.bfloat16
            model.to(dtype=dtype, device=trainer.args.device)
        trainer.callback_handler.eval_dataloader = dataloader
        if callable(getattr(trainer.optimizer, "eval", None)):
            trainer.optimizer.eval()  # type: ignore[union-attr]
        model.eval()
        return model

    def make_pass(
        self, dataloader: DataLoader, predict: Callable[..., Any], prefix: str, predicting: bool
    ) -> EvaluationPass:
        """What Lightning's loop is to drive."""
        trainer = self.trainer
        processes = trainer.accelerator.processes
        metrics = as_metrics(trainer.compute_metrics, by_batch=trainer.args.batch_eval_metrics)
        if isinstance(metrics, TorchMetrics) and processes.tp_size > 1:
            metrics.gather_by(processes.distinct_parts)
        return EvaluationPass(
            args=trainer.args,
            dataloader=dataloader,
            predict=predict,
            prepare_input=trainer._prepare_input,
            announce_batch=self.announce_step,
            num_examples=trainer.num_examples,
            main_input=getattr(trainer.model, "main_input_name", "input_ids"),
            metrics=metrics,
            preprocess_logits=trainer.preprocess_logits_for_metrics,
            end_batch=self.own.engine.end_batch,
            gather=lambda rows: trainer.gather_function(rows),
            pad=functools.partial(gathering.padded, trainer.accelerator, trainer.args),
            collect=functools.partial(processes.gather, distinct=True),
            prefix=prefix,
            returns_predictions=predicting,
            only_finite_losses=(trainer.args.logging_nan_inf_filter and self.own.behaviours.leaves_out_infinite_losses),
            preparation_time=getattr(trainer, "model_preparation_time", None),
        )

    def announce_step(self) -> None:
        """Announce a batch, and leave the pass if a signal has come."""
        self.own.announce("on_prediction_step")
        self.own.interruption.check()

    def draw(self, metrics: Any, prefix: str) -> None:
        """Save the plots of torchmetrics, if they were asked for."""
        trainer = self.trainer
        if isinstance(metrics, TorchMetrics) and metrics.plot and trainer.is_world_process_zero():
            metrics.draw(os.path.join(str(trainer.args.output_dir), f"plots-{trainer.state.global_step}"), prefix)

    def loss_and_outputs(self, model: nn.Module, inputs: Any, loss_only: bool) -> tuple[torch.Tensor, Any]:
        """The mean loss of a batch, and the model's outputs; the items of other processes do not count in it."""
        own = self.own
        averages, own.averages_tokens = own.averages_tokens, False
        try:
            return self._compute(model, inputs, loss_only)
        finally:
            own.averages_tokens = averages

    def _compute(self, model: nn.Module, inputs: Any, loss_only: bool) -> tuple[torch.Tensor, Any]:
        trainer = self.trainer
        by_items = self.own.behaviours.evaluates_by_items
        num_items = trainer._get_num_items_in_batch([inputs], trainer.args.device) if by_items else None
        context, inputs = trainer._prepare_context_parallel_inputs(model, inputs)
        with trainer.compute_loss_context_manager(), context():
            if accepts(trainer.compute_loss, "return_outputs"):
                loss, outputs = call_with_accepted(
                    trainer.compute_loss, model, inputs, return_outputs=True, num_items_in_batch=num_items
                )
            else:  # an override of v4.1: its loss, and the outputs by a pass of their own
                outputs = () if loss_only else model(**inputs)
                loss = call_with_accepted(trainer.compute_loss, model, inputs, num_items_in_batch=num_items)
        return split_losses(loss)[0].detach().mean(), outputs
