"""Arguments that all processes of a run must have in common."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import re
from typing import Any, Protocol

from hftrainer.errors import InvalidArgument
from hftrainer.training_args_seq2seq import Seq2SeqTrainingArguments

_PLACE = "nodes may keep their files elsewhere"
_SHOWN = "what a process shows and reports is its own affair"
_LOADING = "how a process loads its samples is its own affair, and nodes may differ"
_SCRIPT = "only the script reads it"
_MAIN = "only the main process reads it"
#: Argument → why processes may differ in it; in all others they must agree, or they would train different models.
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
    "local_rank": "it says which process this is",
}


class _Processes(Protocol):
    @property
    def several(self) -> bool: ...
    def gather_objects(self, items: Any) -> Any: ...


def check_consistency(args: Any, processes: _Processes) -> None:
    """Compare the arguments of all processes, which must all call this; fields of the user's own may differ.

    Raises:
        InvalidArgument: in every process, with each argument that differs and the ranks that have each value.
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
    raise InvalidArgument("\n".join(["The processes disagree on arguments; give all of them the same:", *found]))


def _comparable(args: Any) -> dict[str, str]:
    known = Seq2SeqTrainingArguments.__dataclass_fields__.keys() - OWN.keys()
    return {field.name: _shown(getattr(args, field.name)) for field in dataclasses.fields(args) if field.name in known}


def _shown(value: Any) -> str:
    """A value as text; objects, whose addresses differ, by what they are."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value.value if isinstance(value, enum.Enum) else value))
