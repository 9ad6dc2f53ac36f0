"""The names of accelerate in ranks, and arguments on which they disagree."""

import contextlib
import io
from unittest import mock

import torch
from torch.nn.parallel import DistributedDataParallel

from hftrainer import Trainer, TrainingArguments
from tests.support.rank_messages import error_of
from tests.support.small_models import make_plain, plain_data, without_dropout


def make_trainer(folder, kind=Trainer, **settings):
    defaults = {"output_dir": str(folder / "out"), "use_cpu": True, "disable_tqdm": True, "report_to": "none"}
    args = TrainingArguments(**{**defaults, "max_steps": 1, "save_strategy": "no", **settings})
    return kind(without_dropout(make_plain)(), args, train_dataset=plain_data(10), eval_dataset=plain_data(5))


class Unsynced(Trainer):
    """Its gradients stay with each process in the first backward pass, and are exchanged in the second."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        weight = self.model.layers[0].weight
        with self.accelerator.no_sync(model):
            loss = self.compute_loss(model, inputs)
            self.accelerator.backward(loss)
        self.own = weight.grad.clone()
        loss = self.compute_loss(model, inputs)
        self.accelerator.backward(loss)
        self.exchanged = weight.grad.clone()
        return loss.detach()


def summed_count(trainer):
    """The sum of a count over both processes, and the collective operations that it takes."""
    names = ("all_gather", "all_reduce", "barrier")
    spies = {name: mock.Mock(wraps=getattr(torch.distributed, name)) for name in names}
    with mock.patch.multiple(torch.distributed, **spies):
        found = trainer._hftrainer.counters.sum_over_data(torch.tensor(3 + trainer.args.process_index)).item()
    return found, {name: spy.call_count for name, spy in spies.items()}


def collectives(trainer, folder):
    accelerator, rank = trainer.accelerator, trainer.args.process_index
    value, shorter = torch.tensor([1.0 + rank, 5.0 - rank]), torch.ones(2, 2 + rank)
    yield "reduce", {how: accelerator.reduce(value, how).tolist() for how in ("sum", "mean", "max", "none")}
    yield "scale", error_of(ValueError, accelerator.reduce, value, scale=2.0)
    yield "unknown", error_of(ValueError, accelerator.reduce, value, "min")
    yield "padded", accelerator.pad_across_processes(shorter, dim=-1, pad_index=7).tolist()
    yield "padded first", accelerator.pad_across_processes(shorter, dim=1, pad_first=True).tolist()
    yield "gather", accelerator.gather({"a": value})["a"].tolist()
    yield "count", summed_count(trainer)
    for name, items in (("list", list("abc")), ("tensor", torch.arange(3)), ("dict", {"x": [1, 2, 3]})):
        for padded in (False, True):
            with accelerator.split_between_processes(items, apply_padding=padded) as part:
                yield f"split {name} {padded}", part.tolist() if isinstance(part, torch.Tensor) else part


def processes(trainer, folder):
    accelerator = trainer.accelerator
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        accelerator.print("said")
    yield "printed", printed.getvalue()
    accelerator.save({"a": torch.ones(1)}, folder / "saved.pt")
    accelerator.save({"a": torch.ones(1)}, folder / "saved.safetensors", safe_serialization=True)
    accelerator.save_model(trainer.model, folder / "model")
    accelerator.wait_for_everyone()
    yield "files", sorted(path.name for path in [*folder.glob("saved.*"), *(folder / "model").glob("*")])
    yield "elsewhere", error_of(AttributeError, lambda: accelerator.save_state("x"))
    yield "decorator", error_of(AttributeError, lambda: accelerator.on_main_process(print))
    yield "unheard of", error_of(AttributeError, lambda: accelerator.make_coffee())


def models(trainer, folder):
    accelerator, own, other = trainer.accelerator, trainer.model, make_plain()
    yield "own", accelerator.prepare(own) is own
    prepared = accelerator.prepare(other)
    yield "wrapped", isinstance(prepared, DistributedDataParallel)
    yield "not trained", accelerator.prepare_model(make_plain(), evaluation_mode=True).__class__.__name__
    yield "unwrapped", accelerator.unwrap_model(prepared) is other
    compiled = torch.compile(prepared)
    yield "compiled", accelerator.unwrap_model(compiled, keep_torch_compile=False) is other
    kept = accelerator.unwrap_model(compiled)
    yield "kept", kept is compiled and kept._orig_mod is other


def loaders(trainer, folder):
    accelerator, state = trainer.accelerator, trainer.accelerator.gradient_state
    yield "outside", [state.in_dataloader, state.end_of_dataloader, state.remainder]
    loader = accelerator.prepare(torch.utils.data.DataLoader(plain_data(7), batch_size=2))
    yield "within", [(state.end_of_dataloader, state.remainder) for _ in loader]
    yield "after", state.in_dataloader


def synchronization(trainer, folder):
    unsynced = make_trainer(folder, Unsynced, ddp_find_unused_parameters=False)
    unsynced.train()
    yield "no_sync", {"own": unsynced.own, "exchanged": unsynced.exchanged}


def disagreements(trainer, folder):
    rank = trainer.args.process_index
    make_trainer(folder, output_dir=str(folder / f"out{rank}"), dataloader_num_workers=rank)
    differ = {"learning_rate": 1e-3 * (rank + 1), "seed": 7 + rank}
    yield "disagree", error_of(ValueError, make_trainer, folder, **differ)


def find_all(folder):
    trainer = make_trainer(folder)
    parts = (collectives, processes, models, loaders, synchronization, disagreements)
    return {name: value for part in parts for name, value in part(trainer, folder)}
