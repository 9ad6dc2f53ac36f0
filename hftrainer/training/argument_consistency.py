"""Arguments that must be equal on all ranks."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import re
from typing import Any, Protocol

from hftrainer.errors import InvalidArgument
from hftrainer.training_args_seq2seq import Seq2SeqTrainingArguments

_PLACE = "nodes may use different folders"
_SHOWN = "logs and reports of a process do not affect training"
_LOADING = "how a process loads its samples does not affect training, and nodes may differ"
_SCRIPT = "only the script reads it"
_MAIN = "only the main process reads it"
#: Argument → why ranks may differ in it. All others must be equal, or ranks would train different models.
OWN = {
    **dict.fromkeys(("output_dir", "logging_dir", "eval_memmap_dir"), _PLACE),
    **dict.fromkeys(
        ("log_level", "log_level_replica", "log_on_each_node", "disable_tqdm", "skip_memory_metrics"), _SHOWN
    ),
    **dict.fromkeys(
        (
            "dataloader_num_workers",
            "dataloader_pin_memory",
            "dataloader_prefetch_factor",
            "dataloader_multiprocessing_context",
            "torch_empty_cache_steps",
        ),
        _LOADING,
    ),
    **dict.fromkeys(("do_train", "do_eval", "do_predict", "resume_from_checkpoint", "overwrite_output_dir"), _SCRIPT),
    **dict.fromkeys(
        (
            "report_to",
            "run_name",
            "project",
            "trackio_space_id",
            "trackio_bucket_id",
            "trackio_static_space_id",
            "save_on_each_node",
            "hub_token",
            "push_to_hub_token",
        ),
        _MAIN,
    ),
    "local_rank": "it identifies the process",
}


class _Processes(Protocol):
    @property
    def several(self) -> bool: ...
    def gather_objects(self, items: Any) -> Any: ...


def check_consistency(args: Any, processes: _Processes) -> None:
    """Compare the arguments of all ranks, which must all call this; a subclass's own fields may differ.

    Raises:
        InvalidArgument: on every rank, with each argument that differs and the ranks that have each value.
    """
    if not processes.several:
        return
    shown = _comparable(args)
    digest = hashlib.sha256(repr(shown).encode()).hexdigest()
    if len(set(processes.gather_objects([digest]))) == 1:
        return
    of_all: list[dict[str, str]] = processes.gather_objects([shown])
    found = []
    for name in shown:
        ranks: dict[str, list[str]] = {}
        for rank, values in enumerate(of_all):
            ranks.setdefault(values.get(name, "nothing"), []).append(str(rank))
        if len(ranks) > 1:
            said = "; ".join(f"{value} in rank {', '.join(having)}" for value, having in ranks.items())
            found.append(f"{name} is {said}.")
    raise InvalidArgument("\n".join(["The arguments differ between ranks; they must be the same on all:", *found]))


def _comparable(args: Any) -> dict[str, str]:
    known = Seq2SeqTrainingArguments.__dataclass_fields__.keys() - OWN.keys()
    return {field.name: _shown(getattr(args, field.name)) for field in dataclasses.fields(args) if field.name in known}


def _shown(value: Any) -> str:
    """A value as text; without the addresses of objects, which differ between processes."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value.value if isinstance(value, enum.Enum) else value))
