"""Finds a checkpoint or `.ckpt` file, and loads the state, optimizer and callbacks."""

from __future__ import annotations

import json
import logging
import os
import reprlib
import shlex
import warnings
from collections.abc import Callable
from typing import Any

import torch

from hftrainer.arguments.choices import as_text
from hftrainer.base.messages import command_name, log_once
from hftrainer.base.safe_loading import load_torch_file, name_file_in_errors, projectors
from hftrainer.callbacks.handler import CallbackHandler
from hftrainer.callbacks.state import TrainerControl, TrainerState, export_states, has_saved_state
from hftrainer.checkpointing import names, optimizer_groups
from hftrainer.checkpointing.file_checks import FRESH_OPTIMIZER, check_optimizer_state, check_value_types
from hftrainer.checkpointing.inspection import Inspection, inspect_checkpoint
from hftrainer.checkpointing.names import FULL_STATE_FILES, has_state_files
from hftrainer.checkpointing.run_checkpoints import (
    checkpoints_newest_first,
    find_intact,
    get_last_checkpoint,
    sort_checkpoints,
)
from hftrainer.checkpointing.saved_arguments import read_arguments
from hftrainer.data.randomness import numpy_state_types
from hftrainer.errors import CheckpointNotFound, InvalidArgument, InvalidSetup, UnsupportedArgument
from hftrainer.training_args import TrainingArguments

logger = logging.getLogger(__name__)


def resume_path_from_model_path(model_path: str | bool, resume_from_checkpoint: str | bool | None) -> str | bool | None:
    """The value of `resume_from_checkpoint` for `train(model_path=...)`, the name in v4.1.

    None if the folder has no state.

    Raises:
        InvalidArgument: if `resume_from_checkpoint` is passed too.
    """
    if resume_from_checkpoint is not None:
        raise InvalidArgument(
            f"train(model_path={model_path!r}, resume_from_checkpoint={resume_from_checkpoint!r}): the first is the "
            "old name of the second. Pass only one of them."
        )
    has_state = isinstance(model_path, bool) or os.path.isfile(os.path.join(model_path, names.TRAINER_STATE_NAME))
    note = "" if has_state else f"; {model_path!r} has no {names.TRAINER_STATE_NAME}, so nothing is resumed"
    warnings.warn(f"train(model_path=...) is now train(resume_from_checkpoint=...){note}.", FutureWarning, stacklevel=3)
    return model_path if has_state else None


def warn_about_unused_argument(argument: str | None, passed_value: str | bool | None) -> None:
    """Warn if `args.resume_from_checkpoint` was not passed to `train()`."""
    if argument and passed_value is None:
        log_once(
            logger,
            f"resume_from_checkpoint={argument!r} has no effect in TrainingArguments: train() starts from scratch. To "
            "resume, call train(resume_from_checkpoint=args.resume_from_checkpoint).",
        )


def find_folder(resume_from_checkpoint: str | bool | None, args: Any) -> str | None:
    """The checkpoint folder for `train(resume_from_checkpoint=...)`, or None to start from scratch.

    Raises:
        CheckpointNotFound: if the checkpoint does not exist, is damaged, or lacks the state or the weights.
    """
    output_dir = str(args.output_dir)
    if resume_from_checkpoint is None or resume_from_checkpoint is False:
        if as_text(args.save_strategy) != "no":
            _warn_about_earlier_run(output_dir)
        return None
    if resume_from_checkpoint is True or resume_from_checkpoint == "auto":
        newest, damages = find_intact(output_dir)
        if newest is None and resume_from_checkpoint is True:
            reasons = "".join(f"; {damage}" for damage in damages[:3] + ["..."] * (len(damages) > 3))
            raise CheckpointNotFound(
                f"resume_from_checkpoint=True: No valid checkpoint found in output directory ({output_dir}){reasons}. "
                "Train without this argument first, pass the path of a checkpoint, or pass 'auto' to start from "
                "scratch if no checkpoint exists."
            )
        if newest is None and damages:
            logger.warning("No checkpoint in %s can be used: training starts from scratch.", output_dir)
        return newest
    if not isinstance(resume_from_checkpoint, (str, os.PathLike)):
        raise CheckpointNotFound(
            f"resume_from_checkpoint={reprlib.repr(resume_from_checkpoint)}: pass a checkpoint-xxx folder, True for "
            "the newest one, or 'auto'. Data goes to Trainer(train_dataset=...)."
        )
    folder = os.fspath(resume_from_checkpoint)
    _check_given_folder(folder)
    return folder


