"""Trains on data that reaches two processes in every way, with one library, and writes what came of it.

python data_sets.py LIBRARY FOLDER
"""

import importlib
import os
import pickle
import sys
from pathlib import Path

import datasets
import torch
from torch.utils.data import Dataset, IterableDataset

from hftrainer.errors import InvalidArgument, UnsupportedArgument
from tests.support.parity import build, record
from tests.support.tiny import language_data, plain_data


class Noisy(Dataset):
    """Draws from torch's own generator for each sample."""

    def __init__(self, count=38):
        self.samples = plain_data(count)

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return {**self.samples[index], "x": self.samples[index]["x"] + 0.01 * torch.randn(8)}


class Stream(IterableDataset):
    """Gives samples in their order; those of each epoch differ."""

    def __init__(self, count=38, noisy=False):
        self.count, self.noisy, self.epoch = count, noisy, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        for sample in plain_data(self.count):
            noise = 0.01 * torch.randn(8) if self.noisy else 0
            yield {**sample, "x": sample["x"] + self.epoch + noise}


class Sized(Stream):
    def __len__(self):
        return self.count


class Shuffled(IterableDataset):
    """Draws its order from a generator of its own."""

    def __init__(self):
        self.generator = torch.Generator().manual_seed(3)

    def __iter__(self):
        samples = plain_data(38)
        for index in torch.randperm(38, generator=self.generator).tolist():
            yield samples[index]


class Counting(IterableDataset):
    """Can be brought back to where it was."""

    def __init__(self, count=40):
        self.samples, self.at = plain_data(count), 0

    def __iter__(self):
        while self.at < len(self.samples):
            self.at += 1
            yield self.samples[self.at - 1]
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def hub(count, shards):
    """A stream of the datasets library."""

    def rows(parts):
        for part in parts:
            for sample in plain_data(count)[part::shards]:
                yield {"x": sample["x"].tolist(), "labels": int(sample["labels"])}

    return datasets.IterableDataset.from_generator(rows, gen_kwargs={"parts": list(range(shards))})


def varied():
    samples = language_data()
    for index, sample in enumerate(samples):
        for name in sample:
            sample[name] = sample[name][: 12 - index % 7]
    return samples


def padded(samples):
    pad = torch.nn.utils.rnn.pad_sequence
    values = {"input_ids": 0, "attention_mask": 0, "labels": -100}
    return {name: pad([s[name] for s in samples], batch_first=True, padding_value=v) for name, v in values.items()}


SHARED = {"logging_steps": 1}
STREAM = {**SHARED, "max_steps": 8}
SPLIT, ALONE = {"split_batches": True}, {"dispatch_batches": False}
MAIN = {"dispatch_batches": True}
#: Name → accelerator_config, data, further settings. Batches of 4 for two processes, of 38 samples unless it is said.
CASES = {
    "split": (SPLIT, Noisy, SHARED),
    "split, uneven": ({**SPLIT, "even_batches": False}, lambda: Noisy(39), SHARED),
    "split, accumulation": (SPLIT, Noisy, {**SHARED, "gradient_accumulation_steps": 3}),
    "uneven": ({"even_batches": False}, Noisy, SHARED),
    "main": (MAIN, Noisy, SHARED),
    "main, split": ({**MAIN, **SPLIT}, lambda: Noisy(37), SHARED),
    "main, ragged": (MAIN, lambda: Noisy(41), SHARED),
    "torch's order": ({"use_seedable_sampler": False}, Noisy, SHARED),
    "torch's order, main": ({"use_seedable_sampler": False, **MAIN}, Noisy, SHARED),
    "each batch": (
        {"gradient_accumulation_kwargs": {"num_steps": 3, "sync_each_batch": True, "adjust_scheduler": False}},
        Noisy,
        SHARED,
    ),
    "sequential": (None, Noisy, {**SHARED, "train_sampling_strategy": "sequential"}),
    "by length": (None, varied, {**SHARED, "train_sampling_strategy": "group_by_length"}),
    "stream": (None, Stream, STREAM),
    "stream, noisy": (None, lambda: Stream(noisy=True), STREAM),
    "stream, drop last": (None, Stream, {**STREAM, "dataloader_drop_last": True}),
    "stream, worker": (None, lambda: Stream(noisy=True), {**STREAM, "dataloader_num_workers": 1}),
    "stream, split": (SPLIT, lambda: Stream(37), STREAM),
    "stream, sized": (None, Sized, SHARED),
    "stream, alone": (ALONE, lambda: Stream(noisy=True), STREAM),
    "stream, alone, tiny": (ALONE, lambda: Stream(3), {**STREAM, "max_steps": 3}),
    "stream, alone, split": ({**ALONE, **SPLIT}, lambda: Sized(37), SHARED),
    "stream, alone, worker": (ALONE, Stream, {**STREAM, "dataloader_num_workers": 1}),
    "stream, alone, shuffled": (ALONE, Shuffled, STREAM),
    "stream with a state": (None, Counting, STREAM),
    "stream with a state, alone": (ALONE, Counting, STREAM),
    "stream with a state, alone, ragged": (ALONE, lambda: Counting(38), STREAM),
    "main, kept workers": (MAIN, Noisy, {**SHARED, "dataloader_num_workers": 2, "dataloader_persistent_workers": True}),
    "hub, alone": (ALONE, lambda: hub(38, 2).shuffle(seed=1, buffer_size=5), STREAM),
    "hub, alone, few shards": (ALONE, lambda: hub(38, 1), STREAM),
}
#: Runs that go on from a step in the middle of an epoch.
RESUMED = (
    "stream with a state",
    "stream with a state, alone",
    "split",
    "main",
    "main, kept workers",
    "torch's order",
    "stream, noisy",
    "stream, worker",
    "stream, alone",
    "stream, alone, worker",
    "stream, alone, shuffled",
    "hub, alone",
)


