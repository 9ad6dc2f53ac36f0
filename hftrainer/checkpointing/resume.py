"""Resumes from a checkpoint or a `.ckpt` file: finds it, and loads the state, the optimizer and the callbacks."""

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

from hftrainer.callbacks.handler import CallbackHandler
from hftrainer.callbacks.state import TrainerControl, TrainerState, export_states, is_exportable
from hftrainer.checkpointing import names, regrouping
from hftrainer.checkpointing.checks import check_optimizer_state, check_values
from hftrainer.checkpointing.folder import (
    CheckpointFolder,
    Inspection,
    checkpoints_newest_first,
    get_last_checkpoint,
    sort_checkpoints,
)
from hftrainer.checkpointing.names import WHOLES, holds
from hftrainer.compat.messages import log_once
from hftrainer.compat.reading import fitting, load_torch_file, projectors
from hftrainer.data.randomness import numpy_state_types
from hftrainer.errors import CheckpointNotFound, InvalidArgument, UnsupportedArgument
from hftrainer.training_args import TrainingArguments

logger = logging.getLogger(__name__)


def resume_path_from_model_path(model_path: str | bool, resume_from_checkpoint: str | bool | None) -> str | bool | None:
    """The value of `resume_from_checkpoint` for `train(model_path=...)`, the name in v4.1.

    None if the folder has no state.

    Raises:
        InvalidArgument: when `resume_from_checkpoint` is given too.
    """
    if resume_from_checkpoint is not None:
        raise InvalidArgument(
            f"train(model_path={model_path!r}, resume_from_checkpoint={resume_from_checkpoint!r}): the first is the "
            "old name of the second; give one of them."
        )
    resumes = isinstance(model_path, bool) or os.path.isfile(os.path.join(model_path, names.TRAINER_STATE_NAME))
    what = "" if resumes else f"; {model_path!r} has no {names.TRAINER_STATE_NAME}, so nothing is resumed"
    warnings.warn(f"train(model_path=...) is now train(resume_from_checkpoint=...){what}.", FutureWarning, stacklevel=3)
    return model_path if resumes else None


def warn_of_unused(argument: str | None, given: str | bool | None) -> None:
    """Warn that `args.resume_from_checkpoint`, which is for scripts to pass on, was not given to `train()`."""
    if argument and given is None:
        log_once(
            logger,
            f"resume_from_checkpoint={argument!r} is for the script, and train() starts from the beginning: to resume, "
            "call train(resume_from_checkpoint=args.resume_from_checkpoint).",
        )


def find_folder(resume_from_checkpoint: str | bool | None, output_dir: str) -> str | None:
    """The checkpoint folder for `train(resume_from_checkpoint=...)`, or None to start from scratch.

    Raises:
        CheckpointNotFound: if the checkpoint does not exist, is damaged, or lacks the state or the weights.
    """
    if resume_from_checkpoint is None or resume_from_checkpoint is False:
        _warn_of_earlier_run(output_dir)
        return None
    if resume_from_checkpoint is True or resume_from_checkpoint == "auto":
        folder = get_last_checkpoint(output_dir) if os.path.isdir(output_dir) else None
        if folder is None and resume_from_checkpoint is True:
            raise CheckpointNotFound(
                f"resume_from_checkpoint=True: No valid checkpoint found in output directory ({output_dir}), no whole "
                "checkpoint-xxx folder. Train without it first, pass the folder's path, or pass 'auto' to start from "
                "the beginning where there is none."
            )
        return folder
    if not isinstance(resume_from_checkpoint, (str, os.PathLike)):
        raise CheckpointNotFound(
            f"resume_from_checkpoint={reprlib.repr(resume_from_checkpoint)}: pass a checkpoint-xxx folder, True for "
            "the newest one, or 'auto'. Data goes to Trainer(train_dataset=...)."
        )
    folder = os.fspath(resume_from_checkpoint)
    if not os.path.isdir(folder):
        raise CheckpointNotFound(
            f"Can't find a valid checkpoint at {folder}: the folder does not exist (resume_from_checkpoint)."
            f"{_hint_for_missing(folder)}"
        )
    if not os.path.isfile(os.path.join(folder, names.TRAINER_STATE_NAME)):
        inside = get_last_checkpoint(folder)
        hint = f" Did you mean {inside!r}?" if inside else ""
        raise CheckpointNotFound(
            f"Can't find a valid checkpoint at {folder}, the value of resume_from_checkpoint: it lacks "
            f"{names.TRAINER_STATE_NAME}.{hint}"
        )
    found = CheckpointFolder(folder).inspect()
    if (reason := found.unusable_reason) is not None:
        accepting = f"; or, if you changed the file yourself, run: {_accept_command(folder)}"
        raise CheckpointNotFound(
            f"resume_from_checkpoint={folder!r} is damaged: {reason}. Use another one (True takes the newest whole "
            f"one){accepting if found.can_be_accepted else '.'}"
        )
    _warn_of_changes(found)
    return folder


