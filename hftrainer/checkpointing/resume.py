"""Finds the checkpoint that a run resumes from, and loads its state."""

from __future__ import annotations

import logging
import os
import reprlib
import shlex
import warnings
from typing import Any

from hftrainer.arguments.choices import as_text
from hftrainer.base.content_checks import name_file_in_errors
from hftrainer.base.messages import command_name, log_once
from hftrainer.base.safe_loading import load_torch_file
from hftrainer.callbacks.state import TrainerState
from hftrainer.checkpointing import layout
from hftrainer.checkpointing.file_checks import check_value_types
from hftrainer.checkpointing.inspection import Inspection, inspect_checkpoint
from hftrainer.checkpointing.run_checkpoints import find_intact, get_last_checkpoint
from hftrainer.errors import CheckpointNotFound, DamagedCheckpoint, InvalidArgument
from hftrainer.training_args import TrainingArguments

logger = logging.getLogger(__name__)


def resume_path_from_model_path(model_path: str | bool, resume_from_checkpoint: str | bool | None) -> str | bool | None:
    """The value of `resume_from_checkpoint` for `train(model_path=...)`, the name in v4.1.

    None if the folder has no state.

    Raises:
        InvalidArgument: if `resume_from_checkpoint` is passed too.
    """
    if resume_from_checkpoint is not None:
        given = f"train(model_path={model_path!r}, resume_from_checkpoint={resume_from_checkpoint!r})"
        raise InvalidArgument(f"{given}: the first is the old name of the second. Pass only one of them.")
    has_state = isinstance(model_path, bool) or os.path.isfile(os.path.join(model_path, layout.TRAINER_STATE_NAME))
    note = "" if has_state else f"; {model_path!r} has no {layout.TRAINER_STATE_NAME}, so nothing is resumed"
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


def find_checkpoint(resume_from_checkpoint: str | bool | None, args: TrainingArguments) -> str | None:
    """The checkpoint folder for `train(resume_from_checkpoint=...)`, or None to start from scratch.

    Raises:
        CheckpointNotFound: if the checkpoint does not exist, or lacks the state.
        DamagedCheckpoint: if the named checkpoint is damaged, or lacks the weights.
    """
    output_dir = str(args.output_dir)
    if resume_from_checkpoint is None or resume_from_checkpoint is False:
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
        is_step = isinstance(resume_from_checkpoint, int)
        data = " Data goes to Trainer(train_dataset=...)."
        hint = _hint_for_missing(str(resume_from_checkpoint), output_dir) if is_step else data
        value = reprlib.repr(resume_from_checkpoint)
        text = f"resume_from_checkpoint={value}: pass a checkpoint-xxx folder, True for the newest one, or 'auto'."
        raise CheckpointNotFound(text + hint)
    folder = os.fspath(resume_from_checkpoint)
    _check_given_folder(folder, output_dir)
    return folder


def _check_given_folder(folder: str, output_dir: str) -> None:
    """Raise CheckpointNotFound or DamagedCheckpoint unless a run can resume from the folder that the script names."""
    if not os.path.isdir(folder):
        problem = "it is not a folder" if os.path.exists(folder) else "the folder does not exist"
        text = f"Can't find a valid checkpoint at {folder}: {problem} (resume_from_checkpoint)."
        raise CheckpointNotFound(text + _hint_for_missing(folder, output_dir))
    if not os.path.isfile(os.path.join(folder, layout.TRAINER_STATE_NAME)):
        hint = f" Did you mean {inner_checkpoint!r}?" if (inner_checkpoint := get_last_checkpoint(folder)) else ""
        text = f"Can't find a valid checkpoint at {folder}, the value of resume_from_checkpoint"
        raise CheckpointNotFound(f"{text}: it lacks {layout.TRAINER_STATE_NAME}.{hint}")
    inspection = inspect_checkpoint(folder)
    if (reason := inspection.refusal_reason) is not None:
        reason = reason.replace(os.path.join(folder, ""), "")
        accept = f"; or, if you changed the file yourself, run: {_accept_command(folder)}"
        remedy = f"Use another one (True selects the newest intact one){accept if inspection.can_be_accepted else '.'}"
        raise DamagedCheckpoint(f"resume_from_checkpoint={folder!r} is damaged: {reason}. {remedy}")
    _warn_about_changes(inspection)


def _hint_for_missing(path: str, output_dir: str) -> str:
    """What to pass instead of a path that is not a folder, or of the number of a step."""
    if os.path.isdir(step_folder := os.path.join(output_dir, f"checkpoint-{path}")):
        return f" Did you mean {step_folder!r}?"
    if path.lower() in ("1", "last"):
        return " On a command line, true or auto means the newest checkpoint; in Python, True."
    parent = os.path.dirname(path)
    if os.path.isfile(os.path.join(parent, layout.TRAINER_STATE_NAME)):
        return f" Did you mean {parent!r}?"
    nearest = layout.describe_nearest(path, output_dir)
    return f" The {nearest}." if nearest else ""


def warn_about_earlier_run(args: TrainingArguments) -> None:
    """Warn, once, that a run which starts from scratch saves into a folder with another run's checkpoints."""
    folder = str(args.output_dir)
    saves = as_text(args.save_strategy) != "no"
    newest = next(layout.checkpoints_newest_first(folder), None) if saves and os.path.isdir(folder) else None
    if newest is not None:
        known = f"{folder} already has checkpoints, up to {os.path.basename(newest)}; this run starts from scratch"
        log_once(logger, f"{known}. Pass resume_from_checkpoint=True, or use another output_dir.")


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


def best_weights_damage(best_folder: str) -> str | None:
    """`Inspection.refusal_reason` of the best checkpoint's weights, with a warning if they have changed otherwise.

    A callback may have converted the weights after saving, so readable changes are accepted here too.
    """
    inspection = inspect_checkpoint(best_folder, only_weights=True)
    if inspection.refusal_reason is None:
        _warn_about_changes(inspection)
    return inspection.refusal_reason


def load_state(folder: str, args: TrainingArguments, max_steps: int) -> TrainerState:
    """Load the state of a checkpoint, and log a warning about changed arguments if steps are left."""
    state = TrainerState.load_from_json(os.path.join(folder, layout.TRAINER_STATE_NAME))
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


def load_lightning_callbacks(folder: str) -> dict[str, Any]:
    """The states of Lightning's callbacks; empty in a checkpoint of transformers."""
    path = os.path.join(folder, layout.LIGHTNING_CALLBACKS_NAME)
    states: dict[str, Any] = load_torch_file(path) if os.path.isfile(path) else {}
    with name_file_in_errors(path):
        check_value_types(states, {"callbacks": {}} if "callbacks" in states else {})
    return states
