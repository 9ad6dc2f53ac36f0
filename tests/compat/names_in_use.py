"""The names of transformers' Trainer that other libraries use: of 23 public repositories, and of three libraries."""

#: TRL 1.16, sentence-transformers 6.2 and setfit 1.2 override, set or use these.
OF_LIBRARIES = """
    __init__ _determine_best_metric _eval_dataloaders _evaluate _get_collator_with_removed_columns _get_dataloader
    _get_eval_sampler _get_learning_rate _get_output_dir _get_train_sampler _globalstep_last_logged _hp_search_setup
    _inner_training_loop _load_best_model _load_from_checkpoint _load_optimizer_and_scheduler _maybe_log_save_evaluate
    _prepare_inputs _push_from_checkpoint _remove_unused_columns _save _save_checkpoint
    _set_signature_columns_if_needed _signature_columns _total_loss_scalar _train_batch_size
    accelerator add_callback args call_model_init callback_handler can_return_loss compute_loss
    compute_loss_context_manager compute_loss_func compute_objective control create_model_card
    current_gradient_accumulation_steps data_collator end eval_dataset evaluate evaluation_loop
    get_decay_parameter_names get_eval_dataloader get_optimizer_cls_and_kwargs get_test_dataloader get_tp_size
    get_train_dataloader hp_name hp_search_backend hp_space hub_model_id hyperparameter_search is_deepspeed_enabled
    is_fsdp_enabled is_in_train is_world_process_zero label_names label_smoother log loss_is_scaled_for_ga
    lr_scheduler model model_accepts_loss_kwargs model_init model_wrapped objective optimizer pop_callback
    prediction_step processing_class push_in_progress push_to_hub remove_callback save_model state store_flos train
    train_dataset training_step
""".split()
#: Further ones in 23 public repositories.
OF_REPOSITORIES = """
    deepspeed _past _memory_tracker current_flos optimizer_cls_and_kwargs create_optimizer get_batch_samples
    create_accelerator_and_postprocess _wrap_model _load_rng_state
""".split()
#: Further ones that transformers 5.23 has, and none of these uses.
OF_TRANSFORMERS = """
    _attn_mask_causal_checked _build_accelerator_args _defer_fsdp_gradient_reduction _get_grad_norm
    _has_mixed_mesh_grads _issue_warnings_after_load _loggers_initialized _mixed_mesh_grad_norm _mixed_mesh_grads
    _prepare_context_parallel_inputs _prepare_for_training _run_epoch _sync_replicated_trainable_parameters _tr_loss
    _tune_save_checkpoint _update_auto_batch_size gather_function get_cp_size get_sp_size get_total_train_batch_size
    is_distributed_loading_by_transformers model_preparation_time neftune_hook_handle neftune_noise_alpha
    _initial_global_step _loss_shifts_labels
""".split()
IN_USE = [*OF_LIBRARIES, *OF_REPOSITORIES, *OF_TRANSFORMERS]
#: Names that are not there, and what becomes of those who use them.
ABSENT = {
    "_build_accelerator_args": "a subclass that overrides it is refused, naming what to do instead",
    "_defer_fsdp_gradient_reduction": "likewise, with a model that transformers sharded while loading it",
    "_sync_replicated_trainable_parameters": "likewise",
    "_loggers_initialized": "transformers sets it to False and never reads it",
    "_attn_mask_causal_checked": "transformers sets it under context parallelism, which is refused",
}