def _hint_for_missing(path: str) -> str:
    """What to pass instead of a path that is not a folder."""
    if path.lower() in ("true", "1"):
        return " On a command line write auto for the newest one."
    beside = os.path.dirname(path)
    if os.path.isfile(os.path.join(beside, names.TRAINER_STATE_NAME)):
        return f" Did you mean {beside!r}?"
    found = [os.path.basename(each) for each in sort_checkpoints(beside)] if os.path.isdir(beside) else []
    return f" There are {', '.join(found)}." if found else ""


def _warn_of_earlier_run(output_dir: str) -> None:
    """Warn that a run which starts from scratch shares its folder with another run's checkpoints."""
    newest = next(checkpoints_newest_first(output_dir), None) if os.path.isdir(output_dir) else None
    if newest is not None:
        logger.warning(
            "%s already has checkpoints, up to %s, and this run starts from scratch: it replaces those of the same "
            "steps, and a later resume_from_checkpoint=True takes the highest step of either run. To go on with "
            "the earlier run, pass resume_from_checkpoint=True; otherwise use another output_dir.",
            output_dir,
            os.path.basename(newest),
        )


def _accept_command(folder: str) -> str:
    """The command that accepts a checkpoint in its current state."""
    return f"python -m hftrainer checkpoint --accept {shlex.quote(folder)}"


def _warn_of_changes(found: Inspection) -> None:
    if found.changes:
        logger.warning(
            "%s was changed since it was written (%s). It is used in its current state. To accept it permanently: %s",
            found.folder,
            found.changes,
            _accept_command(str(found.folder)),
        )


def unloadable_reason(best: str) -> str | None:
    """Why the weights of the best checkpoint cannot be loaded; None when they can.

    A callback may have converted them after saving, so readable changes are accepted here too.
    """
    found = CheckpointFolder(best).inspect(only_weights=True)
    if found.unusable_reason is None:
        _warn_of_changes(found)
    return found.unusable_reason


def load_state(folder: str, args: TrainingArguments) -> TrainerState:
    """The state in a checkpoint; logs a warning about arguments that have changed since."""
    state = TrainerState.load_from_json(os.path.join(folder, names.TRAINER_STATE_NAME))
    if (best := state.best_model_checkpoint) is not None and not os.path.isdir(best):
        beside = os.path.join(os.path.dirname(os.path.abspath(folder)), os.path.basename(best))
        state.best_model_checkpoint = beside if os.path.isdir(beside) else None
        became = "it is ignored" if state.best_model_checkpoint is None else f"{beside} is used instead"
        logger.warning("The best checkpoint, %s, is missing: %s.", best, became)
    warn_about_changed_arguments(args, state)
    return state


def warn_about_changed_arguments(args: TrainingArguments, state: TrainerState) -> None:
    """Log a warning about arguments that differ from those in the state of a checkpoint."""
    compared = {name: getattr(args, name) for name in ("logging_steps", "eval_steps", "save_steps")}
    compared["train_batch_size"] = args.per_device_train_batch_size
    if changed := [
        f"{name}={now!r}, was {before!r}"
        for name, now in compared.items()
        if now is not None and (before := getattr(state, name)) is not None and now >= 1 and now != before
    ]:
        logger.warning("Resuming with arguments that differ from the checkpoint's: %s.", "; ".join(changed))


def _read_optimizer(path: str) -> dict[str, Any]:
    """The state of an optimizer, with parameters numbered as by torch."""
    with torch.serialization.safe_globals(projectors()):
        state: dict[str, Any] = load_torch_file(path)
    return state


