"""Corners that once differed, found by trying both libraries on hostile scripts."""

import importlib
import os
import signal

import pytest
import torch
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler

from tests.parity.support import accuracy, assert_same, build, compare, record, train
from tests.tiny import make_plain, plain_data

EVERY_STEP = {"eval_strategy": "steps", "eval_steps": 2}


def both(tmp_path, make_settings, **settings):
    """Train with both libraries, with fresh objects for each."""
    results = [
        train(name, "plain", tmp_path / name, trainer=make_settings(), **settings)
        for name in ("hftrainer", "transformers")
    ]
    assert_same(*results)
    return results


@pytest.mark.parametrize("accumulation", [1, 2])
def test_optimizer_hooks_see_the_gradients(tmp_path, accumulation):
    seen = []

    def make():
        model = make_plain()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def halve(optimizer, args, kwargs):
            grads = [p.grad for group in optimizer.param_groups for p in group["params"]]
            seen.append(all(grad is not None for grad in grads))
            for grad in grads:
                grad.mul_(0.5)

        optimizer.register_step_pre_hook(halve)
        return {"model": model, "optimizers": (optimizer, None)}

    both(tmp_path, make, gradient_accumulation_steps=accumulation)
    assert seen
    assert all(seen)


class Stubborn(torch.optim.Optimizer):
    """Never calls its closure."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"])


def test_optimizer_that_ignores_closures(tmp_path):
    both(tmp_path, lambda: {"optimizer_cls_and_kwargs": (Stubborn, {"lr": 0.1})})


class OwnScheduler:
    """All that transformers asks of a scheduler."""

    def __init__(self, optimizer):
        self.optimizer, self.steps = optimizer, 0

    def step(self):
        self.steps += 1

    def get_last_lr(self):
        return [0.1 / (1 + self.steps)]

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]


@pytest.mark.parametrize("kind", ["plateau", "own"])
def test_schedulers_of_the_user(tmp_path, kind):
    def make():
        model = make_plain()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        return {"model": model, "optimizers": (optimizer, plateau if kind == "plateau" else OwnScheduler(optimizer))}

    ours, _ = both(tmp_path, make, metric_for_best_model="loss", **EVERY_STEP)
    rates = [line["learning_rate"] for line in ours.logs if "learning_rate" in line]
    assert len(set(rates)) > 1


class Stream(IterableDataset):
    def __init__(self, count):
        self.count = count
        self.epochs = []

    def __iter__(self):
        return iter(plain_data(self.count))

    def set_epoch(self, epoch):
        self.epochs.append(epoch)


@pytest.mark.parametrize("count", [19, 16, 5])
def test_evaluation_of_a_stream(tmp_path, count):
    compare(tmp_path, "plain", trainer={"eval_dataset": Stream(count), "compute_metrics": accuracy}, **EVERY_STEP)


@pytest.mark.parametrize("filtered", [True, False])
def test_nan_losses(tmp_path, filtered):
    settings = {
        "logging_nan_inf_filter": filtered,
        "logging_steps": 1,
        "train_sampling_strategy": "sequential",
        "num_train_epochs": 1,
    }
    losses = []
    for name in ("hftrainer", "transformers"):
        data = plain_data()
        for sample in data[8:12]:
            sample["labels"] = torch.tensor(-100)  # a batch of these has no mean
        logs = train(name, "plain", tmp_path / name, trainer={"train_dataset": data}, **settings).logs
        losses.append([str(line["loss"]) for line in logs if "loss" in line])  # nan is not equal to itself
    assert losses[0] == losses[1]
    assert losses[0].count("nan") == (0 if filtered else 8)  # without the filter it stays


@pytest.mark.parametrize("kind", ["sampler", "batch-sampler"])
def test_subclasses_of_samplers(tmp_path, kind):
    class OwnRandom(RandomSampler):
        pass

    class OwnBatches(BatchSampler):
        pass

    def trainer_class(library):
        class Own(library.Trainer):
            if kind == "sampler":

                def _get_train_sampler(self, *args):
                    return OwnRandom(self.train_dataset)

            else:

                def get_train_dataloader(self):
                    sampler = OwnBatches(RandomSampler(self.train_dataset), 4, False)
                    loader = torch.utils.data.DataLoader(self.train_dataset, batch_sampler=sampler)
                    return self.accelerator.prepare(loader)

        return Own

    compare(tmp_path, "plain", trainer_class=trainer_class)


def test_loaders_shuffle_anew(tmp_path):
    orders = []
    for name in ("hftrainer", "transformers"):
        trainer, _ = build(name, "plain", tmp_path / name)
        loader = trainer.get_train_dataloader()
        orders.append([[batch["labels"].tolist() for batch in loader] for _ in range(3)])
    assert orders[0] == orders[1]
    assert orders[0][0] != orders[0][1]


def test_datasets_are_told_the_epoch(tmp_path):
    told = []
    for name in ("hftrainer", "transformers"):
        stream = Stream(12)
        train(name, "plain", tmp_path / name, trainer={"train_dataset": stream}, max_steps=5)
        told.append(stream.epochs)
    assert told[0] == told[1]
    assert told[0]


def test_star_arguments(tmp_path):
    def trainer_class(library):
        class Own(library.Trainer):
            def _get_eval_sampler(self, *args, **kwargs):
                return super()._get_eval_sampler(*args, **kwargs)

        return Own

    seen = []

    def model_init(*args):
        seen.append(args)
        return make_plain()

    compare(tmp_path, "plain", trainer_class=trainer_class, trainer={"model_init": model_init}, **EVERY_STEP)
    assert set(seen) == {(None,)}


def test_folder_names_in_save(tmp_path):
    names = []

    def trainer_class(library):
        class Own(library.Trainer):
            def _save(self, output_dir=None, state_dict=None):
                names.append(os.path.basename(output_dir))
                super()._save(output_dir, state_dict)

        return Own

    compare(tmp_path, "plain", trainer_class=trainer_class, save_strategy="steps", save_steps=5, max_steps=5)
    assert names == ["checkpoint-5", "checkpoint-5"]


def test_items_in_batch_are_float32(tmp_path):
    seen = set()

    def loss_func(outputs, labels, num_items_in_batch=None):
        seen.add((num_items_in_batch.dtype, float(num_items_in_batch)))
        return torch.nn.functional.cross_entropy(outputs["logits"], labels, reduction="sum") / num_items_in_batch

    def make():
        model = make_plain()
        original = model.forward
        model.forward = lambda x, labels=None: original(x)
        return {"model": model, "compute_loss_func": loss_func}

    both(tmp_path, make, gradient_accumulation_steps=3)
    assert {dtype for dtype, _ in seen} == {torch.float32}


def test_metrics_that_evaluate_something_else(tmp_path):
    results = []
    for name in ("hftrainer", "transformers"):
        trainer, recorder = build(name, "plain", tmp_path / name)

        def metrics(prediction, trainer=trainer):
            trainer.compute_metrics = None
            inner = trainer.predict(plain_data()[:5]).predictions.sum()
            return {"inner": float(inner), "big": 10**400, "x/dataloader_idx_0": 1.0}

        trainer.compute_metrics = metrics
        trainer.evaluate()
        results.append(record(trainer, recorder, tmp_path / name))
    assert_same(*results)


@pytest.mark.parametrize("settings", [{"max_steps": 0}, {"max_grad_norm": -1}, {"eval_delay": -1, **EVERY_STEP}])
def test_odd_values(tmp_path, settings):
    compare(tmp_path, "plain", **settings)


def test_complete_run_resumed_with_eval_on_start(tmp_path):
    results = []
    for name in ("hftrainer", "transformers"):
        settings = {"save_strategy": "epoch", "num_train_epochs": 1, "eval_on_start": True}
        train(name, "plain", tmp_path / name, **settings)
        results.append(train(name, "plain", tmp_path / name, resume=True, **settings))
    assert results[0].logs == results[1].logs
    assert results[0].events == results[1].events


def test_launcher_precision(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    ours, _ = compare(tmp_path / "bf16", "bert")
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION")
    plain = train("hftrainer", "bert", tmp_path / "fp32")
    assert ours.logs != plain.logs


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_signals_are_the_scripts(tmp_path, number, monkeypatch):
    """Lightning would end training, and requeue the job under SLURM."""
    for name, value in {
        "SLURM_NTASKS": "1",
        "SLURM_JOB_NAME": "train",
        "SLURM_JOB_ID": "7",
        "SLURM_PROCID": "0",
    }.items():
        monkeypatch.setenv(name, value)
    library = importlib.import_module("hftrainer")
    caught = []
    before = signal.signal(number, lambda *args: caught.append(args[0]))

    class Sends(library.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 2:
                os.kill(os.getpid(), number)

    try:
        trainer, _ = build("hftrainer", "plain", tmp_path, max_steps=6)
        trainer.add_callback(Sends)
        assert trainer.train().global_step == 6
    finally:
        signal.signal(number, before)
    assert caught == [number]
    assert not list(tmp_path.glob("*.ckpt"))


def test_own_loader_resumes_without_loading_what_it_skips(tmp_path):
    loaded = []

    class Counted(torch.utils.data.Dataset):
        def __len__(self):
            return 38

        def __getitem__(self, index):
            loaded.append(index)
            return plain_data()[index]

    def trainer_class(library):
        class Own(library.Trainer):
            def get_train_dataloader(self):
                return torch.utils.data.DataLoader(Counted(), 4)

        return Own

    settings = {"trainer_class": trainer_class, "save_strategy": "steps", "save_steps": 6, "num_train_epochs": 1}
    whole = train("hftrainer", "plain", tmp_path, **settings)
    loaded.clear()
    resumed = train("hftrainer", "plain", tmp_path, resume=str(tmp_path / "checkpoint-6"), **settings)
    assert loaded == list(range(24, 38))
    assert all(torch.equal(whole.weights[name], tensor) for name, tensor in resumed.weights.items())


def test_compiling_in_place(tmp_path):
    """What is advised while torch_compile is planned."""

    def make():
        model = make_plain()
        model.compile(backend="eager")
        return {"model": model}

    trained = train("hftrainer", "plain", tmp_path / "compiled", trainer=make(), max_steps=3)
    plain = train("hftrainer", "plain", tmp_path / "plain", max_steps=3)
    assert trained.logs == plain.logs
