"""A case for each argument: a value unlike its default, what else it needs, when it may change, and what shows it."""

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hftrainer import Trainer, TrainingArguments
from hftrainer.arguments.accelerator_config import AcceleratorConfig
from tests.support.small_models import MODELS

#: When a script sets an argument: in the constructor, before the first run, before the second, in `on_train_begin`.
TIMES = ("given", "before", "between", "at the start")
#: Arguments of every run unless a case has others.
DEFAULTS = {"num_train_epochs": 2, "per_device_train_batch_size": 4, "learning_rate": 1e-2, "logging_steps": 2}
DEFAULTS |= {"save_strategy": "no", "report_to": "none", "disable_tqdm": True, "use_cpu": True}
STEPS = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
WORKERS = {"dataloader_num_workers": 1}
BEST = {**STEPS, "metric_for_best_model": "loss"}
BERT, LLAMA, SGD, COSINE = {"model": "bert"}, {"model": "llama"}, {"optim": "sgd"}, {"lr_scheduler_type": "cosine"}


@dataclass(frozen=True)
class Case:
    """An argument.

    Attributes:
        value: unlike its default.
        needs: what else is set, with the value and without it; `model` is one of `tests.support.small_models.MODELS`.
        until: the last of `TIMES` at which it has an effect on a tiny run; None if it has none on one CPU.
        shown: the test that shows the effect, if a tiny run does not.
        alone: whether only that test runs with the value.
        new: today's name, if the argument is an old name.
        meanings: values of the old name, each with the value of `new` that it means.
        refusal: a pattern of the reason, if it is refused.
    """

    value: Any
    needs: Mapping[str, Any] = field(default_factory=dict)
    until: str | None = None
    shown: str = ""
    alone: bool = False
    new: str = ""
    meanings: tuple[tuple[Any, Any], ...] = ()
    refusal: str = ""

    @property
    def settings(self) -> dict[str, Any]:
        """The other arguments that it needs."""
        return {name: value for name, value in self.needs.items() if name != "model"}


_given, _before, _between, _always = (functools.partial(Case, until=time) for time in TIMES)


def _shown(value: Any, by: str, needs: Mapping[str, Any] = {}) -> Case:
    return Case(value, needs, shown=f"tests/{by}")


def _alone(value: Any, by: str, needs: Mapping[str, Any] = {}) -> Case:
    return Case(value, needs, shown=f"tests/{by}", alone=True)


def _refused(value: Any, reason: str) -> Case:
    return Case(value, shown=f"tests/{_FIELDS}unsupported_argument_is_refused_by_name", alone=True, refusal=reason)


def _old(new: str, *meanings: tuple[Any, Any]) -> Case:
    return Case(meanings[0][0], shown=f"tests/{_LEGACY}", alone=True, new=new, meanings=meanings)


def _same(new: str, value: Any) -> Case:
    return _old(new, (value, value))