#: Cases in which processes have batches of different sizes, which no library can gather.
UNGATHERED = ("split, uneven", "uneven")


def seeing(library):
    """A Trainer that keeps the batches it is given, and what is gathered of them for a metric."""

    class Seeing(library.Trainer):
        seen = gathered = ()

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            first = next(iter(inputs.values()))
            self.seen = (*self.seen, first.clone())
            if self.gathers:  # rows of one length; processes with batches of other sizes cannot gather
                self.gathered = (*self.gathered, self.accelerator.gather_for_metrics(first.float().sum(-1)))
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    return Seeing


def run(library, name, folder, resume=None):
    config, data, settings = CASES[name]
    model = "llama" if data is varied else "plain"
    given = {"train_dataset": data()} | ({"data_collator": padded} if data is varied else {})
    config = None if config is None else {key: dict(v) if isinstance(v, dict) else v for key, v in config.items()}
    saves = {"save_strategy": "steps", "save_steps": 3} if name in RESUMED else {}
    options = {**settings, **saves, "trainer": given, "trainer_class": seeing, "accelerator_config": config}
    trainer, recorder = build(library, model, folder, **options)
    trainer.gathers = name not in UNGATHERED
    output = trainer.train(resume_from_checkpoint=resume)
    found = record(trainer, recorder, folder, global_step=output.global_step, training_loss=output.training_loss)
    return {**vars(found), "random": torch.get_rng_state(), "seen": trainer.seen, "gathered": trainer.gathered}


def place(folder, library, name):
    return folder / library / name.replace(", ", "-")


def main(library, folder, cases):
    torch.set_num_threads(1)
    found = {}
    for name in cases:
        found[name] = run(library, name, place(folder, library, name))
    if library == "hftrainer":
        for name in RESUMED:
            if name in cases:
                checkpoint = str(place(folder, library, name) / "checkpoint-3")
                found[f"{name}, resumed"] = run(library, name, folder / "resumed" / name, checkpoint)
        DIFFERENT["trainer"] = {"train_dataset": hub(37, 3)}
        trainer, recorder = build("hftrainer", "plain", folder / "lengths", **DIFFERENT)
        trainer.train()
        found["different lengths"] = vars(record(trainer, recorder, folder / "lengths"))
        found["refused"] = [refusal(*refused) for refused in REFUSED]
    (folder / f"{library}-{os.environ['RANK']}.pkl").write_bytes(pickle.dumps(found))


#: Settings of a run whose processes have 7 and 3 batches.
DIFFERENT = {**STREAM, "max_steps": 5, "accelerator_config": ALONE}


class Broken(Stream):
    def __iter__(self):
        yield from plain_data(9)
        raise OSError("the stream is broken")


class Ragged(Stream):
    def __iter__(self):
        for index in range(16):
            yield {"x": torch.ones(8 + index), "labels": torch.tensor(0)}


class Texts(Stream):
    def __iter__(self):
        return iter([{"x": "a", "labels": "b"}] * 16)


#: accelerator_config, data, settings of runs that are refused.
REFUSED = (
    ({"even_batches": False}, lambda: Noisy(33), {}),
    ({"even_batches": False, **SPLIT}, lambda: Noisy(37), {}),
    (SPLIT, Noisy, {"per_device_train_batch_size": 3}),
    (SPLIT, Stream, {"max_steps": 1, "per_device_train_batch_size": 1}),
    (None, Broken, {"max_steps": 9}),
    (None, Ragged, {"max_steps": 9, "per_device_train_batch_size": 1}),
    (None, Texts, {"max_steps": 9, "trainer": {"data_collator": lambda samples: {"x": [s["x"] for s in samples]}}}),
)


def refusal(config, data, settings):
    given = {"train_dataset": data(), **settings.get("trainer", {})}
    try:
        options = {**settings, "trainer": given, "accelerator_config": config}
        build("hftrainer", "plain", Path("unused"), **options)[0].train()
    except (InvalidArgument, UnsupportedArgument, OSError) as error:
        return str(error)
    return None


if __name__ == "__main__":
    importlib.import_module(sys.argv[1])
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:] or CASES)