def _check_given_folder(folder: str) -> None:
    """Raise CheckpointNotFound unless a run can resume from the folder that the script names."""
    if not os.path.isdir(folder):
        raise CheckpointNotFound(
            f"Can't find a valid checkpoint at {folder}: the folder does not exist (resume_from_checkpoint)."
            f"{_hint_for_missing(folder)}"
        )
    if not os.path.isfile(os.path.join(folder, names.TRAINER_STATE_NAME)):
        hint = f" Did you mean {inner_checkpoint!r}?" if (inner_checkpoint := get_last_checkpoint(folder)) else ""
        raise CheckpointNotFound(
            f"Can't find a valid checkpoint at {folder}, the value of resume_from_checkpoint: it lacks "
            f"{names.TRAINER_STATE_NAME}.{hint}"
        )
    inspection = inspect_checkpoint(folder)
    if (reason := inspection.unusable_reason) is not None:
        accept_hint = f"; or, if you changed the file yourself, run: {_accept_command(folder)}"
        raise CheckpointNotFound(
            f"resume_from_checkpoint={folder!r} is damaged: {reason}. Use another one (True selects the newest intact "
            f"one){accept_hint if inspection.can_be_accepted else '.'}"
        )
    _warn_about_changes(inspection)


def _hint_for_missing(path: str) -> str:
    """What to pass instead of a path that is not a folder."""
    if path.lower() in ("1", "last"):
        return " On a command line, true or auto means the newest checkpoint; in Python, True."
    parent = os.path.dirname(path)
    if os.path.isfile(os.path.join(parent, names.TRAINER_STATE_NAME)):
        return f" Did you mean {parent!r}?"
    checkpoints = [os.path.basename(each) for each in sort_checkpoints(parent)] if os.path.isdir(parent) else []
    return f" There are {', '.join(checkpoints)}." if checkpoints else ""


def _warn_about_earlier_run(output_dir: str) -> None:
    """Warn that a run which starts from scratch shares its folder with another run's checkpoints."""
    newest = next(checkpoints_newest_first(output_dir), None) if os.path.isdir(output_dir) else None
    if newest is not None:
        logger.warning(
            "%s already has checkpoints, up to %s, but this run starts from scratch: pass resume_from_checkpoint=True "
            "to continue the earlier run, or use another output_dir. Later, True takes the highest step of both runs.",
            output_dir,
            os.path.basename(newest),
        )


def _accept_command(folder: str) -> str:
    """The command that accepts a checkpoint in its current state."""
    return f"{command_name()} checkpoint --accept {shlex.quote(folder)}"


def _warn_about_changes(inspection: Inspection) -> None:
    if inspection.changes:
        logger.warning(
            "%s has changed since it was written (%s). It is used in its current state. To accept it permanently: %s",
            inspection.folder,
            inspection.changes,
            _accept_command(str(inspection.folder)),
        )


def unloadable_reason(best_folder: str) -> str | None:
    """Why the weights of the best checkpoint cannot be loaded; None if they can.

    A callback may have converted the weights after saving, so readable changes are accepted here too.
    """
    inspection = inspect_checkpoint(best_folder, only_weights=True)
    if inspection.unusable_reason is None:
        _warn_about_changes(inspection)
    return inspection.unusable_reason


def load_state(folder: str, args: TrainingArguments, max_steps: int) -> TrainerState:
    """Load the state of a checkpoint, and log a warning about changed arguments if steps are left."""
    state = TrainerState.load_from_json(os.path.join(folder, names.TRAINER_STATE_NAME))
    if (best_folder := state.best_model_checkpoint) is not None and not os.path.isdir(best_folder):
        sibling = os.path.join(os.path.dirname(os.path.abspath(folder)), os.path.basename(best_folder))
        state.best_model_checkpoint = sibling if os.path.isdir(sibling) else None
        effect = "it is ignored" if state.best_model_checkpoint is None else f"{sibling} is used instead"
        logger.warning("The best checkpoint, %s, is missing: %s.", best_folder, effect)
    if state.global_step < max_steps:
        warn_about_changed_arguments(args, state)
    return state


def warn_about_changed_arguments(args: TrainingArguments, state: TrainerState) -> None:
    """Log a warning about arguments that differ from those in the state of a checkpoint."""
    values = {name: getattr(args, name) for name in ("logging_steps", "eval_steps", "save_steps")}
    values["train_batch_size"] = args.per_device_train_batch_size
    if changes := [
        f"{name}={current!r}, was {saved!r}"
        for name, current in values.items()
        if current is not None and (saved := getattr(state, name)) is not None and current >= 1 and current != saved
    ]:
        logger.warning("Resuming with arguments that differ from the checkpoint's: %s.", "; ".join(changes))


