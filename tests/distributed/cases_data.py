"""Data that reaches two ranks in every way, with either library."""

import copy

import datasets
import torch
from torch.utils.data import IterableDataset

from hftrainer.errors import InvalidArgument, UnsupportedArgument
from tests.support.parity import build, record
from tests.support.rank_messages import Messages, error_of
from tests.support.small_models import Noisy, StatefulStream, language_data, pad, plain_data


class Stream(IterableDataset):
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
    def __init__(self):
        self.generator = torch.Generator().manual_seed(3)

    def __iter__(self):
        samples = plain_data(38)
        for index in torch.randperm(38, generator=self.generator).tolist():
            yield samples[index]


def stateful_stream(count=40):
    return StatefulStream(plain_data(count))


def hub(count, shards):
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


SHARED = {"logging_steps": 1}
STREAM = {**SHARED, "max_steps": 8}
SPLIT, ALONE = {"split_batches": True}, {"dispatch_batches": False}
MAIN = {"dispatch_batches": True}
BY_LENGTH = {"train_sampling_strategy": "group_by_length"}
EACH_BATCH = {"gradient_accumulation_kwargs": {"num_steps": 3, "sync_each_batch": True, "adjust_scheduler": False}}
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
    "each batch": (EACH_BATCH, Noisy, SHARED),
    "sequential": (None, Noisy, {**SHARED, "train_sampling_strategy": "sequential"}),
    "by length": (None, varied, {**BY_LENGTH, **SHARED, "trainer": {"data_collator": pad}}),
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
    "stream with a state": (None, stateful_stream, STREAM),
    "stream with a state, alone": (ALONE, stateful_stream, STREAM),
    "stream with a state, alone, ragged": (ALONE, lambda: stateful_stream(38), STREAM),
    "main, kept workers": (MAIN, Noisy, {**SHARED, "dataloader_num_workers": 2, "dataloader_persistent_workers": True}),
    "hub, alone": (ALONE, lambda: hub(38, 2).shuffle(seed=1, buffer_size=5), STREAM),
    "hub, alone, few shards": (ALONE, lambda: hub(38, 1), STREAM),
}
#: Runs that are resumed from a step within an epoch.
RESUMED = (
    *("stream with a state", "stream with a state, alone", "stream, noisy", "stream, worker", "stream, alone"),
    *("stream, alone, worker", "stream, alone, shuffled", "hub, alone"),
    *("split", "main", "main, kept workers", "torch's order"),
)
#: Cases in which processes have batches of different sizes, which no library can gather.
UNGATHERED = ("split, uneven", "uneven")
#: A run whose processes have 7 and 3 batches.
DIFFERENT = (ALONE, lambda: hub(37, 3), {**STREAM, "max_steps": 5})


def seeing(library):
    """A Trainer that keeps the batches it is given, and what is gathered of them for a metric."""

    class Seeing(library.Trainer):
        seen = gathered = ()
        gathers = False

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            first = next(iter(inputs.values()))
            self.seen = (*self.seen, first.clone())
            if self.gathers:  # rows of one length; processes with batches of other sizes cannot gather
                self.gathered = (*self.gathered, self.accelerator.gather_for_metrics(first.float().sum(-1)))
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    return Seeing


def make(library, config, data, settings, folder):
    trainer_kwargs = {"train_dataset": data(), **settings.get("trainer", {})}
    options = settings | {"trainer": trainer_kwargs, "trainer_class": seeing}
    options["accelerator_config"] = copy.deepcopy(config)
    return build(library, "llama" if data is varied else "plain", folder, **options)


def run(library, case, folder, resume=None):
    config, data, settings = CASES.get(case, DIFFERENT)
    saves = {"save_strategy": "steps", "save_steps": 3} if case in RESUMED else {}
    trainer, recorder = make(library, config, data, {**settings, **saves}, folder)
    trainer.gathers = case not in UNGATHERED and case in CASES
    output = trainer.train(resume_from_checkpoint=resume)
    found = record(trainer, recorder, folder, global_step=output.global_step, training_loss=output.training_loss)
    return found, torch.get_rng_state(), trainer.seen, trainer.gathered


def train_all(library, folder):
    return {case: run(library, case, folder / library / case.replace(", ", "-")) for case in CASES}


def go_on(folder):
    """By case, what came of a run that goes on; of one with shards of different length; and what both have logged."""
    messages, found = Messages(), {}
    for case in RESUMED:
        checkpoint = folder / "hftrainer" / case.replace(", ", "-") / "checkpoint-3"
        found[case] = run("hftrainer", case, folder / "resumed" / case, str(checkpoint))
    return found, run("hftrainer", "different lengths", folder / "lengths")[0], messages.lines


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


def texts(samples):
    return {"x": [sample["x"] for sample in samples]}


AS_TEXT = {"trainer": {"data_collator": texts}}
UNEVEN = "accelerator_config['even_batches']=False: the 2 processes would get different numbers"
INDIVISIBLE = "accelerator_config['split_batches']=True splits each batch among 2 processes, but a batch has"
#: accelerator_config, data, settings of runs that are refused, and how the error begins.
REFUSED = (
    ({"even_batches": False}, lambda: Noisy(33), {}, UNEVEN),
    ({"even_batches": False, **SPLIT}, lambda: Noisy(37), {}, UNEVEN),
    (SPLIT, Noisy, {"per_device_train_batch_size": 3}, f"{INDIVISIBLE} 3"),
    (SPLIT, Stream, {"max_steps": 1, "per_device_train_batch_size": 1}, f"{INDIVISIBLE} 1"),
    (None, Broken, {"max_steps": 9}, "the stream is broken"),
    (None, Ragged, {"max_steps": 9, "per_device_train_batch_size": 1}, "The main process cannot concatenate batches"),
    (None, Texts, {"max_steps": 9, **AS_TEXT}, "The main process can scatter tensors, not values of type str"),
)


def refuse(folder):
    found = []
    for row in REFUSED:
        trainer, _ = make("hftrainer", *row[:3], folder)
        found.append(error_of((InvalidArgument, UnsupportedArgument, OSError), trainer.train))
    return found
