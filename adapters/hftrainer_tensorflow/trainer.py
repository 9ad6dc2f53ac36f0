"""`TFTrainer` of transformers 4.0 to 4.36, with a torch model as its engine.

TensorFlow provides tf.data, its order of samples, and `tf.summary`. torch provides the model, the optimizer and the
step. Only scripts import TensorFlow; we recognize its objects by their methods.
"""

from __future__ import annotations

import glob
import math
import os
import sys
from collections.abc import Callable
from typing import Any

import torch

from hftrainer.arguments import old_names
from hftrainer.checkpointing.run_checkpoints import get_last_checkpoint
from hftrainer.compat import libraries
from hftrainer.errors import InvalidArgument, UnsupportedArgument
from hftrainer.optimization_tf import create_optimizer
from hftrainer.trackers import registry
from hftrainer.trainer_utils import EvalPrediction, PredictionOutput
from hftrainer.training_args_tf import TFTrainingArguments
from hftrainer_tensorflow import models, pipelines
from hftrainer_tensorflow.engine import TorchTrainer

#: Methods for steps and batches, which Lightning runs now → what to override instead.
_REPLACED_METHODS = {
    "apply_gradients": "create_optimizer_and_scheduler, for your optimizer",
    "distributed_training_steps": "training_step",
    "distributed_prediction_steps": "prediction_step",
    "_compute_nb_instances": "training_step, which gets the number",
    "_get_step_inputs": "run_model",
}


