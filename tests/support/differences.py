"""The ledger: where hftrainer and transformers differ on purpose, each with its reason.

Parity tests read it; `COMPATIBILITY.md` says the same to users.
"""

#: Keys of log lines that are measured times: equal in name, never in value.
MEASURED = ("_runtime", "_per_second", "_model_preparation_time")

#: Files in a checkpoint that are ours alone.
OWN_FILES = {
    *("hftrainer_manifest.json", "lightning_callbacks.pt"),
    *("progress.pt", "progress_0.pt", "progress_1.pt"),
}

#: Subject → words by which a difference belongs to it; the first that has one.
SUBJECTS = {
    "Searches": ("hyperparameter_search", "trial", "batch size by hand"),
    "DeepSpeed": ("deepspeed",),
    "FSDP and other layouts": ("fsdp", "FSDP", "parallelism_config", "tensor parallelism", "SHARDED", "min_num_params"),
    "TFTrainer": ("TFTrainer",),
    "The Hub, model cards and trackers": (
        *("upload", "push_to_hub", "model card", "README", "MLflow", "output folder", "architectures", "save_metrics"),
    ),
    "Devices and precision": ("MPS", "fp16", "bf16", "skip_memory_metrics", "ddp_backend", "Apex", "apex", "TPU"),
    "Several processes": ("processes", "dispatch_batches", "even_batches", "shards of different length"),
    "Evaluation": ("evaluat", "predict", "eval_", "metric_for_best_model", "lists of different lengths"),
    "Checkpoints and resuming": (
        *("checkpoint", "resum", "save_", "weights", "training_args.bin", "pickled", "tied", "signals", "runs begun"),
        *("an error in the middle", "a save", "load_best_model"),
    ),
    "Callbacks and overrides": ("callback", "compute_loss", "methods of Trainer", "create_optimizer", "private loop"),
    "Arguments": ("arguments", "_args", "_kwargs", "max_grad_norm", "sampler", "column", "optim", "auto_find", "="),
}
OTHERS = "Training"


def subject_of(what: str) -> str:
    """Under which heading a difference is listed."""
    return next((subject for subject, words in SUBJECTS.items() if any(word in what for word in words)), OTHERS)


