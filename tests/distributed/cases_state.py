"""What accelerate's global states say in two processes, and what its helpers do: what was found, by library and rank.

python state_sets.py LIBRARY FOLDER [devices]
"""

import importlib
import os
import pickle
import sys
from pathlib import Path

import torch
from accelerate.logging import get_logger
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import broadcast_object_list, gather, gather_object, pad_across_processes, reduce

from tests.support.tiny import make_plain, plain_data


def of_arguments(args, folder):
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


def of_trainer(trainer, rank):
    state, own = AcceleratorState(), trainer.accelerator
    yield "whole", {name: str(value) for name, value in state.__dict__.items()}
    yield (
        "agree",
        [
            getattr(state, name) == getattr(own.state, name) == getattr(own, name)
            for name in ("device", "num_processes", "process_index", "distributed_type", "mixed_precision")
        ],
    )
    yield "gather", gather(torch.tensor([rank])).tolist()
    yield "reduce", reduce(torch.tensor([1.0 + rank]), "sum").tolist()
    yield "padded", tuple(pad_across_processes(torch.ones(2 + rank)).shape)
    yield "objects", gather_object([f"of {rank}"])
    yield "broadcast", broadcast_object_list([f"of {rank}"])
    trainer.args.distributed_state.wait_for_everyone()


def orders(trainer):
    """The batches of this process by what is set on the accelerator."""
    config = trainer.accelerator.dataloader_config
    for name in ("dispatch_batches", "split_batches"):
        setattr(config, name, True)
        yield name, [batch["x"].tolist() for batch in trainer.get_train_dataloader()]


def main(name, folder, *by_itself):
    torch.set_num_threads(3)
    library = importlib.import_module(name)
    before = dict(os.environ)
    launcher = {"lightning_config": {"devices": 2}} if by_itself else {}
    args = library.TrainingArguments(
        str(folder / "out"),
        use_cpu=True,
        report_to="none",
        max_steps=2,
        disable_tqdm=True,
        save_strategy="no",
        **launcher,
    )
    found = dict(of_arguments(args, folder))
    found["environment"] = {name: value for name, value in os.environ.items() if before.get(name) != value}
    trainer = library.Trainer(make_plain(), args, train_dataset=plain_data(8))
    found |= dict(of_trainer(trainer, args.process_index))
    trainer.train()
    found |= dict(orders(trainer))
    found["threads"] = torch.get_num_threads()
    get_logger("a.script", log_level="WARNING").warning("said by the main process")
    (folder / f"{name}-{args.process_index}.pkl").write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
