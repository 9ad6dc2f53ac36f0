"""Every class of `lightning.pytorch.callbacks` works while training, accumulating, evaluating and resuming."""

import functools
import itertools
import json
import logging
import math
from dataclasses import dataclass
from typing import Any

import lightning.pytorch.callbacks as of
import pytest
import torch
from lightning.fabric.utilities.spike import TrainingSpikeException
from safetensors.torch import load_file
from torch import nn

from hftrainer import Trainer
from hftrainer.errors import UnsupportedArgument
from tests.support import checkpoints
from tests.support.known_differences import LIGHTNING_CALLBACKS
from tests.support.small_models import Plain, plain_data


class Model(Plain):
    def __init__(self):
        torch.manual_seed(1)
        super().__init__()
        *backbone, self.head = self._modules.pop("layers")
        self.backbone = nn.Sequential(*backbone)

    def layers(self, x):
        return self.head(self.backbone(x))


DEFAULTS = {"max_steps": 20, "num_train_epochs": 3, "save_strategy": "steps", "save_steps": 5, "logging_steps": 5}
EVALUATED = {"eval_strategy": "steps", "eval_steps": 5}


def make_trainer(folder, *callbacks, kind=Trainer, model=None, **settings):
    data = plain_data()
    trainer_kwargs = {"model": model or Model(), "train_dataset": data, "eval_dataset": data[:19]}
    return checkpoints.make_trainer(folder, "plain", callbacks, kind, trainer=trainer_kwargs, **DEFAULTS | settings)


def train(*args, **settings):
    trainer = make_trainer(*args, **settings)
    trainer.train()
    return trainer


def are_same(ours, theirs):
    ours, theirs = ours.state_dict(), theirs.state_dict()
    assert ours.keys() == theirs.keys()
    return all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


@dataclass
class Run:
    trainer: Trainer
    callback: Any
    mode: str
    folder: Any
    out: str

    @property
    def logs(self):
        return {name: value for line in self.trainer.state.log_history for name, value in line.items()}


class Writer(of.BasePredictionWriter):
    def __init__(self):
        super().__init__("batch_and_epoch")
        self.batches, self.epoch = [], None

    def write_on_batch_end(self, trainer, pl_module, prediction, batch_indices, batch, batch_idx, dataloader_idx):
        self.batches.append((list(batch_indices), len(batch["labels"])))

    def write_on_epoch_end(self, trainer, pl_module, predictions, batch_indices):
        self.epoch = predictions, batch_indices


def writes_predictions(run):
    output = run.trainer.predict(plain_data(9))
    predictions, indices = run.callback.epoch
    assert run.callback.batches == [(list(range(8)), 8), ([8], 1)]
    assert indices == [[list(range(8)), [8]]]
    return torch.equal(torch.cat(predictions), torch.from_numpy(output.predictions))


class Freezes(of.BaseFinetuning):
    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.model.backbone)

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.model.backbone, optimizer)


class Saves(of.Checkpoint):
    def on_train_epoch_end(self, trainer, pl_module):
        trainer.save_checkpoint(f"{trainer.default_root_dir}/own-{trainer.global_step}.ckpt")


class Counts(of.Callback):
    batches = 0

    def on_train_batch_end(self, *args):
        self.batches += 1


class Bar(of.ProgressBar):
    batches = 0
    enable = disable = lambda self: None
    on_train_batch_end = Counts.on_train_batch_end


def ends_with_three_groups(run):
    return len(run.trainer.optimizer.param_groups) == 3


def stops_early(run):
    return run.trainer.state.global_step < 20


def count_saves(trainer, module, checkpoint):
    trainer.saves = getattr(trainer, "saves", 0) + 1


def is_called_once_for_each_checkpoint(run):
    lightning = run.trainer.lightning_trainer
    return lightning.ended and lightning.saves == len(list(run.folder.glob("checkpoint-*")))


def finds_batch_size(run):
    found = 8 if run.mode == "resume" else run.callback.optimal_batch_size
    return run.trainer.state.train_batch_size == run.trainer._train_batch_size == found == 8


def finds_learning_rate(run):
    found = run.callback.optimal_lr
    if run.mode == "resume":
        return found is None  # the learning rate is in the checkpoint
    first = next(line["learning_rate"] for line in run.trainer.state.log_history if "learning_rate" in line)
    at_fifth_step = found.suggestion() * (1 - 4 / 20)
    return len(found.results["loss"]) > 5 and first == pytest.approx(at_fifth_step)