def load_optimizer_and_scheduler(
    folder: str, model: torch.nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, *, sharded: bool = False
) -> None:
    """Load both states, in place; logs a warning if either is missing, as with `save_only_model`.

    Args:
        folder: the checkpoint.
        model: the model that the optimizer trains.
        optimizer: the optimizer.
        scheduler: its schedule.
        sharded: whether the model is sharded over processes; if so, all must call this.
    """
    optimizer_file = os.path.join(folder, names.OPTIMIZER_NAME)
    scheduler_file = os.path.join(folder, names.SCHEDULER_NAME)
    has_parts, has_whole = _holds_parts_of_optimizer(folder), holds(WHOLES, "optimizer", folder)
    if not ((os.path.isfile(optimizer_file) or has_parts or has_whole) and os.path.isfile(scheduler_file)):
        logger.warning("%s lacks the optimizer or scheduler state: both start from scratch.", folder)
        return
    before = [dict(group) for group in optimizer.param_groups]
    regrouped = False
    parts = names.folder_of_parts("optimizer", folder) if has_parts else None
    has_dcp = parts is not None and os.path.basename(parts) == names.DCP
    if sharded or has_whole or (has_parts and not has_dcp):
        from hftrainer.checkpointing.sharded import load_optimizer  # imports torch's FSDP

        def read() -> dict[str, Any]:
            return regrouping.by_name(_read_optimizer(optimizer_file), model, optimizer)

        load_optimizer(model, optimizer, folder, read)
    else:
        if has_dcp:
            from hftrainer.checkpointing.sharded import read_dcp_optimizer

            optimizer_file = str(parts)
            state = read_dcp_optimizer(optimizer_file, model, optimizer)
        else:
            stored = _read_optimizer(optimizer_file)
            with fitting(optimizer_file):
                state = regrouping.by_name(stored, model, optimizer)
            regrouped = state is not stored
        with fitting(optimizer_file):
            check_optimizer_state(state, optimizer)
            if next(model.parameters()).device.type == "xla":
                # torch's fused optimizers do not run on XLA devices.
                for group in state["param_groups"]:
                    if group.get("fused"):
                        group["fused"] = None
            optimizer.load_state_dict(state)
    if regrouped or regrouping.has_named_groups(optimizer):
        changed = regrouping.take_settings(before, optimizer, regrouped=regrouped)
        load_scheduler_or_scaler(
            scheduler, folder, "scheduler", lambda state: regrouping.fit_schedule(state, scheduler)
        )
        regrouping.follow_schedule(scheduler, optimizer, changed=changed)
    else:
        if sharded or has_whole or has_parts:
            _check_group_count(scheduler_file, len(before))
        load_scheduler_or_scaler(scheduler, folder, "scheduler")
    _warn_of_kept_settings(before, optimizer)


def _check_group_count(scheduler_file: str, count: int) -> None:
    """Refuse a schedule of more groups: a state by the names of parameters does not say which group each was in.

    Raises:
        UnsupportedArgument: if there were more than `count`.
    """
    with fitting(scheduler_file):
        then = len(load_torch_file(scheduler_file).get("_last_lr") or ())
    if then > count:
        raise UnsupportedArgument(
            f"{os.path.dirname(scheduler_file)} was written with {then} groups of parameters, and the optimizer has "
            f"{count}. A checkpoint of FSDP or of checkpoint_format='dcp' that was written with param_groups needs "
            "some to resume: pass those of then, or [{'pattern': '*', 'lr_scale': 1.0}], which changes nothing."
        )


def _holds_parts_of_optimizer(folder: str) -> bool:
    """Whether a checkpoint holds the optimizer's state in a folder of parts; one for both states may lack it."""
    parts = names.folder_of_parts("optimizer", folder)
    if parts is None or os.path.basename(parts) != names.DCP:
        return parts is not None
    from hftrainer.checkpointing.sharded import holds_optimizer  # imports torch's FSDP

    return holds_optimizer(parts)


#: Keys of a parameter group that are not user settings: the current rate, and how a device computes the step.
_NO_SETTINGS = frozenset({"params", "lr", "fused", "foreach", "capturable", "differentiable"})


def _warn_of_kept_settings(before: list[dict[str, Any]], optimizer: torch.optim.Optimizer) -> None:
    """Log a warning about the script's optimizer settings that the checkpoint overrides."""
    kept: dict[str, str] = {}
    for given, group in zip(before, optimizer.param_groups, strict=False):
        for key, value in given.items():
            if key not in _NO_SETTINGS and isinstance(value, (int, float, str, tuple)) and group.get(key) != value:
                name = "learning_rate" if key == "initial_lr" else key
                kept.setdefault(name, f"{name}={group.get(key)!r}, not {value!r}")
    if kept:
        logger.warning(
            "The checkpoint's settings of the optimizer stay in use: %s. To begin with others, pass no checkpoint, or "
            "set them in optimizer.param_groups and the scheduler's base_lrs in a callback.",
            "; ".join(kept.values()),
        )


def load_scheduler_or_scaler(target: Any, folder: str, name: str, convert: Callable[[Any], Any] | None = None) -> None:
    """Load the state of the "scheduler" or "scaler", and check its types; log a warning if it is missing.

    Args:
        target: what gets the state.
        folder: the checkpoint.
        name: "scheduler" or "scaler".
        convert: changes the state first.
    """
    path = os.path.join(folder, f"{name}.pt")
    if not os.path.isfile(path):
        logger.warning("%s lacks the %s state: the %s starts from scratch.", folder, name, name)
        return
    state = load_torch_file(path)
    with fitting(path):
        state = state if convert is None else convert(state)
        check_values(state, target.state_dict())
        target.load_state_dict(state)


