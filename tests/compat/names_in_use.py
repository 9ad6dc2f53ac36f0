"""Names of transformers' Trainer that TRL, sentence-transformers, setfit and 23 repositories use, and its own."""

#: Methods that these override.
METHODS = """
    _clip_grad_norm _determine_best_metric _evaluate _get_collator_with_removed_columns _get_dataloader
    _get_eval_sampler _get_grad_norm _get_learning_rate _get_output_dir _get_train_sampler _has_mixed_mesh_grads
    _hp_search_setup _inner_training_loop _issue_warnings_after_load _load_best_model _load_from_checkpoint
    _load_optimizer_and_scheduler _load_rng_state _maybe_log_save_evaluate _mixed_mesh_grad_norm
    _prepare_context_parallel_inputs _prepare_for_training _prepare_inputs _push_from_checkpoint _remove_unused_columns
    _run_epoch _save _save_checkpoint _set_signature_columns_if_needed _update_auto_batch_size _wrap_model add_callback
    call_model_init compute_loss compute_loss_context_manager create_accelerator_and_postprocess create_model_card
    create_optimizer end evaluate evaluation_loop get_batch_samples get_cp_size get_decay_parameter_names
    get_eval_dataloader get_optimizer_cls_and_kwargs get_sp_size get_test_dataloader get_total_train_batch_size
    get_tp_size get_train_dataloader hyperparameter_search init_hf_repo is_world_process_zero log pop_callback
    prediction_step push_to_hub remove_callback save_model store_flos train training_step
""".split()
#: Attributes that these read; test_attributes.py also sets most of them.
READ = """
    _eval_dataloaders _globalstep_last_logged _initial_global_step _loss_shifts_labels _memory_tracker _mixed_mesh_grads
    _signature_columns _total_loss_scalar _tr_loss _train_batch_size _trial accelerator args callback_handler
    can_return_loss compute_loss_func control current_flos current_gradient_accumulation_steps data_collator deepspeed
    eval_dataset gather_function hp_name hp_search_backend hub_model_id is_deepspeed_enabled
    is_distributed_loading_by_transformers is_fsdp_enabled is_in_train is_model_parallel label_names label_smoother
    loss_is_scaled_for_ga lr_scheduler model model_accepts_loss_kwargs model_init model_preparation_time model_wrapped
    neftune_hook_handle neftune_noise_alpha optimizer optimizer_cls_and_kwargs place_model_on_device processing_class
    state train_dataset
""".split()
#: Name that ours lacks → whether transformers calls overrides of it, which are then refused.
ABSENT = {
    "_build_accelerator_args": "called",
    "_defer_fsdp_gradient_reduction": "called for a model that was sharded while it was loaded",
    "_sync_replicated_trainable_parameters": "called for a model that was sharded while it was loaded",
    "_tune_save_checkpoint": "for a search with Ray, which refuses it",
    "_loggers_initialized": "an attribute that transformers never reads",
    "_attn_mask_causal_checked": "an attribute for context parallelism, which is refused",
}