def saves_beside_our_checkpoints(run):
    saved = torch.load(run.callback.best_model_path, weights_only=False)["state_dict"]
    assert {name.removeprefix("model.") for name in saved} == set(run.trainer.model.state_dict())
    return (run.folder / "checkpoint-20").is_dir()


def ends_with_the_average(run):
    """The final weights are the average, which is what was saved last; evaluation saw the average of its time."""
    saved = load_file(run.folder / "checkpoint-20" / "model.safetensors") if run.mode != "accumulation 2" else {}
    own = run.trainer.model.state_dict()
    return all(torch.equal(tensor, own[name]) for name, tensor in saved.items())


def prunes_weights(run):
    weights = [part.weight for part in run.trainer.model.modules() if isinstance(part, nn.Linear)]
    assert not any(name.endswith("_mask") for name, _ in run.trainer.model.named_buffers())
    return all((weight == 0).float().mean() > 0.2 for weight in weights)


def looks_for_spikes(run):
    first = run.folder if run.mode != "resume" else run.folder.parent / "a"  # the path is part of its state
    return run.callback.exclude_batches_path == str(first / "skip_batches.json") and run.callback.last_val > 0


def prints(words):
    return lambda run: words in run.out


def logs_metric(name):
    return lambda run: any(name in key for key in run.logs)


#: Class → what a run with it must show, and the options that it is made with.
CASES = {
    "BackboneFinetuning": (ends_with_three_groups, {"unfreeze_backbone_at_epoch": 1, "verbose": False}),
    "BaseFinetuning": (ends_with_three_groups, {}),
    "BasePredictionWriter": (writes_predictions, {}),
    "BatchSizeFinder": (finds_batch_size, {"steps_per_trial": 1, "max_trials": 3}),
    "Callback": (lambda run: run.callback.batches > 0, {}),
    "Checkpoint": (lambda run: list(run.folder.glob("own-*.ckpt")), {}),
    "DeviceStatsMonitor": (logs_metric("DeviceStatsMonitor"), {"cpu_stats": True}),
    "EarlyStopping": (stops_early, {"monitor": "eval_loss", "patience": 2, "min_delta": 10.0}),
    "GradientAccumulationScheduler": (
        lambda run: run.trainer.state.epoch == 3 and run.trainer.state.global_step == 10 + 5 + 5,
        {"scheduling": {0: 1, 1: 2}},
    ),
    "LambdaCallback": (
        is_called_once_for_each_checkpoint,
        {"on_train_end": lambda trainer, module: setattr(trainer, "ended", True), "on_save_checkpoint": count_saves},
    ),
    "LearningRateFinder": (
        finds_learning_rate,
        {"num_training_steps": 20, "min_lr": 1e-5, "max_lr": 0.1, "early_stop_threshold": None},
    ),
    "LearningRateMonitor": (logs_metric("lr-AdamW"), {}),
    "ModelCheckpoint": (saves_beside_our_checkpoints, {"every_n_train_steps": 5, "save_top_k": -1}),
    "ModelPruning": (prunes_weights, {"pruning_fn": "l1_unstructured", "parameter_names": ["weight"], "amount": 0.3}),
    "ModelSummary": (prints("Trainable params"), {}),
    # without an exception it does nothing
    "OnExceptionCheckpoint": (lambda run: not list(run.folder.glob("**/*.ckpt")), {"dirpath": "unused"}),
    "ProgressBar": (lambda run: run.callback.batches > 0, {}),
    "RichModelSummary": (prints("Trainable params"), {}),
    "RichProgressBar": (prints("Epoch"), {}),
    "StochasticWeightAveraging": (
        lambda run: run.callback.n_averaged.item() > 0 and run.logs["learning_rate"] == pytest.approx(0.05),
        {"swa_lrs": 0.05, "swa_epoch_start": 1, "annealing_epochs": 1},
    ),
    "SpikeDetection": (looks_for_spikes, {"warmup": 1000}),
    "ThroughputMonitor": (
        logs_metric("train/device/batches_per_sec"),
        {"batch_size_fn": lambda batch: len(batch["labels"]), "window_size": 4},
    ),
    "Timer": (lambda run: run.callback.time_elapsed("train") > 0, {"duration": {"hours": 1}}),
    "TQDMProgressBar": (prints("Epoch"), {}),
    "EMAWeightAveraging": (ends_with_the_average, {"decay": 0.8}),
    "WeightAveraging": (ends_with_the_average, {}),
}
#: Subclasses in place of classes that are to be derived from, or do nothing.
OWN = {"BaseFinetuning": Freezes, "BasePredictionWriter": Writer}
OWN |= {"Callback": Counts, "Checkpoint": Saves, "ProgressBar": Bar}
SETTINGS = {
    # the callback moves its rate on in the third epoch
    "BackboneFinetuning": {"max_steps": 40, "num_train_epochs": 5},
    "GradientAccumulationScheduler": {"max_steps": -1},
    "StochasticWeightAveraging": {"max_steps": -1, "num_train_epochs": 4},
    "ThroughputMonitor": {"logging_steps": 2},
}
CHANGES_WEIGHTS = """
    BackboneFinetuning BaseFinetuning BatchSizeFinder GradientAccumulationScheduler LearningRateFinder ModelPruning
    StochasticWeightAveraging EMAWeightAveraging WeightAveraging
""".split()
MODES = {
    "fit": {},
    "accumulation 2": {"eval_strategy": "steps", "eval_steps": 2, "gradient_accumulation_steps": 2},
    "evaluation, and resume": EVALUATED,
}
#: As `test_unsupported_callback_is_refused_with_the_reason` shows.
REFUSED = {("GradientAccumulationScheduler", "accumulation 2"), ("EarlyStopping", "fit")}