def load_lightning_callbacks(folder: str | None) -> dict[str, Any] | None:
    """The states of Lightning's callbacks; empty in a checkpoint of transformers, None without a folder."""
    if folder is None:
        return None
    path = os.path.join(folder, names.LIGHTNING_CALLBACKS_NAME)
    states: dict[str, Any] = load_torch_file(path) if os.path.isfile(path) else {}
    with fitting(path):
        check_values(states, {"callbacks": {}} if "callbacks" in states else {})
    return states


def restore_callbacks(handler: CallbackHandler, control: TrainerControl, states: dict[str, Any]) -> TrainerControl:
    """Restore callbacks that export a state, by class name; returns the restored control."""
    remaining = {name: list(value) if isinstance(value, list) else [value] for name, value in states.items()}
    for restored in [*handler.callbacks, control]:
        if saved := remaining.get(type(restored).__name__):
            logger.info("Restoring the state of %s from the checkpoint.", type(restored).__name__)
            state = saved.pop(0)
            for name, value in {**state.get("args", {}), **state.get("attributes", {})}.items():
                setattr(restored, name, value)
    if forgotten := [name for name, saved in remaining.items() if saved]:
        logger.warning("The checkpoint has states of callbacks that this run lacks: %s.", ", ".join(forgotten))
    return control


def warn_of_unrestored_callbacks(callbacks: list[Any], states: dict[str, Any]) -> None:
    """Log a warning about callbacks whose saved state is not restored, such as the counter of early stopping."""
    for name, now in export_states([each for each in callbacks if is_exportable(each)]).items():
        before = states.get(name)
        if not (isinstance(now, dict) and isinstance(before, dict)):
            continue
        known = before.get("attributes", {})
        differing = {key: value for key, value in now["attributes"].items() if key in known and known[key] != value}
        if differing:
            changed = "; ".join(
                f"{key}={value!r}, {known[key]!r} in the checkpoint" for key, value in differing.items()
            )
            advice = "set restore_callback_states_from_checkpoint=True to restore it"
            logger.warning("%s starts from scratch (%s): %s.", name, changed, advice)


#: Key of the Trainer's entry in a Lightning checkpoint.
OWN_PART = "hftrainer"
#: Keys that Lightning itself writes; all others come from callbacks.
_LIGHTNING_KEYS = {
    *("epoch", "global_step", "pytorch-lightning_version", "state_dict", "loops", "optimizer_states", "lr_schedulers"),
    *("hparams_name", "hyper_parameters", "hparams_type"),
}


def unpack(path: str, folder: str) -> str:
    """Convert a Lightning checkpoint to a checkpoint of the Trainer in `folder`; returns `folder`.

    Raises:
        CheckpointNotFound: when the file does not exist, or was not written by our LightningModule.
        UnsafeCheckpoint, DamagedCheckpoint: when it cannot be read.
    """
    if not os.path.isfile(path):
        raise CheckpointNotFound(f"resume_from_checkpoint={path!r}: the file does not exist.")
    with torch.serialization.safe_globals(numpy_state_types()):
        saved = load_torch_file(path)
    if not isinstance(saved, dict) or OWN_PART not in saved or "state_dict" not in saved:
        raise CheckpointNotFound(
            f"resume_from_checkpoint={path!r} is not a Lightning checkpoint of this Trainer. Load its weights into "
            "the model yourself, and train without resuming."
        )
    own = saved[OWN_PART]
    if isinstance(own, torch.Tensor):  # files of earlier releases hold it unpacked
        with torch.serialization.safe_globals(numpy_state_types()):
            own = load_torch_file(path, packed=own)

    def write(name: str, value: Any) -> None:
        torch.save(value, os.path.join(folder, name))

    prefix = names.MODEL_PREFIX
    write(names.WEIGHTS_NAME, {name.removeprefix(prefix): tensor for name, tensor in saved["state_dict"].items()})
    optimizer = saved["optimizer_states"][0]
    named = any(isinstance(key, str) for key in optimizer["state"])  # written by a sharded run
    if named:
        optimizer["state"] = {name.removeprefix(prefix): state for name, state in optimizer["state"].items()}
        for group in optimizer["param_groups"]:
            group["params"] = [name.removeprefix(prefix) for name in group["params"]]
    write(WHOLES["optimizer"] if named else names.OPTIMIZER_NAME, optimizer)
    write(names.SCHEDULER_NAME, own["scheduler"])
    write(names.rng_name(0, 1), own["rng"])
    write(names.progress_name(0, 1), own["progress"])
    if own["scaler"] is not None:
        write(names.SCALER_NAME, own["scaler"])
    if kept := {name: value for name, value in saved.items() if name not in _LIGHTNING_KEYS | {OWN_PART}}:
        write(names.LIGHTNING_CALLBACKS_NAME, kept)
    with open(os.path.join(folder, names.TRAINER_STATE_NAME), "w", encoding="utf-8") as file:
        json.dump(own["trainer_state"], file)
    return folder
