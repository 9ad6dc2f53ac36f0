"""The release that first had each argument, and the defaults that have changed.

Taken from the releases v4.1, v4.15, v4.30, v4.40, v4.48, v4.57, v5.0 and v5.23, so an argument may be a little older
than stated here. The help of each legacy argument names the releases that had it.
"""

from __future__ import annotations

import dataclasses
from types import MappingProxyType

SINCE = {
    "v4.1": """
        adam_beta1 adam_beta2 adam_epsilon dataloader_drop_last dataloader_num_workers debug disable_tqdm do_eval
        do_predict do_train eval_accumulation_steps eval_steps fp16 gradient_accumulation_steps greater_is_better
        ignore_data_skip label_names learning_rate load_best_model_at_end local_rank logging_first_step
        logging_steps max_grad_norm max_steps metric_for_best_model num_train_epochs output_dir
        per_device_eval_batch_size per_device_train_batch_size prediction_loss_only remove_unused_columns run_name
        save_steps save_total_limit seed warmup_steps weight_decay
    """.split(),
    "v4.15": """
        bf16 bf16_full_eval dataloader_pin_memory ddp_bucket_cap_mb ddp_find_unused_parameters deepspeed
        fp16_full_eval generation_max_length generation_num_beams gradient_checkpointing hub_model_id hub_strategy
        hub_token label_smoothing_factor length_column_name log_level log_level_replica log_on_each_node
        logging_nan_inf_filter logging_strategy lr_scheduler_type predict_with_generate push_to_hub report_to
        resume_from_checkpoint save_on_each_node save_strategy skip_memory_metrics sortish_sampler tf32
    """.split(),
    "v4.30": """
        auto_find_batch_size data_seed ddp_backend ddp_timeout eval_delay fsdp fsdp_config full_determinism
        generation_config hub_private_repo optim optim_args torch_compile torch_compile_backend torch_compile_mode
    """.split(),
    "v4.40": """
        accelerator_config dataloader_persistent_workers dataloader_prefetch_factor ddp_broadcast_buffers
        eval_do_concat_batches gradient_checkpointing_kwargs hub_always_push include_num_input_tokens_seen
        lr_scheduler_kwargs neftune_noise_alpha optim_target_modules save_only_model use_cpu
    """.split(),
    "v4.48": """
        average_tokens_across_devices batch_eval_metrics eval_on_start eval_strategy eval_use_gather_object
        include_for_metrics restore_callback_states_from_checkpoint torch_empty_cache_steps use_liger_kernel
    """.split(),
    "v4.57": """
        hub_revision liger_kernel_config parallelism_config project trackio_space_id
    """.split(),
    "v5.0": """
        enable_jit_checkpoint use_cache
    """.split(),
    "v5.23": """
        activation_checkpointing activation_checkpointing_kwargs dataloader_in_order
        dataloader_multiprocessing_context ddp_static_graph trackio_bucket_id trackio_static_space_id
        train_sampling_strategy
    """.split(),
}
#: The newest documented default is used; these had other defaults.
EARLIER_DEFAULTS = {
    "average_tokens_across_devices": "False until v4.53",
    "hub_private_repo": "False until v4.40",
    "log_level_replica": "'passive' in v4.15",
    "optim": "'adamw_hf' until v4.30, 'adamw_torch' until v4.53 and with torch before 2.8",
    "output_dir": "required until v4.48",
    "report_to": "all installed trackers until v4.57",
    "trackio_space_id": "'trackio' until v5.5",
}
_RELEASE = {name: release for release, names in SINCE.items() for name in names}


def annotate(arguments: type) -> None:
    """Add to the help of each field the release that added it, and its earlier defaults."""
    for field in dataclasses.fields(arguments):
        note = f"Since {_RELEASE.get(field.name)}"
        if field.name in _RELEASE and note not in field.metadata["help"]:
            if field.name in EARLIER_DEFAULTS:
                note += f"; default {EARLIER_DEFAULTS[field.name]}"
            words = {**field.metadata, "help": f"{field.metadata['help']} {note}."}
            field.metadata = MappingProxyType(words)