_CHANGES = "parity/test_model_changes.py::test_"
_HERE = "parity/test_arguments.py::test_"
_CHECKPOINTING = f"{_HERE}gradient_checkpointing_sets_activation_checkpointing"
_ENGINE = f"{_HERE}changing_engine_arguments_after_construction_is_refused"
_HUB = "parity/test_hub.py::test_"
_TRACKERS = "lightning/test_loggers.py::test_transformers_tracker_callbacks_get_our_log_lines"
_RESUME = "parity/test_resume.py::test_"
_GENERATION = "parity/test_seq2seq.py::test_"
_FIELDS = "unit/arguments/test_fields.py::test_"
_PLAN = f"{_FIELDS}only_mapped_arguments_change_the_plan"
_EVALUATION = "unit/evaluation/test_evaluation.py::test_"
_PREDICTION = "parity/test_evaluation.py::test_"
_MONITORING = "unit/monitoring/"
_DIVERGENCE = "unit/training/test_divergence.py::test_"
_LEGACY = "unit/arguments/test_old_names.py::test_old_name_sets_the_new_argument"
_OLD_CALLS = "unit/arguments/test_old_calls.py::test_"
CASES: dict[str, Case] = {
    # Optimization.
    "num_train_epochs": _between(1),
    "max_steps": _between(3),
    "per_device_train_batch_size": _given(3),
    "gradient_accumulation_steps": _always(2),
    "learning_rate": _before(0.5),
    "lr_scheduler_type": _between("cosine"),
    "lr_scheduler_kwargs": _between({"num_cycles": 2}, COSINE),
    "warmup_steps": _between(3),
    "optim": _before("adamw_torch"),
    "optim_args": _before("momentum=0.9", SGD),
    "optim_target_modules": _shown("all-linear", "parity/test_optimizers.py::test_optim_target_modules_train_alike"),
    "weight_decay": _before(0.5),
    "adam_beta1": _before(0.5),
    "adam_beta2": _before(0.5),
    "adam_epsilon": _before(0.1),
    "max_grad_norm": _always(0.01),
    "average_tokens_across_devices": _shown(False, "distributed/test_training.py::test_trains_as_transformers", LLAMA),
    "label_smoothing_factor": _given(0.1, BERT),
    "neftune_noise_alpha": _given(5.0, LLAMA),
    "seed": _given(7),
    "data_seed": _given(7),
    "full_determinism": _shown(True, _PLAN),
    # Model and precision.
    "bf16": _given(True),
    "fp16": _shown(True, "parity/test_precision.py::test_fp16_scales_and_skips_alike_also_after_resuming"),
    "tf32": _shown(False, "unit/model/test_apply_arguments.py::test_tf32_argument_sets_the_flags_of_torch"),
    "use_cpu": _shown(False, _PLAN),
    "use_cache": _given(True, LLAMA),
    "activation_checkpointing": _between(True, BERT),
    "activation_checkpointing_kwargs": _shown(
        {"use_reentrant": False}, f"{_CHANGES}activation_checkpointing_keeps_weights", BERT
    ),
    "gradient_checkpointing": _alone(True, _CHECKPOINTING),
    "gradient_checkpointing_kwargs": _alone({"use_reentrant": False}, _CHECKPOINTING),
    "torch_compile": _shown(True, f"{_CHANGES}torch_compile_arguments_reach_module_compile"),
    "torch_compile_backend": _shown("eager", f"{_CHANGES}torch_compile_arguments_reach_module_compile"),
    "torch_compile_mode": _shown("reduce-overhead", f"{_CHANGES}torch_compile_arguments_reach_module_compile"),
    "use_liger_kernel": _alone(True, f"{_CHANGES}liger_kernel_is_applied_or_its_package_asked_for"),
    "liger_kernel_config": _shown({"rope": False}, f"{_CHANGES}liger_kernel_is_applied_or_its_package_asked_for"),
    "auto_find_batch_size": _shown(True, "parity/test_batch_size_that_fits.py::test_retry_equals_a_run_of_that_size"),
    "torch_empty_cache_steps": _shown(2, f"{_CHANGES}torch_empty_cache_steps_empties_the_cache"),
    # Data.
    "dataloader_drop_last": _between(True),
    "dataloader_num_workers": _between(1),
    "dataloader_pin_memory": _shown(False, f"{_HERE}dataloader_pin_memory_reaches_the_loader"),
    "dataloader_persistent_workers": _between(True, WORKERS),
    "dataloader_prefetch_factor": _between(3, WORKERS),
    "dataloader_multiprocessing_context": _between("fork", WORKERS),
    "dataloader_in_order": _between(False),
    "remove_unused_columns": _between(False),
    "label_names": _given(["other"], STEPS),
    "train_sampling_strategy": _between("sequential"),
    "length_column_name": _shown("other", f"{_PREDICTION}group_by_length_uses_the_column_of_lengths"),
    "accelerator_config": _given({"use_seedable_sampler": False}),
    "ignore_data_skip": _shown(True, f"{_RESUME}ignore_data_skip_resumes_alike"),
    # Logging.
    "logging_strategy": _always("epoch"),
    "logging_steps": _between(3),
    "logging_first_step": _always(True),
    "logging_nan_inf_filter": _shown(False, "parity/test_losses.py::test_nan_losses_are_filtered_from_the_log_alike"),
    "log_level": _given("error"),
    "log_level_replica": _shown("error", f"{_FIELDS}log_level_is_that_of_the_rank"),
    "log_on_each_node": _shown(False, f"{_HERE}which_processes_log_and_save_on_the_second_node"),
    "disable_tqdm": _given(False),
    "include_num_input_tokens_seen": _always(True, BERT),
    "skip_memory_metrics": _shown(False, "unit/test_debug_utils.py::test_memory_metric_names_match_transformers"),
    "debug": _shown("underflow_overflow", "unit/test_debug_utils.py::test_underflow_overflow_names_the_bad_module"),
    "report_to": _alone("tensorboard", "parity/test_tracker_callbacks.py::test_callbacks_have_the_same_order"),
    "new_tracker_run": _alone(True, "reliability/test_tracker_runs.py::test_resume_continues_the_run_unless_asked"),
    "run_name": _alone("a run", "parity/test_trackers.py::test_run_can_be_chosen_by_id_or_nested"),
    "project": _alone("other", _TRACKERS),
    "trackio_space_id": _alone("space", _TRACKERS),
    "trackio_bucket_id": _alone("bucket", _TRACKERS),
    "trackio_static_space_id": _alone("space", _TRACKERS),
    "metrics_port": _alone(9400, "unit/monitoring/test_health.py::test_metrics_follow_a_run"),
    # Evaluation.
    "eval_strategy": _always("epoch"),
    "eval_steps": _between(3, {"eval_strategy": "steps"}),
    "eval_delay": _always(4, STEPS),
    "eval_on_start": _always(True, STEPS),
    "per_device_eval_batch_size": _always(3, STEPS),
    "prediction_loss_only": _always(True, STEPS),
    "eval_accumulation_steps": _shown(1, f"{_PREDICTION}evaluate_and_predict_are_those_of_transformers", STEPS),
    "eval_do_concat_batches": _always(False, STEPS),
    "include_for_metrics": _always(["loss"], STEPS),
    "batch_eval_metrics": _always(True, STEPS),
    "eval_use_gather_object": _shown(True, "distributed/test_evaluation.py::test_every_object_is_gathered", STEPS),
    "eval_memmap_dir": _alone("here", f"{_EVALUATION}memory_mapped_predictions_equal_those_in_memory"),
    "observe": _alone("speed", f"{_MONITORING}test_observer.py::test_log_lines_get_the_requested_measurements"),
    "save_minutes": _alone(5, f"{_MONITORING}test_run_requests.py::test_save_and_eval_minutes_set_the_intervals"),
    "eval_minutes": _alone(5, f"{_MONITORING}test_run_requests.py::test_save_and_eval_minutes_set_the_intervals"),
    "storage_url": _alone("memory://arguments", "reliability/test_storage_url.py::test_another_machine_resumes_a_run"),
    "keep_local": _alone(2, "reliability/test_storage_url.py::test_keep_local_bounds_local_checkpoints"),
    "mixture_weights": _alone({"a": 1.0}, "unit/data/test_mixture.py::test_plan_keeps_the_proportions_at_every_step"),
    "mixture_temperature": _alone(2.0, "unit/data/test_mixture.py::test_temperature_flattens_weights_by_size"),
    "mixture_column": _alone("kind", "unit/data/test_mixture.py::test_mixture_column_names_the_source"),
    "param_groups": _alone(
        [{"pattern": "*", "weight_decay": 0.1}], "parity/test_param_groups.py::test_groups_equal_those_made_by_hand"
    ),
    "on_divergence": _alone("rollback", f"{_DIVERGENCE}rollback_skips_bad_samples_exactly"),
    "divergence_threshold": _alone(8, f"{_DIVERGENCE}rollback_skips_bad_samples_exactly", {"on_divergence": "stop"}),
    "max_rollbacks": _alone(2, f"{_DIVERGENCE}divergence_error_names_step_and_samples", {"on_divergence": "rollback"}),
    "elastic": _alone(True, "distributed/test_elastic.py::test_run_that_changes_its_size_is_the_undisturbed_one"),
    "tokens_per_batch": _alone(64, "unit/data/test_token_batches.py::test_resume_within_an_epoch_is_exact"),
    "flatten_batches": _alone(True, "unit/data/test_token_batches.py::test_flattened_gradients_match_padded_ones"),
    "bf16_full_eval": _shown(True, f"{_PREDICTION}full_eval_in_half_precision", STEPS),
    "fp16_full_eval": _shown(True, f"{_PREDICTION}full_eval_in_half_precision", STEPS),
    "metric_for_best_model": _always("accuracy", STEPS),
    "greater_is_better": _always(True, BEST),
    # Saving.
    "output_dir": _always("elsewhere", {"save_strategy": "epoch"}),
    "save_strategy": _always("epoch"),
    "save_steps": _between(3, {"save_strategy": "steps"}),
    "save_total_limit": _always(1, STEPS),
    "save_only_model": _always(True, STEPS),
    "save_on_each_node": _shown(True, f"{_HERE}which_processes_log_and_save_on_the_second_node"),
    "checkpoint_format": _alone("dcp", "distributed/test_dcp.py::test_torch_reads_our_checkpoints"),
    "save_on_interrupt": _alone(False, "reliability/test_interruption.py::test_signal_saves_and_exits_with_its_status"),
    "enable_jit_checkpoint": _shown(True, "reliability/test_interruption.py::test_jit_checkpoint_saves_once", STEPS),
    "load_best_model_at_end": _always(True, {**BEST, "greater_is_better": True}),
    "restore_callback_states_from_checkpoint": _shown(
        True, "parity/test_events.py::test_callback_state_is_saved_and_restored"
    ),
    "push_to_hub": _alone(True, f"{_HUB}each_hub_strategy_pushes_the_same_commits"),
    "hub_model_id": _alone("org/name", f"{_HUB}each_hub_strategy_pushes_the_same_commits"),
    "hub_strategy": _alone("end", f"{_HUB}each_hub_strategy_pushes_the_same_commits"),
    "hub_token": _alone(
        "hf_token", "unit/hub/test_repository.py::test_wrong_token_or_repository_is_refused_at_the_start"
    ),
    "hub_private_repo": _alone(True, f"{_HUB}each_hub_setting_pushes_the_same_commits"),
    "hub_always_push": _alone(True, "unit/hub/test_upload_queue.py::test_failed_uploads_are_retried"),
    "hub_revision": _alone("dev", f"{_HUB}each_hub_setting_pushes_the_same_commits"),
    # Processes.
    "ddp_backend": _shown("gloo", _PLAN),
    "ddp_timeout": _shown(5, _PLAN),
    "ddp_find_unused_parameters": _shown(True, _PLAN),
    "ddp_bucket_cap_mb": _shown(1, _PLAN),
    "ddp_broadcast_buffers": _shown(True, _PLAN),
    "ddp_static_graph": _shown(True, _PLAN),
    "fsdp": _shown("full_shard", _PLAN),
    "fsdp_config": _shown({"min_num_params": 3}, _PLAN),
    "parallelism_config": _alone({"dp_shard_size": 2}, _PLAN),
    "deepspeed": _alone({"zero_optimization": {"stage": 2}}, _ENGINE),
    "lightning_config": _alone({"limit_val_batches": 1}, _ENGINE),
    # For scripts and launchers.
    "do_train": Case(True),
    "do_eval": Case(True),
    "do_predict": Case(True),
    "resume_from_checkpoint": Case("nowhere"),
    "local_rank": Case(3),
    # Of Seq2SeqTrainingArguments.
    "predict_with_generate": _alone(True, f"{_GENERATION}train_evaluate_and_predict_are_those_of_transformers"),
    "generation_max_length": _alone(4, f"{_GENERATION}generation_arguments_reach_evaluate_and_predict"),
    "generation_num_beams": _alone(2, f"{_GENERATION}generation_arguments_reach_evaluate_and_predict"),
    "generation_config": _alone(Path("a/folder"), f"{_GENERATION}generation_config_is_an_object_or_a_path"),
    "sortish_sampler": _alone(True, f"{_GENERATION}sortish_sampler_groups_similar_lengths"),
    # Old names.
    "evaluation_strategy": _same("eval_strategy", "steps"),
    "no_cuda": _same("use_cpu", True),
    "per_gpu_train_batch_size": _same("per_device_train_batch_size", 3),
    "per_gpu_eval_batch_size": _same("per_device_eval_batch_size", 5),
    "warmup_ratio": _same("warmup_steps", 0.25),
    "torchdynamo": _same("torch_compile_backend", "eager"),
    "xpu_backend": _same("ddp_backend", "ccl"),
    "push_to_hub_model_id": _same("hub_model_id", "name"),
    "push_to_hub_token": _same("hub_token", "secret"),
    "push_to_hub_organization": _old("hub_model_id", ("org", "org/x")),
    "adafactor": _old("optim", (True, "adafactor")),
    "group_by_length": _old("train_sampling_strategy", (True, "group_by_length")),
    "include_inputs_for_metrics": _old("include_for_metrics", (True, ["inputs"])),
    "tpu_metrics_debug": _old("debug", (True, ["tpu_metrics_debug"])),
    "sharded_ddp": _old(
        "fsdp",
        ("simple", "shard_grad_op"),
        ("zero_dp_3 auto_wrap offload", "full_shard auto_wrap offload"),
        (True, "shard_grad_op"),
        (["zero_dp_2", "offload"], "shard_grad_op offload"),
    ),
    "fsdp_min_num_params": _old("fsdp_config", (100, {"min_num_params": 100})),
    "fsdp_transformer_layer_cls_to_wrap": _old("fsdp_config", ("A", {"transformer_layer_cls_to_wrap": "A"})),
    "dispatch_batches": _old(
        "accelerator_config", *((on, AcceleratorConfig(dispatch_batches=on)) for on in (True, False))
    ),
    "split_batches": _old("accelerator_config", (True, AcceleratorConfig(split_batches=True))),
    # Old arguments without a new name.
    "logging_dir": _alone("logs", "lightning/test_loggers.py::test_log_folders_appear_when_something_is_written"),
    "save_safetensors": _alone(False, f"{_RESUME}each_layout_of_weights_resumes_and_loads"),
    "use_legacy_prediction_loop": _alone(True, f"{_EVALUATION}overridden_loops_and_steps_may_call_super"),
    "past_index": _alone(2, f"{_CHANGES}past_index_feeds_an_output_into_the_next_step"),
    "include_tokens_per_second": _alone(True, f"{_CHANGES}include_tokens_per_second_reports_all_input_tokens"),
    "use_mps_device": _alone(True, "unit/parallel/test_devices.py::test_use_mps_device_without_mps_is_refused"),
    "tpu_num_cores": _alone(8, "unit/parallel/test_refused.py::test_unsupported_combination_is_refused"),
    "ray_scope": _alone("all", "adapters/ray/test_ray_search.py::test_ray_scope_chooses_the_last_or_best_objective"),
    "fp16_backend": _alone("cpu_amp", f"{_OLD_CALLS}apex_backend_becomes_torch_autocast"),
    "half_precision_backend": _alone("cpu_amp", f"{_OLD_CALLS}apex_backend_becomes_torch_autocast"),
    "overwrite_output_dir": _alone(True, f"{_HERE}argument_without_effect_changes_nothing"),
    "jit_mode_eval": _alone(True, f"{_HERE}argument_without_effect_changes_nothing", STEPS),
    "use_ipex": _alone(True, f"{_HERE}argument_without_effect_changes_nothing", STEPS),
    "fp16_opt_level": _refused("O2", r"O1 \(or 01\): .*remove.* or load the model with dtype=torch.bfloat16"),
    "mp_parameters": _refused(
        "ddp=True", "SageMaker's .*use fsdp, and start the job with torchrun, as .*torch_distributed"
    ),
    "model_parallel": _refused(True, "naive model parallelism was removed after v4.1"),
}


def words_for(settings: Mapping[str, Any]) -> list[str]:
    """Arguments as words of a command line."""
    words = []
    for name, value in settings.items():
        is_json = isinstance(value, (dict, bool)) or (isinstance(value, list) and isinstance(value[0], dict))
        texts = [json.dumps(value)] if is_json else value if isinstance(value, list) else [value]
        words += [f"--{name}", *map(str, texts)]
    return words


def make_quiet_trainer(folder: Path, kind: Callable[..., Trainer] = Trainer, model: str = "plain", **settings: Any):
    """Our Trainer, quiet, with two steps to train."""
    make_model, make_data = MODELS[model]
    args = TrainingArguments(str(folder), **{**DEFAULTS, "max_steps": 2, **settings})
    return kind(make_model(), args, train_dataset=make_data(), eval_dataset=make_data())