def test_every_lightning_callback_has_a_case():
    assert CASES.keys() == LIGHTNING_CALLBACKS.keys() == set(of.__all__)


@pytest.fixture(scope="module")
def train_plain(tmp_path_factory):
    return functools.cache(lambda *settings: train(tmp_path_factory.mktemp("plain"), **dict(settings)))


@pytest.mark.parametrize(("name", "mode"), [each for each in itertools.product(CASES, MODES) if each not in REFUSED])
def test_callback_works_when_training_and_resuming(tmp_path, train_plain, name, mode, capfd, monkeypatch):
    (check, options), folder = CASES[name], tmp_path / "a"
    settings, kind = {**SETTINGS.get(name, {}), **MODES[mode]}, OWN.get(name, getattr(of, name))
    # the log level of the tests would hide its table
    monkeypatch.setattr(logging.getLogger("lightning.pytorch.callbacks.model_summary"), "info", print)

    def assert_works(trainer, callback, folder, mode=mode):
        captured = capfd.readouterr()
        assert check(Run(trainer, callback, mode, folder, captured.out + captured.err)), name

    if mode != "accumulation 2":
        other = train_plain(*settings.items())
        capfd.readouterr()
    callback = kind(**options)
    whole = train(folder, callback, **settings)
    assert_works(whole, callback, folder)
    if mode == "accumulation 2":
        return
    stopped = whole.state.global_step < other.state.global_step
    assert stopped or are_same(other.model, whole.model) != (name in CHANGES_WEIGHTS)
    if mode == "fit":
        return
    for step in (5, 15, 25, 10):  # in the middle of an epoch, and at its end
        if step >= whole.state.global_step:
            continue
        folder, callback = tmp_path / f"from-{step}", kind(**options)
        trainer = make_trainer(folder, callback, **settings)
        trainer.train(resume_from_checkpoint=str(tmp_path / "a" / f"checkpoint-{step}"))
        if name != "EarlyStopping" or step < 15:  # which is where it had stopped
            assert trainer.state.global_step == whole.state.global_step
            assert are_same(trainer.model, whole.model)
    assert_works(trainer, callback, folder, "resume")


AVERAGING = {
    "ema": lambda: of.EMAWeightAveraging(decay=0.8),
    "mean": of.WeightAveraging,
    "swa": lambda: of.StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1),
}


