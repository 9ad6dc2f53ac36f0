"""`python -m hftrainer checkpoint FOLDER`: the step and size of a checkpoint, and which processes can resume it."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

from hftrainer.base.messages import RED, command_name, format_bytes, format_span, paint
from hftrainer.cli.parser import Parser

#: Entries that the table shows under other names.
_RENAMED = ("complete", "damage", "step", "max_steps", "epoch", "loss", "bytes")

_ADVICE = "To resume, resume_from_checkpoint=True takes the newest complete checkpoint of the run."


def add_subcommand(commands: Any) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "checkpoint",
        help="show a checkpoint's step, size and what can resume it, or accept one that was changed intentionally",
        epilog="example: %(prog)s out/checkpoint-500",
        description="Show the step, the position in the data, the sizes and whether the checkpoint is complete; exits "
        "with 1 if it is not, and with 2 if CHECKPOINT is not one. With --accept, read the files of a checkpoint "
        "that was changed after it was written (for example, its weights were converted), and write a new manifest, "
        "so that it counts as complete; if a file cannot be read, exit with 1 and change nothing.",
    )
    help_text = "a folder such as out/checkpoint-500; of a run's folder, the newest checkpoint is shown"
    parser.add_argument("folder", metavar="CHECKPOINT", help=help_text)
    parser.set_defaults(missing="pass a checkpoint folder")
    parser.add_argument("--accept", action="store_true", help="write a new manifest for files that were changed")


def execute(parser: Parser, options: argparse.Namespace) -> None:
    """Run the subcommand."""
    from hftrainer.arguments.storage_url import explain_unreadable_url
    from hftrainer.checkpointing.layout import checkpoints_newest_first, describe_nearest, not_a_checkpoint_reason
    from hftrainer.errors import CheckpointNotFound, DamagedCheckpoint, UnsafeCheckpoint

    folder = options.folder
    if (reason := explain_unreadable_url(folder)) is not None:
        parser.fail(f"{folder}: {reason}.")
    if (reason := not_a_checkpoint_reason(folder)) is not None:
        found = [*checkpoints_newest_first(folder)] if os.path.isdir(folder) else []
        if options.accept or not found:
            hint = f"the {nearest}" if (nearest := describe_nearest(folder)) else "pass a checkpoint-xxx folder"
            hint = f"the checkpoints in it, newest first: {', '.join(found)}" if found else hint
            problem = f"is not a checkpoint: {reason};" if os.path.exists(folder) else "does not exist:"
            parser.fail(f"{folder} {problem} {hint}.")
        folder = found[0]
    try:
        if options.accept:
            _accept(folder, as_json=options.json)
            return
        description = describe(folder)
    except (CheckpointNotFound, DamagedCheckpoint, UnsafeCheckpoint, OSError) as error:
        parser.fail(f"{error} {_ADVICE}", status=1)
    if options.json:
        print(json.dumps(description, indent=2))
    else:
        print(_table(description))
    parser.exit(0 if description["damage"] is None else 1)


def _table(description: dict[str, Any]) -> str:
    accept = f"{command_name()} checkpoint {shlex.quote(description['folder'])} --accept"
    rows = {
        "folder": description["folder"],
        "complete": "yes" if description["damage"] is None else paint(f"no: {description['damage']}", RED, sys.stdout),
        "what to do": description["damage"] and f"{_ADVICE} If you changed its files on purpose: {accept}.",
        "optimizer step": f"{description['step']:,} of {description['max_steps']:,}",
        "epoch": f"{description['epoch'] or 0:.4g}",
        "loss": description["loss"] and paint(description["loss"], RED, sys.stdout),
        "size": format_bytes(description["bytes"]),
        **{name.replace("_", " "): value for name, value in description.items() if name not in _RENAMED},
    }
    width = max(map(len, rows))
    texts = {name: f"{value:,}" if isinstance(value, int) else value for name, value in rows.items()}
    return "\n".join(f"{name:<{width}}  {value}" for name, value in texts.items() if value is not None)


def _accept(folder: str, *, as_json: bool) -> None:
    from hftrainer.checkpointing.inspection import accept_checkpoint

    changes = accept_checkpoint(folder).changes
    if as_json:
        print(json.dumps({"folder": folder, "changes": changes or None}, indent=2))
    else:
        print(f"{folder} is accepted" + (f" ({changes})." if changes else ": all its files can be read."))


def describe(folder: str) -> dict[str, Any]:
    """A description of a checkpoint and its run; None for values not recorded.

    Raises:
        DamagedCheckpoint: for a file that cannot be read.
    """
    from hftrainer.callbacks.state import TrainerState
    from hftrainer.checkpointing import layout
    from hftrainer.checkpointing.inspection import inspect_checkpoint
    from hftrainer.checkpointing.run_progress import load_progress
    from hftrainer.checkpointing.writing.files import list_files
    from hftrainer.errors import DamagedCheckpoint
    from hftrainer.reporting.summary import find_nan

    state_file = os.path.join(folder, layout.TRAINER_STATE_NAME)
    try:
        state = TrainerState.load_from_json(state_file)
    except ValueError as error:
        raise DamagedCheckpoint(f"{state_file} cannot be read ({error}).") from error
    damage = inspect_checkpoint(folder).skip_reason
    progress = load_progress(folder, 0, 1)
    settings = {} if progress is None else progress.settings
    size = sum((Path(folder) / name).stat().st_size for name in list_files(Path(folder)))
    kind, resumes_on = _strategy(folder)
    nan = find_nan(state)
    return {
        "folder": folder,
        "complete": damage is None,
        "damage": damage,
        "step": state.global_step,
        "max_steps": state.max_steps,
        "epoch": state.epoch,
        "loss": None if nan is None else f"NaN since step {format_span(nan.first, nan.last)}",
        "bytes": size,
        "samples_read_in_epoch": None if progress is None else progress.samples,
        "global_batch": None if progress is None else progress.global_batch_size,
        "processes": settings.get("world_size"),
        "per_device_train_batch_size": settings.get("per_device_train_batch_size"),
        "gradient_accumulation_steps": settings.get("gradient_accumulation_steps"),
        "transformers": release_that_saved(folder),
        "weights": kind,
        "resumes_on": resumes_on if damage is None else None,
        "lacks": _lacks(folder, progress is not None),
    }


def _lacks(folder: str, has_position: bool) -> str | None:
    """The state that a resumed run has to start without, if any."""
    from hftrainer.checkpointing import layout

    full_state = layout.FULL_STATE_FILES["optimizer"]
    optimizers = (layout.OPTIMIZER_NAME, layout.SHARD_FOLDERS["optimizer"], layout.DCP_FOLDER, full_state, "latest")
    lacks = [] if has_position else ["the position in the data"]
    if not any(os.path.exists(os.path.join(folder, name)) for name in optimizers):
        lacks.append("the optimizer's state (a checkpoint-xxx holds it, an output folder does not)")
    return " and ".join(lacks) or None


def _strategy(folder: str) -> tuple[str, str]:
    """How the weights are stored, and which processes can resume from them."""
    from hftrainer.checkpointing import layout
    from hftrainer.checkpointing.weights import has_weights, read_deepspeed_tag

    if os.path.isfile(os.path.join(folder, layout.DCP_FOLDER, layout.LIST_OF_SHARDS)):
        return "in torch's distributed format (dcp)", "any number of processes, with DDP, FSDP or neither"
    if layout.has_state_files(layout.SHARD_FOLDERS, "model", folder):
        return "a shard from each process, by FSDP", "any number of processes"
    if os.path.isfile(os.path.join(folder, "latest")):
        tag = read_deepspeed_tag(folder)
        convert = f"ds_to_universal --input_folder {folder}/{tag} --output_folder {folder}/universal"
        processes = f"as many processes, or after python -m deepspeed.checkpoint.{convert}"
        return "a shard from each process, by DeepSpeed", processes
    if not has_weights(folder):
        return "a shard from each process", "as many processes, with the same strategy"
    return "whole, in one file or several", "any number of processes, with DDP, FSDP or neither"


def release_that_saved(folder: str) -> str | None:
    """The release of transformers that wrote the model's configuration."""
    path = Path(folder) / "config.json"
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return config.get("transformers_version") if isinstance(config, dict) else None