def load_optimizer_and_scheduler(
    folder: str, model: torch.nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, *, is_sharded: bool = False
) -> None:
    """Load both states in place; log a warning if either is missing, as with `save_only_model`.

    Args:
        folder: the checkpoint.
        model: the model that the optimizer trains.
        optimizer: the optimizer.
        scheduler: its schedule.
        is_sharded: whether the model is sharded over processes; if so, all processes must call this function.
    """
    optimizer_file = os.path.join(folder, names.OPTIMIZER_NAME)
    scheduler_file = os.path.join(folder, names.SCHEDULER_NAME)
    shard_folder = _find_optimizer_shards(folder)
    has_full_state = has_state_files(FULL_STATE_FILES, "optimizer", folder)
    if not ((os.path.isfile(optimizer_file) or shard_folder or has_full_state) and os.path.isfile(scheduler_file)):
        logger.warning("%s lacks the optimizer or scheduler state: both start from scratch.", folder)
        return
    initial_groups = [dict(group) for group in optimizer.param_groups]
    is_by_name = is_sharded or has_full_state
    is_regrouped = _load_optimizer(folder, model, optimizer, sharded=is_by_name, shard_folder=shard_folder)
    if is_regrouped or optimizer_groups.has_named_groups(optimizer):
        has_changed = optimizer_groups.apply_settings(initial_groups, optimizer, is_regrouped=is_regrouped)
        load_scheduler_or_scaler(
            scheduler, folder, "scheduler", lambda state: optimizer_groups.adapt_schedule_state(state, scheduler)
        )
        optimizer_groups.follow_schedule(scheduler, optimizer, has_changed=has_changed)
    else:
        if is_by_name or shard_folder:
            _check_group_count(scheduler_file, len(initial_groups))
        load_scheduler_or_scaler(scheduler, folder, "scheduler")


def _load_optimizer(
    folder: str, model: torch.nn.Module, optimizer: torch.optim.Optimizer, *, sharded: bool, shard_folder: str | None
) -> bool:
    """Load the optimizer's state, and return whether its parameters were put into other groups.

    Args:
        folder: the checkpoint.
        model: the model that the optimizer trains.
        optimizer: the optimizer.
        sharded: whether the model is sharded, or the state is keyed by name.
        shard_folder: the folder of shards that holds the state, if any.
    """
    optimizer_file = os.path.join(folder, names.OPTIMIZER_NAME)
    if sharded or shard_folder:
        # Imported late, since the module imports torch's FSDP.
        from hftrainer.checkpointing import sharded as sharded_states

        if not sharded and shard_folder and os.path.basename(shard_folder) == names.DCP_FOLDER:
            state = sharded_states.read_dcp_optimizer(shard_folder, model, optimizer)
            _load_whole_optimizer(state, shard_folder, model, optimizer)
            return False

        def read() -> dict[str, Any]:
            saved_state = load_torch_file(optimizer_file, allowed=projectors())
            return optimizer_groups.match_by_name(saved_state, model, optimizer)

        sharded_states.load_optimizer(model, optimizer, folder, read)
        return False
    saved_state = load_torch_file(optimizer_file, allowed=projectors())
    with name_file_in_errors(optimizer_file):
        state = optimizer_groups.match_by_name(saved_state, model, optimizer)
    _load_whole_optimizer(state, optimizer_file, model, optimizer)
    return state is not saved_state