#: What must differ → why.
DIFFERENCES = {
    "parallelism_config with dp_shard_size, without fsdp": (
        "accelerate makes replicas (DDP) of it, and shards with fsdp only; ours shards in both cases."
    ),
    "tensor parallelism": (
        "Processes with the same batches count once: in the rows that compute_metrics gets, in num_input_tokens_seen "
        "and in total_flos; transformers counts each. It also runs on the CPU, where accelerate refuses to. The "
        "optimizer's whole state is in optimizer.bin."
    ),
    "hftrainer_manifest.json and lightning_callbacks.pt in a checkpoint": (
        "Sizes and checksums of all files, by which a damaged checkpoint is known; and what Lightning's callbacks have "
        "kept, if there are any. transformers ignores both."
    ),
    "get_last_checkpoint() and resume_from_checkpoint=True": (
        "transformers takes the folder of the most steps, whole or not; ours the newest whole one, and names the file "
        "for which it passes over another."
    ),
    "a checkpoint whose files were changed since it was written": (
        "transformers takes what it finds. Ours, for a folder that is named and for load_best_model_at_end, takes "
        "files that were added, removed or are of another size if they can be read, with a warning that names them; "
        "other bytes in the same size are refused until `python -m hftrainer checkpoint --accept FOLDER` was run."
    ),
    "a checkpoint that cannot be written (full disk, read-only folder)": (
        "transformers stops; ours says so and goes on to the next one, or stops with "
        "lightning_config={'on_save_error': 'stop'}."
    ),
    "TFTrainer (until v4.36)": (
        "The model is torch's: a TensorFlow model's torch twin is trained, and the weights are written back. Losses "
        "agree to 2e-6, since two libraries compute in float32. run_model gets and returns tensors of torch, "
        "training_step returns the loss, and overrides of apply_gradients and distributed_* are refused. Checkpoints "
        "are checkpoint-xxx folders; ckpt-xxx of TensorFlow is refused by name."
    ),
    "TFTrainer.evaluate()": (
        "Each sample counts once. The real one filled the last batch up with the first samples, and counted these "
        "twice; with prediction_loss_only=True it did not end."
    ),
    "TFTrainer with a dataset of unknown or infinite length": (
        "The real one wanted an asserted cardinality. Ours counts once, and takes an infinite one with max_steps."
    ),
    "TFTrainer's log": (
        "Goes to the trackers of report_to, and to tb_writer if there is one. The real one opened a writer of its own, "
        "and W&B and Comet wherever they were installed. eval_strategy='epoch', logging_strategy and save_strategy, "
        "which it did not read, have their meaning. debug=True does not trace TensorFlow's graph, as there is none: "
        "use lightning_config={'profiler': 'pytorch'}."
    ),
    "README.md of a PEFT adapter": (
        "PEFT writes the library versions that it finds into it; both libraries let PEFT write it, so it is compared "
        "by name only."
    ),
    "MLflow after training": (
        "What transformers logs after train(), as evaluate() does, goes to a new MLflow run without a name, since the "
        "run has ended; ours goes to the same run."
    ),
    "training_args.bin": (
        "Pickles the TrainingArguments class, which is another one; compared by name only. transformers writes "
        "hub_token into it, ours does not."
    ),
    "a save while an upload is under way": (
        "Both leave it out, unless hub_always_push is set. transformers then ends without it; ours uploads the last "
        "one at the end, deleted meanwhile or not, and with hub_strategy='all_checkpoints' each that is still there."
    ),
    "checkpoints of trials": (
        "transformers uploads those in folders of a search below output_dir with the model; ours leaves them out."
    ),
    "resuming a complete run with push_to_hub": (
        "transformers uploads nothing; ours uploads the last checkpoint, for the run may have been killed before its "
        "upload. What is in the repository already makes no commit."
    ),
    "the output folder during push_to_hub": (
        "transformers copies the model of each save into it and uploads that, which a later save may change meanwhile; "
        "ours uploads each save from its own checkpoint, and leaves the folder to save_model and push_to_hub."
    ),
    "an upload that fails": (
        "In the background transformers says nothing of it and does not try again; ours does, also at the end of "
        "training, and names what is missing with the command that uploads it. save_model() then goes on; "
        "push_to_hub() raises HubError, once the model is in the output folder."
    ),
    "push_to_hub with a hub_revision that is not there, or a token that may only read": (
        "transformers trains, and each upload fails unseen; ours refuses when the Trainer is built."
    ),
    "metrics returned by train() with disable_tqdm": (
        "PrinterCallback of transformers removes total_flos from the very dict that train() returns; ours prints a "
        "copy."
    ),
    "compute_loss without num_items_in_batch": (
        "transformers 5.23 calls every override with num_items_in_batch and fails on those of v4.45 and before; ours "
        "calls each by its own signature, and divides its loss by the micro-batches of the window."
    ),
    "compute_loss without return_outputs": (
        "Overrides of v4.1 give evaluation their loss; the predictions come from a forward pass of their own."
    ),
    "architectures saved under other names": (
        "transformers 5.23 saves some (ViT) in the names of older releases and its Trainer loads them by name, so "
        "neither a resumed run nor load_best_model_at_end gets the weights; ours loads them by from_pretrained."
    ),
    "tied weights of a plain module": "transformers cannot save them; ours writes the shared tensor once.",
    "weights of a plain module above 5 GB": (
        "transformers writes one file, whatever its size; ours writes shards with an index, as save_pretrained does. "
        "transformers resumes from either."
    ),
    "save_safetensors=False": (
        "transformers has it until v4.57; ours writes the same .bin files, with transformers v5 too, from the "
        "safetensors that its save_pretrained has written."
    ),
    "runs begun with transformers 4.57": (
        "They go on exactly beside 4.57 with install(), and beside a newer release with lightning_config={'behaviour': "
        "'4.57'}. But the models are those of the installed transformers: BERT and others of v5 leave their loss "
        "undivided when it accumulates."
    ),
    "pickled objects in a checkpoint": (
        "Neither library reads them; ours names the file and the class, and how to allow it."
    ),
    "trainable flags of PEFT adapters": (
        "transformers activates one adapter when it resumes, which freezes the others; ours leaves every flag as it is."
    ),
    "create_optimizer_and_scheduler": (
        "train() of transformers 5.23 calls create_optimizer and create_scheduler and never this one, which all "
        "releases document as the method to override; ours calls an override of it."
    ),
    "methods of Trainer and accelerator that are replaced": (
        "Each that transformers calls is called as often and between the same events, on the class, in a subclass, on "
        "the instance or on trainer.accelerator, but for those in NOT_CALLED_ALIKE. With training_step or "
        "accelerator.backward replaced, Lightning's manual optimization is used. An override of _run_epoch must call "
        "super()._run_epoch(), since Lightning's loop runs the epoch. The classes of accelerate itself are not used, "
        "so what is put into them changes nothing."
    ),
    "_build_accelerator_args and two for models sharded while they are loaded; _tune_save_checkpoint": (
        "Methods of transformers' own engine, which nothing calls; the last one is there for scripts, the others are "
        "not. A subclass that overrides one is refused where transformers would call it, naming what to do instead."
    ),
    "methods that only earlier releases have": (
        "_nested_gather, _gather_and_numpify, _pad_across_processes, _sorted_checkpoints, _rotate_checkpoints, "
        "_activate_neftune, _deactivate_neftune, compare_trainer_and_checkpoint_args, propagate_args_to_deepspeed and "
        "_add_sm_patterns_to_gitignore are there beside every release. A run calls overrides of those about NEFTune "
        "and rotation. The last one writes the file for the next upload, where transformers makes a commit."
    ),
    "train(model_path=...)": (
        "Gone in v5. With a FutureWarning ours resumes from it, as v4.15 to v4.57; but a folder without "
        "trainer_state.json, where v4.48 and v4.57 fail, is that of a model, as in v4.1: nothing is resumed, and the "
        "warning says so."
    ),
    "TrainingArguments: arguments by position": (
        "transformers has another order in nearly every release. After output_dir ours has that of v4, as far as v4.15 "
        "to v4.57 agree: up to eval_accumulation_steps. More of them, and the order of v5, which begins with a number "
        "where v4 has switches, are refused, naming the argument."
    ),
    "--sharded_ddp and --debug alone, sharded_ddp=True, debug=True": (
        "Taken as v4.1 documents them, for 'simple' and 'tpu_metrics_debug'; later releases fail on one or the other."
    ),
    "Seq2SeqTrainer: max_length and num_beams by position": (
        "evaluate and predict take them as v4.15 does; later releases take keywords only."
    ),
    "fp16_backend='apex', half_precision_backend='apex'": (
        "transformers 4 ends without apex.amp, which NVIDIA has removed from Apex. Ours warns and trains by torch's "
        "float16 autocast, as Apex's level O1 does; O2 and O3 are refused, since they keep the weights in float16."
    ),
    "use_ipex=True, jit_mode_eval=True": (
        "transformers 4 tuned the model with what Intel and torch have discontinued; ours warns, and evaluates the "
        "model as it is. The results are the same but for rounding."
    ),
    "log_level='passive'": (
        "v4.15 documents INFO for the main process. Releases from v4.30 on leave the level as it is, so WARNING unless "
        "the script sets one, and so does ours beside each of them; log_level='info' shows what v4.15 showed."
    ),
    "tools that rewrite the source text of the private loop": (
        "Unsloth and others execute the text of Trainer._inner_training_loop anew with other lines. A method that was "
        "made so out of ours is refused, when the Trainer is made or trains; Unsloth's own patch finds no line of "
        "transformers' to replace and fails by itself."
    ),
    "files of the script in a checkpoint folder": (
        "What an override of _save_checkpoint writes into checkpoint-N before super() is in the checkpoint and its "
        "manifest; what a killed run has left in such a folder is not, where transformers keeps it. With "
        "lightning_config['async_checkpoint'] and such an override, super() returns when the checkpoint is there."
    ),
    "accelerator.prepare with deepspeed": "Training makes the engine itself, and calls prepare for loaders only.",
    "an evaluation loader that the accelerator has not prepared": (
        "accelerator.gather_for_metrics of accelerate then takes the training loader for the one in use, and in the "
        "last steps of an epoch drops rows of each evaluation batch by the size of its last batch; ours keeps them."
    ),
    "bf16: the model after train()": (
        "accelerate leaves autocast on model.forward for good, so the model called by hand in on_train_end or later "
        "computes in bfloat16; ours gives the model its own forward back when the run ends."
    ),
    "predictions that are not one row per sample": (
        "accelerate cuts every tensor of the last batch to the number of its samples; ours keeps what the model or "
        "preprocess_logits_for_metrics returned."
    ),
    "an unprepared evaluation loader at an epoch's end": (
        "transformers cuts its batches to the last training batch's size, a leak of accelerate's state; ours keeps "
        "all rows."
    ),
    "persistent workers and evaluate(other_dataset)": (
        "transformers evaluates the set that it evaluated before; ours evaluates the one given."
    ),
    "restore_callback_states_from_checkpoint": (
        "transformers replaces the callbacks by new ones at the end of the list; ours restores them in their places."
    ),
    "several callbacks of one class that export a state": (
        "transformers adds their states to those of the save before, so that resuming finds the oldest; "
        "ours saves each once."
    ),
    "optimizer, lr_scheduler and loaders given to callbacks": (
        "transformers gives accelerate's wrappers of them; ours gives them as they are."
    ),
    "several PEFT adapters and load_best_model_at_end": (
        "transformers loads the adapter at the folder's root into the active one; ours loads each by its name."
    ),
    "older releases (install(), python -m hftrainer run)": (
        "Log lines, events, files, metrics and weights are those of the installed release, from 4.48 on: see the table "
        "below. Before 4.48 they are those of 4.48. `from hftrainer import ...` has those of 5.23."
    ),
    "the last window of an epoch (before 4.52)": (
        "With gradient_accumulation_steps transformers takes its length from the number of samples instead of "
        "batches, and may leave batches out, whose gradients then go into the next epoch; ours reads all. A resumed "
        "run of these releases begins at another batch, and leaves the last window out; ours goes on exactly."
    ),
    "save_strategy='best' (4.50 to 5.3)": (
        "transformers does not note which checkpoint is the best, so load_best_model_at_end loads none; ours does."
    ),
    "EarlyStoppingCallback without load_best_model_at_end (before 4.49)": "transformers refuses it; ours warns.",
    "dataloader_persistent_workers in evaluations (4.48)": (
        "transformers prepares the loader again for each evaluation, which draws other random numbers; ours does not."
    ),
    "resuming from our own checkpoint": (
        "transformers reads the first window before it restores the random states, sums the log line from the "
        "checkpoint on, and leaves out the end of an epoch whose last step was saved; ours ends with the weights and "
        "the log of the undisturbed run. Checkpoints hold one file more for this, progress.pt."
    ),
    "resuming a run that was complete": (
        "transformers trains one more step when max_steps was reached within an epoch; ours trains none."
    ),
    "signals": (
        "SIGTERM, SIGUSR1 and Ctrl-C save the optimizer step in hand and then end the script as they would have "
        "(status 143, 138, KeyboardInterrupt); the second one ends it at once. transformers is ended without saving. "
        "Handlers of the script's own stay; save_on_interrupt=False or save_strategy='no' changes nothing about "
        "signals. Lightning's handlers are not installed."
    ),
    "an error in the middle of a run": (
        "What was trained is saved before the error goes on its way, if the last step is whole (save_on_interrupt)."
    ),
    "enable_jit_checkpoint": (
        "Stops after the step in hand; transformers waits three seconds more, and writes into the final folder."
    ),
    "an empty evaluation set": "transformers returns metrics without a loss; ours says that there is no batch.",
    "length_column_name": (
        "transformers removes the column of lengths as unused before it looks for it, and counts the lengths anew; "
        "ours takes the lengths that the column gives."
    ),
    "predict() with train_sampling_strategy='group_by_length'": (
        "transformers returns the predictions in the order of the lengths; ours in the order of the dataset. "
        "evaluate() goes by length in both."
    ),
    "an evaluation set that is a dict, and metric_for_best_model='loss'": (
        "transformers stops with a KeyError, since each set has its own loss; ours takes the mean of the sets' losses."
    ),
    "accelerator_config in evaluation": (
        "Says how batches reach the processes in training only: in an evaluation whole batches are handed out in turn, "
        "whatever it says."
    ),
    "even_batches=False in several processes": (
        "Where the processes would get different numbers of batches, transformers waits for ever; ours refuses to "
        "start."
    ),
    "a stream in shards of different length, with dispatch_batches=False": (
        "transformers lets each process begin its next epoch when its own shards are through; ours ends the epoch for "
        "all with the shortest, and says so."
    ),
    "resuming with dispatch_batches=True": (
        "transformers passes over too few batches of a dataset with a length, one for each process's; ours goes on "
        "behind the samples that were used."
    ),
    "several processes on MPS": (
        "transformers trains the same model in each, alone; ours refuses, since no backend connects them."
    ),
    "accelerator_config['non_blocking']=True on MPS": (
        "transformers copies so, and other numbers may arrive (pytorch/pytorch#139550); ours waits for the copy."
    ),
    "PYTORCH_ENABLE_MPS_FALLBACK": (
        "accelerate sets it when torch has long read it; ours leaves it, and names it when an operator is missing."
    ),
    "skip_memory_metrics=False on MPS": (
        "transformers reports the text 'Not available' as the peak, which torch does not measure; ours leaves it out."
    ),
    "ddp_backend": (
        "On the CPU, NPU, MLU and MUSA accelerate takes its own, whatever is given; ours refuses by name what the "
        "device cannot have."
    ),
    "sharded_ddp": (
        "transformers v4.1 to v4.30 sharded by FairScale, which is no longer developed; ours by torch's FSDP, with the "
        "same losses: `simple` and `zero_dp_2` are `shard_grad_op`, `zero_dp_3` is `full_shard`, and `offload` and "
        "`cpu_offload` keep parameters on the CPU."
    ),
    "several visible GPUs, and no launcher": (
        "transformers trains by DataParallel in one process; ours starts the script once for each GPU and trains by "
        "DDP, with the same samples in a step."
    ),
    "generating with a sharded model": (
        "transformers documents that FSDP and `predict_with_generate` exclude each other; ours generates what the "
        "whole model does."
    ),
    "ddp_backend='smddp'": (
        "transformers imports SageMaker's library in jobs with its data parallelism; ours takes the backend once the "
        "script has imported smdistributed.dataparallel.torch.torch_smddp, and names the import if it is missing."
    ),
    "fsdp without a GPU": "transformers trains replicas without a word; ours shards the model.",
    "fsdp='no_shard', 'hybrid_shard' and keys that only FSDP1 has": (
        "transformers 5 refuses them unless `fsdp_config['version']` is 1; ours takes FSDP1 by itself, so that scripts "
        "for transformers 4 run."
    ),
    "fsdp='full shard', backward_prefetch='backward_pos'": (
        "The documents of v4.48 write them so, and transformers fails on both; ours takes them for 'full_shard' and "
        "'backward_post'."
    ),
    "min_num_params without auto_wrap_policy": "It wraps by size, as in transformers 4; transformers 5 ignores it.",
    "outputs of a model sharded by FSDP2 in half precision": (
        "They stay in float32. accelerate rounds them, so that a bfloat16 loss is logged in steps of 0.02."
    ),
    "save_model() with SHARDED_STATE_DICT": "transformers writes nothing; ours gathers the whole weights.",
    "resuming from a checkpoint of FSDP": (
        "transformers needs FSDP with the same `state_dict_type`; ours reads both kinds with any strategy, or without "
        "FSDP, and any number of processes."
    ),
    "deepspeed: no gradient_clipping in the configuration": (
        "`max_grad_norm` is used, as v4.1 documents it; transformers 5 does not clip then, and ignores the argument."
    ),
    "deepspeed: values that differ from an argument's default": (
        "The configuration wins, which is logged, so that the documents' configurations run by themselves; "
        "transformers asks for the argument too. Values that differ from an argument that is given are refused by both."
    ),
    "deepspeed: bf16=True or fp16=True without a section of that name": (
        "transformers enables it and leaves the batch's floating-point tensors in float32, which fails at the first "
        "layer; ours casts them."
    ),
    "deepspeed: offload_optimizer with an optimizer that DeepSpeed has not for the CPU": (
        "transformers trains with Adam instead, without a word; ours refuses it by name."
    ),
    "deepspeed: optimizers=(...)": (
        "transformers drops the script's optimizer and makes its own; ours uses it, in one `train()`."
    ),
    "deepspeed: evaluation before training": (
        "transformers refuses it without ZeRO-3; ours evaluates the model as it is."
    ),
    "deepspeed: an optimizer step's events": (
        "As in transformers the engine clips and steps before `on_pre_optimizer_step`, and a schedule of the "
        "configuration's shows the next step's learning rate."
    ),
    "evaluation in several processes": (
        "accelerate fills the last batches up with samples seen before, so their losses and running statistics include "
        "them; ours hands out whole batches in turn and drops what only keeps step, so that metrics and predictions "
        "are those of one process."
    ),
    "eval_loss in training in several processes": (
        "transformers divides an evaluation's loss by the items in the batches of all processes and multiplies it by "
        "their number, where the model takes num_items_in_batch; ours is each batch's own, as in one process."
    ),
    "progress_0.pt and on in a checkpoint of several processes": (
        "What progress.pt is for one process. One process gathers the random states and this of all, writes the whole "
        "checkpoint and renames it."
    ),
    "control flags in several processes": (
        "transformers lets each process follow its own; ours lets all do what one is asked to, at the end of the "
        "optimizer step. A stop asked for within an accumulation window waits for its end."
    ),
    "log_metric in several processes": "Each process logs the mean of its own values; the loss is the mean of all.",
    "eval_use_gather_object": (
        "accelerate joins whatever a process returns into one list; ours keeps tensors, tuples and dicts as they are "
        "and joins lists, one item a sample."
    ),
    "eval_accumulation_steps=None": (
        "transformers keeps all outputs on the device until the end; ours moves each batch to the CPU at once. The "
        "results are the same."
    ),
    "lists of different lengths among the outputs": (
        "transformers cuts them to the shortest batch's without a word when it concatenates; ours says so and names "
        "eval_do_concat_batches."
    ),
    "prediction_loop": (
        "transformers had it until v4.57 and called it with use_legacy_prediction_loop only; ours also calls that of a "
        "subclass which has no evaluation_loop of its own, as v4.4 did."
    ),
    "fp16 on a CPU": (
        "transformers trains in float32 without a word; ours as asked, with autocast to float16 and a scaled loss."
    ),
    "fp16 with fused AdamW, the default": (
        "A step that is skipped for infinite gradients does not move the learning rate on. transformers does not "
        "notice those of fused optimizers, which skip by themselves, and moves it on."
    ),
    "auto_find_batch_size": (
        "transformers takes a tenth off (half until v4.57) and goes on with the weights that the failed attempt left; "
        "ours halves and starts again from where train() began, so the run is the one with that batch size."
    ),
    "include_tokens_per_second": (
        "transformers (until v4.57) read all the data once more to count it; ours counts what is trained on."
    ),
    "layer-wise optimizers": (
        "transformers 5.23 logs the schedule's learning rate and steps with the peak throughout, and saves no state of "
        "theirs; ours steps with the rate that it logs, and saves and restores the state. With a constant schedule "
        "both are the same."
    ),
    "optim='galore_adafactor_layerwise'": (
        "transformers 5.23 fails to build it, since it leaves out scale_parameter and relative_step."
    ),
    "optim_args": (
        "transformers leaves out what the optimizer does not take, and reads every value of kahan_sum and decouple_lr "
        "as True; ours refuses the first and reads the second."
    ),
    "lr_scheduler_kwargs": (
        "transformers leaves them out for 'constant' and 'constant_with_warmup', and fails with a TypeError for other "
        "schedules that do not take them; ours names them, and what the schedule takes."
    ),
    "sortish_sampler": "transformers has the argument and reads it nowhere; ours groups by length.",
    "an empty training stream": "accelerate raises in the middle of an epoch; ours stops with a warning.",
    "hyperparameter_search: n_trials": (
        "The trials that the study holds at the end, over all processes and restarts, so that a search that was "
        "killed finishes the number it was asked for; in transformers each call adds as many. Trials that were cut off "
        "by the end of their process are marked as failed, tried again once, and do not count. A new study is the same "
        "in both."
    ),
    "hyperparameter_search: a study that exists": (
        "Its sampler draws other numbers than the one before. In transformers a seeded sampler begins with the same "
        "numbers again, so that restarts and several processes repeat its trials."
    ),
    "hyperparameter_search: a name in the space that is no argument": (
        "transformers logs a warning and trains without it; ours stops and names the nearest argument. With a "
        "`model_init` that takes the trial, other names are left to it unless they are nearly an argument's."
    ),
    "hyperparameter_search: the values of a trial": (
        "Each trial begins with the arguments from before the search, which are back when it ends; in transformers the "
        "values of earlier trials stay where a trial chooses none. They are checked as by the constructor, a share "
        "like `warmup_steps=0.1` is not cut to an int, and all that follows from arguments is built anew, the label "
        "smoother too."
    ),
    "hyperparameter_search: trials that fail": (
        "Out of memory fails the trial, with its reason among the user attributes, and not the search; transformers "
        "stops. When no trial was completed the error says why they failed."
    ),
    "hyperparameter_search: n_jobs": (
        "transformers trains the trials of all threads in one model; ours starts the script again for each job, and "
        "these processes share the study. An error in one of them, or a callback that stops the study, ends the search "
        "as in one process; what a killed one leaves is done by the others."
    ),
    "hyperparameter_search: the default objective": (
        "The sum of all metrics that are no measurements of time or memory; transformers adds up memory too, and the "
        "time to prepare the model, which stands in every evaluation once `evaluate()` was called before training. A "
        "list of one number counts as the number."
    ),
    "hyperparameter_search: True and False": (
        "'False' and '0' are False, and what is neither true nor false is refused; in transformers every text is True."
    ),
    "hyperparameter_search: sweeps of W&B": (
        "The run is begun with the sweep's parameters alone, and the best run holds nothing else; transformers adds "
        "`assignments` and `metric`. A parameter that is no argument is refused before there is a sweep. Runs that "
        "fail, and NaN, are left out, and said at the end. `metric='objective'` logs what compute_objective returns. "
        "`report_to` is afterwards as it was."
    ),
    "hyperparameter_search in several processes": (
        "Suggestions in model_init, pruning and failed objectives reach all processes, which all return the best run; "
        "in transformers the others wait when a trial is pruned, and get None."
    ),
    "hyperparameter_search with Ray: going on from a checkpoint": (
        "Ray gets the folder checkpoint-xxx of an evaluation's step once it is written, so a trial that is ended has "
        "its last checkpoint too, and one that goes on does so exactly; transformers writes a second one without the "
        "random states. A trial of PBT keeps the learning rate, weight decay, betas and epsilon that it was given; in "
        "transformers those of the checkpoint's optimizer take their place. Without evaluations in training "
        "transformers writes one more checkpoint for Ray; ours reports the last of the run."
    ),
    "hyperparameter_search with Ray: folders and trackers": (
        "A relative output_dir, and every other relative path, is meant in the folder in which the search was started; "
        "in transformers it lands in Ray's folder of the trial. A trial without hp_name is called run-{trial_id} in "
        "trackers and trainer_state.json too, and TensorBoard has its runs; transformers takes its writer out."
    ),
    "hyperparameter_search with Ray: trials that fail": (
        "They are left out when the best is chosen, though one may have reported the best objective before; "
        "transformers stops at the end of the search (raise_on_failed_trial=True does that here). What all trials "
        "would find wrong, such as an argument out of range, ends the search with its own error."
    ),
    "hyperparameter_search with Ray: schedulers without metric": (
        "They and search algorithms compare the objective, in the direction of the search; transformers leaves them "
        "to Ray, which then finds no metric. A scheduler with eval_strategy='no' is refused in both, ours names all "
        "kinds of them."
    ),
    "train(trial={...}) outside a search": (
        "The values are given to the arguments too; transformers gives them to model_init alone."
    ),
    "arguments changed after the Trainer was made": (
        "Each takes effect when it does in transformers; those that it reads once are ignored in both, and ours names "
        "them in a warning. lightning_config, deepspeed, another device, and the accumulation with deepspeed are "
        "refused. gradient_checkpointing and its kwargs, set by their names of v4 after the arguments were made, hold; "
        "transformers ignores them since v5.23."
    ),
    "max_grad_norm=None": (
        "Clips nothing, as in transformers until v4.57; since v5.0 it fails at the first step there."
    ),
    "to_dict() and to_json_string() of arguments that hold objects": (
        "to_dict() is that of transformers and leaves the arguments as they are, where transformers writes names of "
        "dtypes into nested dicts. to_json_string() writes what has no JSON form as text; transformers fails, and with "
        "it training with TensorBoard."
    ),
    "batch size by hand after a search": (
        "`args.per_device_train_batch_size`, set to the best, is what train() then uses; transformers stays with that "
        "of the last trial."
    ),
    "model card: what it says": (
        "The words are our own; it also has the numbers of samples, the picture of the curves, the versions of "
        "hftrainer and Lightning, and hyperparameters that transformers leaves out (weight decay, bf16, keywords of "
        "the schedule, the class of an optimizer that was given). The batch size is the one that "
        "`auto_find_batch_size` has found, totals count the processes that have data of their own, and 1.25e-05 is not "
        "shown as 0.0000."
    ),
    "model card: tags and origins": (
        "The model's tags and those of a README that is there are always kept; transformers keeps them when `tags` is "
        "given. What cannot be a repository is no `base_model`; transformers links to an empty name. Readers of files "
        "(`generator`, `imagefolder`) name no dataset. A dataset without configuration or split has none in the card; "
        "transformers writes null and 'None'. The licence is asked for once, for five seconds at most."
    ),
    "model card: results": (
        "Several sets are one row a step; a card during training has titled results too; with `load_best_model_at_end` "
        "the results are those of the best checkpoint. NaN and infinities are left out of the metadata, and times "
        "everywhere. Any task counts for the index, not only those that transformers' models are for."
    ),
    "model card: PEFT and plain modules": (
        "PEFT is recognized by the model, not by a README that is there, and the user's tags stay. Plain modules get a "
        "card without `library_name`; in transformers a model without `config` fails."
    ),
    "save_metrics: values that JSON does not have": (
        "Numbers and arrays of NumPy and torch are written; transformers fails and leaves a file that is cut off."
    ),
    "predict() outside training": (
        "It runs Lightning's prediction loop, whose callbacks see predict hooks; numbers and events are the same."
    ),
}

