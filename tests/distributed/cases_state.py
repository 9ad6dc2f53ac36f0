"""What accelerate's global states say in ranks, and what its helpers do, with either library."""

import contextlib
import importlib
import io
import os

import torch
from accelerate.logging import get_logger
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import broadcast_object_list, gather, gather_object, pad_across_processes, reduce

from tests.support.small_models import make_plain, plain_data


def states_of_arguments(args, folder):
    """Before there is a Trainer: what scripts and libraries do with the states."""
    state = PartialState()
    yield "partial", {name: str(value) for name, value in state.__dict__.items()}
    yield "connected", torch.distributed.is_initialized()
    name = "first" if args.process_index == 0 else "second"
    with state.main_process_first(), state.local_main_process_first():
        (folder / name).touch()
        yield "in turn", (folder / "first").exists()
    yield "same", args.distributed_state.process_index == args.process_index == state.process_index
    yield "main", [state.is_main_process, state.is_local_main_process, state.is_last_process]


def states_of_trainer(trainer):
    state, own, rank = AcceleratorState(), trainer.accelerator, trainer.args.process_index
    names = ("device", "num_processes", "process_index", "distributed_type", "mixed_precision")
    yield "whole", {name: str(value) for name, value in state.__dict__.items()}
    yield "agree", all(getattr(state, name) == getattr(own.state, name) == getattr(own, name) for name in names)
    yield "gather", gather(torch.tensor([rank])).tolist()
    yield "reduce", reduce(torch.tensor([1.0 + rank]), "sum").tolist()
    yield "padded", tuple(pad_across_processes(torch.ones(2 + rank)).shape)
    yield "objects", gather_object([f"of {rank}"])
    yield "broadcast", broadcast_object_list([f"of {rank}"])
    trainer.args.distributed_state.wait_for_everyone()


def batches(trainer):
    """The batches of this process by what is set on the accelerator."""
    config = trainer.accelerator.dataloader_config
    for name in ("dispatch_batches", "split_batches"):
        setattr(config, name, True)
        yield name, [batch["x"].tolist() for batch in trainer.get_train_dataloader()]


def find_all(name, folder, **settings):
    torch.set_num_threads(3)
    library = importlib.import_module(name)
    before = dict(os.environ)
    quiet = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "save_strategy": "no"}
    args = library.TrainingArguments(str(folder / "out"), max_steps=2, **quiet, **settings)
    found = dict(states_of_arguments(args, folder))
    environment = {name: value for name, value in os.environ.items() if before.get(name) != value}
    trainer = library.Trainer(make_plain(), args, train_dataset=plain_data(8))
    found |= dict(states_of_trainer(trainer))
    trainer.train()
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        get_logger("a.script", log_level="WARNING").warning("said by the main process")
    return {**found, **dict(batches(trainer)), "said": printed.getvalue()}, environment, torch.get_num_threads()