@pytest.mark.parametrize("make", AVERAGING.values(), ids=AVERAGING)
def test_averaging_callback_serves_several_runs(tmp_path, make):
    """Each run is as with a new callback; an evaluation after training uses the model, not the average."""
    settings = {"max_steps": -1, "save_strategy": "no", "logging_steps": 1}
    callback = make()
    train(tmp_path, callback, **settings)
    trainer, own = train(tmp_path, callback, **settings), train(tmp_path, make(), **settings)
    assert are_same(trainer.model, own.model)
    assert not are_same(trainer.model, Model())
    before, logs = Model(), trainer.state.log_history
    before.load_state_dict(trainer.model.state_dict())
    trainer.train()
    assert trainer.state.log_history[0]["learning_rate"] == logs[0]["learning_rate"]
    assert not are_same(trainer.model, before)
    for parameter in trainer.model.parameters():
        parameter.data.zero_()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(math.log(3))


def test_ema_evaluations_and_checkpoints_hold_the_average(tmp_path):
    """Also those that an overridden `_save` writes, as in some libraries; a resumed run is exact."""

    class Own(Trainer):
        def _save(self, output_dir=None, state_dict=None):
            super()._save(output_dir)
            torch.save(self.model.state_dict(), f"{output_dir}/own.pt")

    def make(folder):
        settings = {**EVALUATED, "load_best_model_at_end": True}
        return make_trainer(folder, of.EMAWeightAveraging(decay=0.7), kind=Own, **settings)

    whole, plain = make(tmp_path / "a"), train(tmp_path / "plain", **EVALUATED)
    whole.train()
    losses = {line["step"]: line["eval_loss"] for line in whole.state.log_history if "eval_loss" in line}
    for step in (5, 10, 15, 20):
        other, folder = Model(), tmp_path / "a" / f"checkpoint-{step}"
        other.load_state_dict(load_file(folder / "model.safetensors"))
        own = Model()
        own.load_state_dict(torch.load(folder / "own.pt"))
        assert are_same(own, other)
        assert make_trainer(tmp_path / "other", model=other).evaluate()["eval_loss"] == losses[step]
        assert losses[step] not in [line.get("eval_loss") for line in plain.state.log_history]
    resumed = make(tmp_path / "b")
    resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-5"))
    assert are_same(resumed.model, whole.model)


def test_swa_recomputes_batch_norm_statistics(tmp_path):
    model = Model()
    model.backbone = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16))
    averaging = of.StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1)
    settings = {"max_steps": -1, "num_train_epochs": 4, "per_device_train_batch_size": 19}
    train(tmp_path, averaging, model=model, **settings)
    linear, norm = model.backbone
    with torch.no_grad():
        x = linear(torch.stack([sample["x"] for sample in plain_data()]))
    assert norm.num_batches_tracked == 2
    torch.testing.assert_close(norm.running_mean, x.mean(0))  # of two batches of one size
    assert norm.momentum == 0.1
    assert model.training


@pytest.mark.parametrize("kind", [of.LearningRateFinder, of.BatchSizeFinder])
def test_finder_run_equals_run_with_the_found_value(tmp_path, kind):
    """A run with the found numbers given by hand is the same run."""
    options = {"num_training_steps": 15, "max_lr": 0.1} if kind is of.LearningRateFinder else {"max_trials": 3}
    finder = kind(**options)
    found = train(tmp_path / "a", finder, weight_decay=0.1)
    if kind is of.LearningRateFinder:
        settings = {"learning_rate": finder.optimal_lr.suggestion()}
    else:
        settings = {"per_device_train_batch_size": finder.optimal_batch_size}
    given = train(tmp_path / "b", weight_decay=0.1, **settings)
    assert found.state.log_history[:-1] == given.state.log_history[:-1]
    assert are_same(found.model, given.model)
    assert not [*tmp_path.glob("**/.lr_find*"), *tmp_path.glob("**/.scale_batch_size*")]


def test_lr_finder_without_update_attr_only_suggests(tmp_path):
    finder = of.LearningRateFinder(num_training_steps=15, max_lr=0.1, update_attr=False)
    assert train(tmp_path, finder).state.log_history[0]["learning_rate"] < 1e-2
    assert math.isfinite(finder.optimal_lr.suggestion())


@pytest.mark.parametrize("calls_super", [True, False])
def test_early_stopping_monitors_metrics_of_overridden_evaluate(tmp_path, calls_super):
    class Adds(Trainer):
        def evaluate(self, *args, **kwargs):
            metrics = super().evaluate(*args, **kwargs) if calls_super else {}
            metrics["eval_extra"] = float(self.state.global_step)
            return metrics

    stopper = of.EarlyStopping("eval_extra", patience=1)
    assert train(tmp_path, stopper, kind=Adds, **EVALUATED).state.global_step == 10  # smaller is better, but it grows
    assert stopper.best_score == 5


