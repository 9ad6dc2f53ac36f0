"""Reads the values in the pickle `training_args.bin` without running code or creating objects."""

from __future__ import annotations

import io
import pickle
import re
import zipfile
from pathlib import Path
from typing import Any

from hftrainer.arguments.accelerator_config import CONSTRUCTION_KEY
from hftrainer.base.messages import format_number
from hftrainer.checkpointing import layout
from hftrainer.errors import DamagedCheckpoint

#: Attributes that are not arguments: objects of accelerate, a copy of DeepSpeed's configuration, and
#: `use_configured_state`, which only affects how arguments are created.
_OTHER_ATTRIBUTES = ("distributed_state", "deepspeed_plugin", "hf_deepspeed_config", CONSTRUCTION_KEY)
#: Arguments that may differ between equal runs: output paths, and the checkpoint from which a run resumes.
_PLACES = ("output_dir", "logging_dir", "run_name", "resume_from_checkpoint")
#: Arguments in which repetitions of a run differ.
SEEDS = ("seed", "data_seed")
#: Arguments without effect on what is learned: what a run evaluates, logs, saves, measures and uploads.
_WITHOUT_EFFECT = re.compile(
    "(do|eval|hub|include|load|log|logging|push|save|trackio)_.*|dataloader_(num|persistent|pin|prefetch).*"
    "|checkpoint_format|ddp_timeout|disable_tqdm|greater_is_better|keep_local|local_rank|metric_for_best_model"
    "|metrics_port|observe|per_device_eval_batch_size|project|report_to|skip_memory_metrics|storage_url"
)


class _Placeholder(dict[Any, Any]):
    """A placeholder for an object in the pickle. It keeps the object's arguments and state."""

    args: tuple[Any, ...] = ()
    state: Any = None
    # Objects may be keys of a dict.
    __hash__ = object.__hash__  # type: ignore[assignment]

    def __init__(self, *args: Any) -> None:
        super().__init__()
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    """An unpickler that imports nothing: each object becomes a `_Placeholder`."""

    def find_class(self, module: str, name: str) -> Any:
        return type(f"{module}.{name}", (_Placeholder,), {})

    def persistent_load(self, _: Any) -> Any:
        return _Placeholder()


def read_arguments(path: str | Path) -> dict[str, Any]:
    """The training arguments in a `torch.save` file, as plain values and without tokens and passwords of URLs.

    The file may be ours or that of transformers.

    Raises:
        DamagedCheckpoint: if the file cannot be read.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            pickle_name = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
            return _readable_fields(_Unpickler(io.BytesIO(archive.read(pickle_name))).load().state)
    # A damaged pickle may raise any exception.
    except Exception as error:
        raise DamagedCheckpoint(
            f"{path} cannot be read ({error!r}): save the arguments again with trainer.save_model()."
        ) from error


def read_arguments_of_run(folder: str, *, skip_unreadable: bool = False) -> dict[str, Any]:
    """The arguments in a run's folder, or else in its newest checkpoint, without paths; empty if none are saved.

    Args:
        folder: the run's `output_dir`, or a checkpoint.
        skip_unreadable: skip files that are not from `torch.save`, such as pointers of Git LFS.

    Raises:
        DamagedCheckpoint: if the file cannot be read.
    """
    paths = (Path(place) / layout.TRAINING_ARGS_NAME for place in (folder, *layout.checkpoints_newest_first(folder)))
    path = next(filter(zipfile.is_zipfile if skip_unreadable else Path.is_file, paths), None)
    return _without_places({} if path is None else read_arguments(path))


def plain_arguments(args: Any) -> dict[str, Any]:
    """The arguments of a live run as `read_arguments_of_run` returns them after a save, but for JSON's types."""
    # Only `vars` has those of ours that are not set, and only `to_dict` has plain values.
    return _without_places(_readable_fields(vars(args) | args.to_dict()))


def _without_places(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if name not in _PLACES}


def differing_arguments(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each run, its arguments with an effect that differ.

    Those with the most different values are first, and among equals the learning rate.
    """
    # Some runs may have no saved arguments.
    values = {name: value for run in runs for name, value in run.items()}
    # Only a journal knows the device of a run without `use_cpu`.
    devices = {"cpu" if run.get("use_cpu") else run.get("device") for run in runs if run}
    names = []
    for name, value in values.items():
        differs = any(run.get(name, value) != value for run in runs)
        is_same_device = name == "use_cpu" and len(devices) == 1
        if differs and not (is_same_device or _WITHOUT_EFFECT.fullmatch(name)):
            names.append(name)
    counts = {name: len({str(run.get(name)) for run in runs}) for name in names}
    names.sort(key=lambda name: (-counts[name], name != "learning_rate"))
    differing = [{name: run[name] for name in names if name in run} for run in runs]
    for settings, run in zip(differing, runs, strict=True):
        # Without max_steps, num_train_epochs sets the length.
        if settings.get("max_steps") == -1:
            settings["num_train_epochs"] = run.get("num_train_epochs")
            del settings["max_steps"]
        elif (run.get("max_steps") or -1) > 0:
            settings.pop("num_train_epochs", None)
    return differing


def is_shared(name: str, value: Any, runs: list[dict[str, Any]]) -> bool:
    """Whether most runs have this value of an argument."""
    return 2 * sum(name in run and run[name] == value for run in runs) > len(runs)


def round_argument(name: str, value: Any, runs: list[dict[str, Any]]) -> str:
    """A value of an argument; a number is rounded, unless that of another run would then read the same."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    rounded = format_number(value)
    others = (run[name] for run in runs if isinstance(run.get(name), (int, float)) and run[name] != value)
    return str(value) if rounded in map(format_number, others) else rounded


def describe(arguments: dict[str, Any], runs: list[dict[str, Any]]) -> str:
    """A short text of the arguments of one of some runs that most of these do not share.

    It has so many that it is no other run's text, unless that run has the same arguments.
    """
    parts, *others = (
        [
            f"{name} {round_argument(name, value, runs):.90}"
            for name, value in run.items()
            if not is_shared(name, value, runs)
        ]
        for run in (arguments, *runs)
    )
    # As many as fit, and as tell the run from others.
    counts = range(1, len(parts))
    fitting = [n for n in counts if len(", ".join(parts[: n + 1])) <= 100]
    alike = [n for n in counts if any(other[:n] == parts[:n] for other in others if other != parts)]
    count = max([0, *fitting, *alike]) + 1
    return ", ".join(parts[:count]) + ", …" * (count < len(parts))


def _readable_fields(state: dict[str, Any]) -> dict[str, Any]:
    return {
        name: _to_plain_value(value)
        for name, value in state.items()
        if not (name.startswith("_") or name.endswith("_token") or name in _OTHER_ATTRIBUTES)
    }


def _to_plain_value(value: Any) -> Any:
    # For instance torch.float32.
    if isinstance(value, type):
        return value.__name__
    if isinstance(value, _Placeholder):
        if value.state is not None:
            return _readable_fields(value.state) if isinstance(value.state, dict) else _to_plain_value(value.state)
        args = [_to_plain_value(item) for item in value.args]
        # An enum has one argument, its value.
        return args[0] if len(args) == 1 else f"{type(value).__name__}{tuple(args)}"
    if isinstance(value, dict):
        return {str(_to_plain_value(key)): _to_plain_value(item) for key, item in value.items()}
    if isinstance(value, str):
        return re.sub(r"(://[^\s/:@]*):[^\s/]*@", r"\1:***@", value)
    return [_to_plain_value(item) for item in value] if isinstance(value, (list, tuple)) else value
