"""The chaining setters: `args.set_training(...).set_evaluate(...)` (since v4.26)."""

from __future__ import annotations

from typing import Any, TypeVar

from hftrainer.arguments.base import BaseArguments
from hftrainer.arguments.checks.validation import normalize
from hftrainer.arguments.choices import HubStrategy, IntervalStrategy, OptimizerNames, SaveStrategy, SchedulerType

Self = TypeVar("Self", bound="ChainingSetters")


class ChainingSetters(BaseArguments):
    """Methods that set the arguments of one subject, and return the arguments object.

    Each method sets all arguments of its subject, to the method's default if the caller does not pass one. The Trainer
    reports contradictions between subjects when it is built.
    """

    def _set(self: Self, prefix: str, values: dict[str, Any], **names: str) -> Self:
        """Set arguments from a method's parameters, named by `prefix` and parameter, or by `names`."""
        for parameter, value in values.items():
            if parameter != "self":
                name = parameter if parameter in self.__dataclass_fields__ else prefix + parameter
                setattr(self, names.get(parameter, name), value)
        normalize(self)
        return self

    def set_training(
        self: Self,
        learning_rate: float = 5e-5,
        batch_size: int = 8,
        weight_decay: float = 0,
        num_epochs: float = 3,
        max_steps: int = -1,
        gradient_accumulation_steps: int = 1,
        seed: int = 42,
        activation_checkpointing: bool = False,
        gradient_checkpointing: bool | None = None,
    ) -> Self:
        """Set the main training arguments: batch size per device, lengths in epochs or optimizer steps."""
        self.do_train = True
        if gradient_checkpointing is None:
            gradient_checkpointing = activation_checkpointing
        return self._set("", locals(), batch_size="per_device_train_batch_size", num_epochs="num_train_epochs")

    def set_evaluate(
        self: Self,
        strategy: str | IntervalStrategy = "no",
        steps: int = 500,
        batch_size: int = 8,
        accumulation_steps: int | None = None,
        delay: float | None = None,
        loss_only: bool = False,
    ) -> Self:
        """Set when and how to evaluate. `steps` are optimizer steps, `batch_size` is in samples per device."""
        self.do_eval = IntervalStrategy(strategy) != IntervalStrategy.NO
        delay = delay or 0
        return self._set("eval_", locals(), batch_size="per_device_eval_batch_size", loss_only="prediction_loss_only")

    def set_testing(self: Self, batch_size: int = 8, loss_only: bool = False) -> Self:
        """Set how to predict, with `batch_size` in samples per device."""
        self.do_predict = True
        return self._set("", locals(), batch_size="per_device_eval_batch_size", loss_only="prediction_loss_only")

    def set_save(
        self: Self,
        strategy: str | IntervalStrategy | SaveStrategy = "steps",
        steps: int = 500,
        total_limit: int | None = None,
        on_each_node: bool = False,
    ) -> Self:
        """Set when to save, in optimizer steps, and how many checkpoints to keep."""
        return self._set("save_", locals())

    def set_logging(
        self: Self,
        strategy: str | IntervalStrategy = "steps",
        steps: int = 500,
        report_to: str | list[str] = "none",
        level: str = "passive",
        first_step: bool = False,
        nan_inf_filter: bool = False,
        on_each_node: bool = False,
        replica_level: str = "passive",
    ) -> Self:
        """Set what to log, when (in optimizer steps), and where."""
        return self._set(
            "logging_", locals(), level="log_level", on_each_node="log_on_each_node", replica_level="log_level_replica"
        )

    def set_push_to_hub(
        self: Self,
        model_id: str,
        strategy: str | HubStrategy = "every_save",
        token: str | None = None,
        private_repo: bool | None = None,
        always_push: bool = False,
        revision: str | None = None,
    ) -> Self:
        """Turn on uploads, and set their repository and when to upload."""
        self.push_to_hub = True
        return self._set("hub_", locals())

    def set_optimizer(
        self: Self,
        name: str | OptimizerNames = "adamw_torch",
        learning_rate: float = 5e-5,
        weight_decay: float = 0,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        args: str | None = None,
    ) -> Self:
        """Set the optimizer. Its default name differs from that of `TrainingArguments`, as in transformers."""
        return self._set("adam_", locals(), name="optim", args="optim_args")

    def set_lr_scheduler(
        self: Self,
        name: str | SchedulerType = "linear",
        num_epochs: float = 3.0,
        max_steps: int = -1,
        warmup_steps: float = 0,
        warmup_ratio: float | None = None,
    ) -> Self:
        """Set the schedule and its length. `warmup_ratio`, the name in v4, is a fraction of all optimizer steps."""
        warmup_steps = warmup_steps or warmup_ratio or 0
        # `_set` would set it too.
        del warmup_ratio
        return self._set("", locals(), name="lr_scheduler_type", num_epochs="num_train_epochs")

    def set_dataloader(
        self: Self,
        train_batch_size: int = 8,
        eval_batch_size: int = 8,
        drop_last: bool = False,
        num_workers: int = 0,
        pin_memory: bool = True,
        persistent_workers: bool = False,
        prefetch_factor: int | None = None,
        multiprocessing_context: str | None = None,
        in_order: bool = True,
        auto_find_batch_size: bool = False,
        ignore_data_skip: bool = False,
        sampler_seed: int | None = None,
    ) -> Self:
        """Set the loaders: batch sizes in samples per device, `prefetch_factor` in batches per worker."""
        return self._set(
            "dataloader_",
            locals(),
            train_batch_size="per_device_train_batch_size",
            eval_batch_size="per_device_eval_batch_size",
            sampler_seed="data_seed",
        )