class TFTrainer:
    """`TFTrainer` of transformers 4.0 to 4.36: trains, evaluates and predicts, with a torch model on Lightning.

    Args:
        model: a torch module; a TensorFlow model of transformers 4, whose torch version is trained, and which gets the
            weights at the end; or a Keras 3 model on torch, compiled with a loss.
        args: the settings.
        train_dataset: a `tf.data.Dataset` of pairs (features, labels), where features is a dict, and labels an array
            (passed as `labels=`) or a dict (`**labels`); or a dataset of `datasets` or torch whose rows have labels.
        eval_dataset: the same, for evaluation.
        compute_metrics: `EvalPrediction` → dict of metrics.
        tb_writer: a `tf.summary` writer that gets each log line, besides the trackers of `args.report_to`.
        optimizers: an optimizer and a schedule, or (None, None). They come from `create_optimizer`, from torch, or from
            Keras (Adam, AdamW, SGD). A schedule is called with the number of completed optimizer steps.

    Attributes:
        global_step: completed optimizer steps.
        epoch_logging: completed epochs, with the fraction of the current one.
        steps_per_epoch: optimizer steps of an epoch.
        num_train_examples: samples of an epoch.
        total_train_batch_size: samples of an optimizer step, over all processes.

    Raises:
        UnsupportedArgument: for a model that torch cannot train, and for overrides of methods that Lightning replaces.
    """

    def __init__(
        self,
        model: Any,
        args: TFTrainingArguments,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        compute_metrics: Callable[[EvalPrediction], dict[str, float]] | None = None,
        tb_writer: Any = None,
        optimizers: tuple[Any, Any] = (None, None),
    ) -> None:
        for name, replacement in _REPLACED_METHODS.items():
            if hasattr(self, name):
                raise UnsupportedArgument(
                    f"{type(self).__name__}.{name}: Lightning runs the steps and never calls it. Override "
                    f"{replacement}."
                )
        self.args, self.train_dataset, self.eval_dataset = args, train_dataset, eval_dataset
        self.compute_metrics, self.tb_writer = compute_metrics, tb_writer
        self.optimizer, self.lr_scheduler = optimizers
        self.global_step, self.epoch_logging, self.steps_per_epoch = 0, 0.0, 1
        self.num_train_examples = self.total_train_batch_size = self._num_predicted = 0
        self._train_loader: Any = None
        self._past: Any = None
        self._script_model = model
        self.model: Any = models.torch_model(model)
        self._engine = TorchTrainer(self, self.model, args)
        registry.add_kubeflow_tracker(args)
        reports = registry.select_trackers(args.report_to)
        if "wandb" in reports:
            self.setup_wandb()
        if "comet_ml" in reports:
            self.setup_comet()
        # tf.data's order of samples depends on this seed.
        if "tensorflow" in sys.modules:
            sys.modules["tensorflow"].random.set_seed(args.seed)

    # ---- Data --------------------------------------------------------------------------------------------------

    def get_train_tfdataset(self) -> Any:
        """Infinite training batches of `total_train_batch_size` rows. Override it to build your own."""
        if self.train_dataset is None:
            raise InvalidArgument("Training needs a train_dataset: pass one to TFTrainer.")
        args, dataset = self.args, self._as_pipeline(self.train_dataset)
        self.total_train_batch_size = args.train_batch_size * args.gradient_accumulation_steps
        count = pipelines.count_rows(dataset, may_be_infinite=args.max_steps > 0)
        # An infinite dataset cannot be shuffled completely.
        if count == pipelines.INFINITE:
            self.num_train_examples = args.max_steps * self.total_train_batch_size
            return dataset.batch(self.total_train_batch_size)
        self.num_train_examples = count
        return dataset.repeat().shuffle(count, seed=args.seed).batch(self.total_train_batch_size)

    def get_eval_tfdataset(self, eval_dataset: Any = None) -> tuple[Any, int, int]:
        """The evaluation batches, their number, and the number of samples. Each sample occurs once."""
        dataset = eval_dataset if eval_dataset is not None else self.eval_dataset
        if dataset is None:
            raise InvalidArgument("Evaluation needs an eval_dataset: pass one to TFTrainer, or to evaluate().")
        return self._make_evaluation_batches(dataset, drop_last=self.args.dataloader_drop_last)

    def get_test_tfdataset(self, test_dataset: Any) -> tuple[Any, int, int]:
        """The batches of a prediction, their number, and the number of samples."""
        return self._make_evaluation_batches(test_dataset, drop_last=False)

    def _make_evaluation_batches(self, dataset: Any, *, drop_last: bool) -> tuple[Any, int, int]:
        pipeline, size = self._as_pipeline(dataset), self.args.eval_batch_size
        count = pipelines.count_rows(pipeline)
        if drop_last and count < size:
            raise InvalidArgument(
                f"dataloader_drop_last=True drops all {count} evaluation samples, since a batch has {size}: set it "
                "to False."
            )
        steps = count // size if drop_last else math.ceil(count / size)
        return pipeline.batch(size, drop_remainder=drop_last), steps, min(count, steps * size)

    def _as_pipeline(self, dataset: Any) -> Any:
        """The dataset as a pipeline, without the unused columns of a `datasets` dataset."""
        if libraries.is_dataset_or_stream(dataset):
            dataset = self._engine._remove_unused_columns(dataset)
        return pipelines.as_pipeline(dataset)

    # ---- Training ----------------------------------------------------------------------------------------------

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """Set `self.optimizer` and `self.lr_scheduler`, unless the script passed them. Override it to use others.

        Args:
            num_training_steps: optimizer steps of the run.
        """
        if self.optimizer is not None or self.lr_scheduler is not None:
            return
        args = self.args
        self.optimizer, self.lr_scheduler = create_optimizer(
            args.learning_rate,
            num_training_steps,
            args.get_warmup_steps(num_training_steps),
            adam_beta1=args.adam_beta1,
            adam_beta2=args.adam_beta2,
            adam_epsilon=args.adam_epsilon,
            weight_decay_rate=args.weight_decay,
            power=args.poly_power,
        )

    def train(self) -> None:
        """Train, and resume from the newest complete `checkpoint-xxx` in `output_dir`, if any.

        Raises:
            UnsupportedArgument: if `output_dir` has TensorFlow checkpoints.
        """
        output_dir = str(self.args.output_dir)
        checkpoints = glob.glob(os.path.join(glob.escape(output_dir), "checkpoint", "ckpt-*.index"))
        if checkpoints and get_last_checkpoint(output_dir) is None:
            raise UnsupportedArgument(
                f"{checkpoints[-1]} is a checkpoint of TensorFlow, from which TFTrainer would have resumed. It "
                "cannot be read here: load its model with from_pretrained, save it, and train from that in another "
                "output_dir."
            )
        pipeline, args = self.get_train_tfdataset(), self.args
        round_steps = math.floor if args.dataloader_drop_last else math.ceil
        self.steps_per_epoch = max(round_steps(self.num_train_examples / self.total_train_batch_size), 1)
        self._train_loader = self._engine.batches(
            pipeline, self.steps_per_epoch, micro_batches=args.gradient_accumulation_steps, trains=True
        )
        self._engine.train(resume_from_checkpoint="auto")
        self.global_step, self._past = self._engine.state.global_step, None
        models.copy_weights_back(self.model, self._script_model)

    def training_step(self, features: Any, labels: Any, nb_instances_in_global_batch: int) -> torch.Tensor:
        """The loss of a micro-batch, shape `()`, divided by the instances of the complete batch.

        transformers' TFTrainer returned the gradients here, but Lightning computes them.
        """
        loss, _ = self.run_model(features, labels, True)
        return models.check_loss(loss) / nb_instances_in_global_batch

    def run_model(self, features: Any, labels: Any, training: bool) -> tuple[torch.Tensor, Any]:
        """Loss and logits of a micro-batch. Override it for your model or loss, with torch's operations.

        Args:
            features: the inputs by name, tensors of shape `(rows, ...)`.
            labels: the labels, a tensor or a dict of them.
            training: whether the model is in training mode.

        Returns:
            The losses of the instances, or their sum (not their mean, since it is divided later), and the logits.
        """
        if self._past is not None:
            features = {**features, "mems": self._past}
        loss, outputs = models.compute_loss_and_outputs(self.model, features, labels, training)
        if (index := old_names.old_argument(self.args, "past_index")) >= 0:
            # The outputs do not include the loss.
            self._past = outputs[index - 1]
        return loss, outputs[0]

    # ---- Evaluation --------------------------------------------------------------------------------------------

    def evaluate(self, eval_dataset: Any = None) -> dict[str, float]:
        """Evaluate, log the metrics and return them.

        Args:
            eval_dataset: a dataset; the TFTrainer's by default.
        """
        output = self.prediction_loop(*self.get_eval_tfdataset(eval_dataset), description="Evaluation")
        self.log(dict(output.metrics or {}))
        return output.metrics or {}

    def predict(self, test_dataset: Any) -> PredictionOutput:
        """Predictions, labels and metrics of a dataset."""
        return self.prediction_loop(*self.get_test_tfdataset(test_dataset), description="Prediction")

    def prediction_loop(
        self, dataset: Any, steps: int, num_examples: int, description: str, prediction_loss_only: bool | None = None
    ) -> PredictionOutput:
        """Evaluate or predict in one pass over batches.

        Args:
            dataset: yields batches of pairs.
            steps: batches of the pass.
            num_examples: samples of the pass.
            description: 'Evaluation' or 'Prediction'.
            prediction_loss_only: whether to omit the predictions; None uses the argument's value.

        Returns:
            Predictions and labels of shape `(num_examples, ...)`, and metrics whose names begin with 'eval_'.
        """
        engine = self._engine
        self._past, self._num_predicted = None, num_examples
        self._eval_loss = torch.zeros((), device=self.args.device)
        output = engine.evaluation_loop(engine.batches(dataset, steps), description, prediction_loss_only)
        self._past = None
        # The last batch is padded if ranks cannot divide it.
        first_rows = engine.accelerator.processes.first_rows
        predictions, label_ids = (
            None if output_part is None else first_rows(output_part, num_examples)
            for output_part in (output.predictions, output.label_ids)
        )
        metrics: dict[str, float] = {}
        if self.compute_metrics is not None and predictions is not None and label_ids is not None:
            metrics = dict(self.compute_metrics(EvalPrediction(predictions, label_ids)))
        metrics["eval_loss"] = engine.accelerator.reduce(self._eval_loss, "sum").item() / steps
        prefixed_metrics = {name: value for name, value in metrics.items() if name.startswith("eval_")}
        renamed_metrics = {f"eval_{name}": value for name, value in metrics.items() if name not in prefixed_metrics}
        return PredictionOutput(predictions, label_ids, prefixed_metrics | renamed_metrics)

    def prediction_step(self, features: Any, labels: Any, nb_instances_in_global_batch: int) -> Any:
        """The logits of a batch. Adds the batch's loss to the sum of the evaluation. An override must do the same."""
        loss, logits = self.run_model(features, labels, False)
        self._eval_loss = self._eval_loss + models.check_loss(loss) / nb_instances_in_global_batch
        return logits

    # ---- Logs and files ----------------------------------------------------------------------------------------

    def setup_wandb(self) -> None:
        """Called in the constructor if the TFTrainer reports to W&B. Override it to call `wandb.init` yourself."""

    def setup_comet(self) -> None:
        """Called in the constructor if the TFTrainer reports to Comet. Override it to start an experiment yourself."""

    def log(self, logs: dict[str, float]) -> None:
        """Add a line to the log, with the epoch, and pass it to the trackers. Override it for your own.

        Args:
            logs: names and values; gets 'epoch'.
        """
        logs["epoch"] = self.epoch_logging
        if self.tb_writer is not None:
            summary = sys.modules["tensorflow"].summary
            with self.tb_writer.as_default():
                for name, value in logs.items():
                    summary.scalar(name, value, step=self.global_step)
            self.tb_writer.flush()
        self._engine.log_line(logs)

    def save_model(self, output_dir: str | None = None) -> None:
        """Save the model for `from_pretrained`, and also as TensorFlow files or as Keras' `model.keras`.

        Args:
            output_dir: the folder; `args.output_dir` by default.
        """
        folder = output_dir if output_dir is not None else str(self.args.output_dir)
        self._engine.save_model(folder)
        models.copy_weights_back(self.model, self._script_model)
        if not self._engine.is_world_process_zero():
            return
        if self._script_model is not self.model:
            self._script_model.save_pretrained(folder)
        elif models.is_keras(self.model):
            self._script_model.save(os.path.join(folder, "model.keras"))