def _load_whole_optimizer(
    state: dict[str, Any], path: str, model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Check and load the state of all parameters, which was read from `path`."""
    with name_file_in_errors(path):
        check_optimizer_state(state, optimizer)
        if next(model.parameters()).device.type == "xla":
            # torch's fused optimizers do not run on XLA devices.
            for group in state["param_groups"]:
                if group.get("fused"):
                    group["fused"] = None
        optimizer.load_state_dict(state)


def explain_incompatible_state(folder: str, args: TrainingArguments, error: Exception) -> None:
    """Raise InvalidSetup if a state did not load since it was written with another `optim` or `lr_scheduler_type`."""
    path = os.path.join(folder, names.TRAINING_ARGS_NAME)
    name = "lr_scheduler_type" if names.SCHEDULER_NAME in str(error) else "optim"
    current, saved = as_text(getattr(args, name)), read_arguments(path).get(name) if os.path.isfile(path) else None
    if saved not in (None, current):
        problem = f"{folder} was written with {name}={saved!r}, whose state {name}={current!r} cannot use"
        raise InvalidSetup(f"{problem}: resume with {name}={saved!r}. {FRESH_OPTIMIZER}") from error


def _check_group_count(scheduler_file: str, count: int) -> None:
    """Refuse a schedule with more than `count` groups.

    A state by parameter name does not say which group each parameter was in.

    Raises:
        UnsupportedArgument: if the schedule has more groups.
    """
    with name_file_in_errors(scheduler_file):
        saved_count = len(load_torch_file(scheduler_file).get("_last_lr") or ())
    if saved_count > count:
        raise UnsupportedArgument(
            f"{os.path.dirname(scheduler_file)} was written with {saved_count} parameter groups, but the optimizer has "
            f"{count}. A checkpoint of FSDP or of checkpoint_format='dcp' that was written with param_groups needs "
            "param_groups to resume: pass the same, or [{'pattern': '*', 'lr_scale': 1.0}], which changes nothing."
        )


def _find_optimizer_shards(folder: str) -> str | None:
    """The folder of shards that holds the optimizer's state, if any. A DCP folder may lack it."""
    shard_folder = names.find_shard_folder("optimizer", folder)
    if shard_folder is None or os.path.basename(shard_folder) != names.DCP_FOLDER:
        return shard_folder
    # Imported late, since the module imports torch's FSDP.
    from hftrainer.checkpointing.sharded import holds_optimizer

    return shard_folder if holds_optimizer(shard_folder) else None


#: Keys of a parameter group that are not user settings, such as how a device computes the step.
_INTERNAL_KEYS = frozenset({"params", "lr", "fused", "foreach", "capturable", "differentiable"})


def warn_about_kept_settings(initial_groups: list[dict[str, Any]], optimizer: torch.optim.Optimizer) -> None:
    """Log a warning about the script's optimizer settings that the checkpoint overrides."""
    overrides: dict[str, str] = {}
    for initial, group in zip(initial_groups, optimizer.param_groups, strict=False):
        for key, value in initial.items():
            if key not in _INTERNAL_KEYS and isinstance(value, (int, float, str, tuple)) and group.get(key) != value:
                name = "learning_rate" if key == "initial_lr" else key
                overrides.setdefault(name, f"{name}={group.get(key)!r}, not {value!r}")
    if overrides:
        logger.warning(
            "The optimizer settings of the checkpoint stay in use: %s. To use yours, start without a checkpoint, or "
            "set them in optimizer.param_groups and the scheduler's base_lrs in a callback.",
            "; ".join(overrides.values()),
        )


def load_scheduler_or_scaler(target: Any, folder: str, name: str, convert: Callable[[Any], Any] | None = None) -> None:
    """Load and check the state of the "scheduler" or "scaler"; log a warning without one.

    Args:
        target: the scheduler or scaler.
        folder: the checkpoint.
        name: "scheduler" or "scaler".
        convert: converts the state before it is loaded.
    """
    path = os.path.join(folder, f"{name}.pt")
    if not os.path.isfile(path):
        logger.warning("%s lacks the %s state: the %s starts from scratch.", folder, name, name)
        return
    state = load_torch_file(path)
    with name_file_in_errors(path):
        state = state if convert is None else convert(state)
        expected = target.state_dict()
        # As in transformers, a schedule that follows a metric may continue any other.
        is_other = "factor" in expected and "lr_lambdas" in state
        check_value_types(state, {key: value for key, value in expected.items() if key in state or not is_other})
        target.load_state_dict(state)


def load_lightning_callbacks(folder: str | None) -> dict[str, Any] | None:
    """The states of Lightning's callbacks; empty in a checkpoint of transformers, None without a folder."""
    if folder is None:
        return None
    path = os.path.join(folder, names.LIGHTNING_CALLBACKS_NAME)
    states: dict[str, Any] = load_torch_file(path) if os.path.isfile(path) else {}
    with name_file_in_errors(path):
        check_value_types(states, {"callbacks": {}} if "callbacks" in states else {})
    return states


def restore_callbacks(handler: CallbackHandler, control: TrainerControl, states: dict[str, Any]) -> TrainerControl:
    """Restore the exported states of callbacks by class name. Returns the restored control."""
    remaining = {name: list(value) if isinstance(value, list) else [value] for name, value in states.items()}
    for target in [*handler.callbacks, control]:
        if saved := remaining.get(type(target).__name__):
            logger.info("Restoring the state of %s from the checkpoint.", type(target).__name__)
            state = saved.pop(0)
            for name, value in {**state.get("args", {}), **state.get("attributes", {})}.items():
                setattr(target, name, value)
    if missing_names := [name for name, saved in remaining.items() if saved]:
        logger.warning("The checkpoint has states of callbacks that this run lacks: %s.", ", ".join(missing_names))
    return control


def warn_about_unrestored_callbacks(callbacks: list[Any], states: dict[str, Any]) -> None:
    """Log a warning about callbacks whose saved state is not restored, such as early stopping."""
    for name, current_state in export_states([each for each in callbacks if has_saved_state(each)]).items():
        saved_state = states.get(name)
        if not (isinstance(current_state, dict) and isinstance(saved_state, dict)):
            continue
        saved_attributes = saved_state.get("attributes", {})
        differences = {
            key: value
            for key, value in current_state["attributes"].items()
            if key in saved_attributes and saved_attributes[key] != value
        }
        if differences:
            description = "; ".join(
                f"{key}={value!r}, {saved_attributes[key]!r} in the checkpoint" for key, value in differences.items()
            )
            advice = "set restore_callback_states_from_checkpoint=True to restore it"
            logger.warning("%s starts from scratch (%s): %s.", name, description, advice)


#: Key of the Trainer's entry in a Lightning checkpoint.
TRAINER_KEY = "hftrainer"
#: Keys that Lightning itself writes; all others come from callbacks.
_LIGHTNING_KEYS = {
    *("epoch", "global_step", "pytorch-lightning_version", "state_dict", "loops", "optimizer_states", "lr_schedulers"),
    *("hparams_name", "hyper_parameters", "hparams_type"),
}


def convert_ckpt(path: str, folder: str) -> str:
    """Convert a Lightning checkpoint to a Trainer checkpoint in `folder`, and return `folder`.

    Raises:
        CheckpointNotFound: if the file does not exist, or was not written by our LightningModule.
        UnsafeCheckpoint, DamagedCheckpoint: if the file cannot be read.
    """
    saved, trainer_entry = _read_ckpt(path)

    def write(name: str, value: Any) -> None:
        torch.save(value, os.path.join(folder, name))

    prefix = names.MODEL_PREFIX
    write(names.WEIGHTS_NAME, {name.removeprefix(prefix): tensor for name, tensor in saved["state_dict"].items()})
    optimizer = saved["optimizer_states"][0]
    # A sharded run keys the states by name.
    has_names = any(isinstance(key, str) for key in optimizer["state"])
    if has_names:
        optimizer["state"] = {name.removeprefix(prefix): state for name, state in optimizer["state"].items()}
        for group in optimizer["param_groups"]:
            group["params"] = [name.removeprefix(prefix) for name in group["params"]]
    write(FULL_STATE_FILES["optimizer"] if has_names else names.OPTIMIZER_NAME, optimizer)
    write(names.SCHEDULER_NAME, trainer_entry["scheduler"])
    write(names.rng_name(0, 1), trainer_entry["rng"])
    write(names.progress_name(0, 1), trainer_entry["progress"])
    if trainer_entry["scaler"] is not None:
        write(names.SCALER_NAME, trainer_entry["scaler"])
    if callback_states := {name: value for name, value in saved.items() if name not in _LIGHTNING_KEYS | {TRAINER_KEY}}:
        write(names.LIGHTNING_CALLBACKS_NAME, callback_states)
    with open(os.path.join(folder, names.TRAINER_STATE_NAME), "w", encoding="utf-8") as file:
        json.dump(trainer_entry["trainer_state"], file)
    return folder


def _read_ckpt(path: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A Lightning checkpoint, and the Trainer's entry in it."""
    if not os.path.isfile(path):
        raise CheckpointNotFound(f"resume_from_checkpoint={path!r}: the file does not exist.")
    saved = load_torch_file(path, allowed=numpy_state_types())
    if not isinstance(saved, dict) or TRAINER_KEY not in saved or "state_dict" not in saved:
        raise CheckpointNotFound(
            f"resume_from_checkpoint={path!r} is not a Lightning checkpoint of this Trainer. Load its weights into "
            "the model yourself, and train without resuming."
        )
    return saved, load_torch_file(path, allowed=numpy_state_types(), packed_value=saved[TRAINER_KEY])