#: Every callback of `lightning.pytorch.callbacks` → what to know of it here; "" when there is nothing.
LIGHTNING_CALLBACKS = {
    "BackboneFinetuning": (
        "Freezes the model's `backbone` or `base_model`, before the optimizer is made; what it unfreezes has the rate "
        "that the callback sets, beside the schedule."
    ),
    "BaseFinetuning": "Freezes before the optimizer is made, so that what it unfreezes comes in as a group of its own.",
    "BasePredictionWriter": "Called by `predict()`; gets the logits, and the indices of the samples.",
    "BatchSizeFinder": (
        "Looks once, before a fresh run, for `per_device_train_batch_size`. Refused together with "
        "`auto_find_batch_size`, and when a subclass looks at other times."
    ),
    "Callback": "",
    "Checkpoint": "Its files are beside `checkpoint-xxx`, which `save_strategy` rules.",
    "DeviceStatsMonitor": "Writes to the loggers; without one, to the log lines.",
    "EarlyStopping": "Looks at each evaluation. Refused without any (`eval_strategy='no'`).",
    "EMAWeightAveraging": "The averaged weights are evaluated, saved in `checkpoint-xxx`, and left in the model.",
    "GradientAccumulationScheduler": (
        "The number of optimizer steps and the learning-rate schedule follow it. Refused together with "
        "`gradient_accumulation_steps`."
    ),
    "LambdaCallback": "",
    "LearningRateFinder": (
        "Looks once, before a fresh run; what it suggests takes the place of `learning_rate`, with the schedule of "
        "the arguments. Refused when a subclass looks at other times."
    ),
    "LearningRateMonitor": "Writes to the loggers; without one, to the log lines.",
    "ModelCheckpoint": "Its files are beside `checkpoint-xxx`, which `save_strategy` rules.",
    "ModelPruning": (
        "`checkpoint-xxx` holds the pruned weights; a resumed run goes on with the same masks. Refused with "
        "`make_pruning_permanent=False`, whose files `from_pretrained` cannot read."
    ),
    "ModelSummary": "",
    "OnExceptionCheckpoint": "",
    "ProgressBar": "Takes the place of the Trainer's own bar.",
    "RichModelSummary": "",
    "RichProgressBar": "Takes the place of the Trainer's own bar.",
    "SpikeDetection": "",
    "StochasticWeightAveraging": (
        "Its schedule takes over from `lr_scheduler_type`. Statistics of batch normalization are computed after "
        "training, in one more pass over the data."
    ),
    "ThroughputMonitor": "Writes to the loggers; without one, to the log lines.",
    "Timer": "",
    "TQDMProgressBar": "Takes the place of the Trainer's own bar.",
    "WeightAveraging": "The averaged weights are evaluated, saved in `checkpoint-xxx`, and left in the model.",
}

#: Methods that a run does not call as often as transformers 5.23 does → why.
NOT_CALLED_ALIKE = {
    "num_examples": "transformers asks it for lines of its log too; ours where the number counts.",
    "get_num_trainable_parameters": "Ours logs it when training begins; transformers counts by a function.",
    "create_optimizer_and_scheduler": (
        "An override is called, as in v4, though transformers 5.23 calls create_optimizer and create_scheduler alone."
    ),
    "unwrap_model": (
        "transformers asks it whether a model is wrapped before it wraps or saves one; ours when it needs the bare "
        "model."
    ),
}