def test_spike_stops_training_and_names_the_batches(tmp_path):
    class Spikes(Trainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            loss = super().compute_loss(model, inputs, *args, **kwargs)
            return loss * 1000 if self.state.global_step == 8 else loss

    with pytest.raises(TrainingSpikeException):
        train(tmp_path, of.SpikeDetection(window=5, warmup=5, atol=1.0), kind=Spikes)
    assert json.loads((tmp_path / "skip_batches.json").read_text())


def test_exception_leaves_a_lightning_checkpoint(tmp_path):
    class Fails(of.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if trainer.global_step == 3:
                raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        train(tmp_path, of.OnExceptionCheckpoint(tmp_path / "rescued"), Fails())
    saved = torch.load(tmp_path / "rescued" / "on_exception.ckpt", weights_only=False)
    assert saved["global_step"] == 3


def test_timer_stops_training(tmp_path):
    assert train(tmp_path, of.Timer(duration={"seconds": 0}), max_steps=10_000).state.global_step < 10_000


class OwnStep(Trainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        return super().training_step(model, inputs, num_items_in_batch)


@pytest.mark.parametrize("kind", [Trainer, OwnStep])
@pytest.mark.parametrize(("max_steps", "steps", "epoch"), [(-1, 10 + 3, 2), (7, 7, 0.7), (18, 18, 3.8)])
def test_accumulation_scheduler_counts_steps(tmp_path, kind, max_steps, steps, epoch):
    scheduler = of.GradientAccumulationScheduler({0: 1, 1: 4})
    state = train(tmp_path, scheduler, kind=kind, max_steps=max_steps, num_train_epochs=2).state
    assert state.global_step == state.max_steps == steps
    assert state.log_history[-1]["epoch"] == pytest.approx(epoch)


class FinderByEpoch(of.LearningRateFinder):
    def on_train_epoch_start(self, trainer, pl_module):
        self.lr_find(trainer, pl_module)


@pytest.mark.parametrize(
    ("make", "settings", "words"),
    [
        (lambda: of.ModelPruning("l1_unstructured", make_pruning_permanent=False), {}, "make_pruning_permanent"),
        (
            lambda: of.GradientAccumulationScheduler({1: 2}),
            {"gradient_accumulation_steps": 3},
            "gradient_accumulation_steps=3 and Gradient",
        ),
        (lambda: of.GradientAccumulationScheduler({1: 2}), {"elastic": True}, "which elastic=True keeps"),
        (lambda: of.EarlyStopping("eval_loss"), {}, "the run does not evaluate"),
        (of.BatchSizeFinder, {"auto_find_batch_size": True}, "auto_find_batch_size and BatchSizeFinder"),
        (FinderByEpoch, {}, "FinderByEpoch.on_train_epoch_start"),
    ],
)
def test_unsupported_callback_is_refused_with_the_reason(tmp_path, make, settings, words):
    with pytest.raises(UnsupportedArgument, match=words):
        train(tmp_path, make(), **settings)


def test_model_checkpoint_without_evaluations_warns(tmp_path, caplog):
    train(tmp_path, of.ModelCheckpoint(), max_steps=2)
    assert caplog.text.count("ModelCheckpoint saves after evaluations, but the run has none: set eval_strategy") == 1
    caplog.clear()
    for saving in (of.ModelCheckpoint(every_n_train_steps=1), of.ModelCheckpoint(save_on_train_epoch_end=True)):
        train(tmp_path, saving, max_steps=2)
    train(tmp_path, of.ModelCheckpoint(monitor="eval_loss"), max_steps=2, eval_minutes=60)
    assert "saves after evaluations" not in caplog.text


@pytest.mark.parametrize("kind", [of.EarlyStopping, of.ModelCheckpoint])
def test_unknown_monitor_names_the_logged_metrics(tmp_path, kind):
    trainer = make_trainer(tmp_path, kind(monitor="eval_acuracy"), **EVALUATED)
    with pytest.raises(Exception, match=r"eval_acuracy.*eval_loss"):
        trainer.train()
    assert trainer.state.global_step == 5
