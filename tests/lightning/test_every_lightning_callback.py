"""Every class of `lightning.pytorch.callbacks` in the four ways of training; the table is printed after the tests."""

import json
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch.callbacks as lightning_callbacks
import pytest
import torch
from lightning.fabric.utilities.spike import TrainingSpikeException
from lightning.pytorch import callbacks as of
from torch import nn

from hftrainer import Trainer, TrainingArguments
from hftrainer.errors import UnsupportedArgument
from tests.support.differences import LIGHTNING_CALLBACKS
from tests.support.tiny import plain_data


class Model(nn.Module):
    """A pretrained part and a head, with dropout."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.backbone = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Dropout(0.2))
        self.head = nn.Linear(16, 3)

    def forward(self, x, labels=None):
        logits = self.head(self.backbone(x))
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return {"logits": logits} if loss is None else {"loss": loss, "logits": logits}


class Writer(of.BasePredictionWriter):
    def __init__(self):
        super().__init__("batch_and_epoch")
        self.batches, self.epoch = [], None

    def write_on_batch_end(self, trainer, pl_module, prediction, batch_indices, batch, batch_idx, dataloader_idx):
        self.batches.append((list(batch_indices), len(batch["labels"])))

    def write_on_epoch_end(self, trainer, pl_module, predictions, batch_indices):
        self.epoch = predictions, batch_indices


class Freezes(of.BaseFinetuning):
    """Trains the head alone for an epoch."""

    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.model.backbone)

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.model.backbone, optimizer)


class Saves(of.Checkpoint):
    def __init__(self):
        self.saved = 0

    def on_train_epoch_end(self, trainer, pl_module):
        trainer.save_checkpoint(f"{trainer.default_root_dir}/own-{trainer.global_step}.ckpt")
        self.saved += 1


class Counts(of.Callback):
    def __init__(self):
        self.batches = 0

    def on_train_batch_end(self, *args):
        self.batches += 1


class Bar(of.ProgressBar):
    """The least of a progress bar."""

    def __init__(self):
        super().__init__()
        self.total = 0

    def disable(self):
        pass

    def enable(self):
        pass

    def on_train_batch_end(self, trainer, pl_module, *args):
        super().on_train_batch_end(trainer, pl_module, *args)
        self.total += 1


@dataclass
class Run:
    """One finished run, as the checks look at it."""

    trainer: Trainer
    callback: Any
    mode: str
    folder: Any
    out: str

    @property
    def logs(self):
        return {name: value for line in self.trainer.state.log_history for name, value in line.items()}

    def __iter__(self):
        return iter((self.trainer, self.callback))


@dataclass
class Case:
    """How to make a callback, what must be seen of it, and the settings of the run if they matter."""

    make: Callable[[], Any]
    check: Callable[[Run], Any]
    settings: dict[str, Any] = field(default_factory=dict)
    changes_weights: bool = False


def lr_finder(run):
    found = run.callback.optimal_lr
    if run.mode == "resume":
        return found is None  # the learning rate is in the checkpoint
    first = next(line["learning_rate"] for line in run.trainer.state.log_history if "learning_rate" in line)
    at_fifth_step = found.suggestion() * (1 - 4 / 20)
    return len(found.results["loss"]) > 5 and first == pytest.approx(at_fifth_step)


def averaged(run):
    """The final weights are the average, which is what was saved last; evaluation saw the average of its time."""
    from safetensors.torch import load_file

    saved = load_file(run.folder / "checkpoint-20" / "model.safetensors") if run.mode != "accumulation 2" else {}
    own = run.trainer.model.state_dict()
    return all(torch.equal(tensor, own[name]) for name, tensor in saved.items())


def pruned(run):
    weights = [part.weight for part in run.trainer.model.modules() if isinstance(part, nn.Linear)]
    plain = not any(name.endswith("_mask") for name, _ in run.trainer.model.named_buffers())
    return plain and all((weight == 0).float().mean() > 0.2 for weight in weights)


def predictions_written(run):
    writer = run.callback
    output = run.trainer.predict(plain_data(9))
    predictions, indices = writer.epoch
    logits = torch.cat(predictions)
    expected = [(list(range(start, min(start + 8, 9))), min(8, 9 - start)) for start in (0, 8)]
    return (
        writer.batches == expected
        and indices == [[[0, 1, 2, 3, 4, 5, 6, 7], [8]]]
        and torch.equal(logits, torch.from_numpy(output.predictions))
    )


def spiked(run):
    first = run.folder if run.mode != "resume" else run.folder.parent / "a"  # its place is part of its state
    return run.callback.exclude_batches_path == str(first / "skip_batches.json") and run.callback.last_val > 0


def logged(*names):
    return lambda run: all(any(name in key for key in run.logs) for name in names)


STEPS = {"max_steps": 20, "num_train_epochs": 3}
CASES = {
    "BackboneFinetuning": Case(
        lambda: of.BackboneFinetuning(unfreeze_backbone_at_epoch=1, verbose=False),
        lambda run: len(run.trainer.optimizer.param_groups) == 3,
        {"max_steps": 40, "num_train_epochs": 5},  # the callback moves its rate on in the third epoch
        changes_weights=True,
    ),
    "BaseFinetuning": Case(Freezes, lambda run: len(run.trainer.optimizer.param_groups) == 3, changes_weights=True),
    "BasePredictionWriter": Case(Writer, predictions_written),
    "BatchSizeFinder": Case(
        lambda: of.BatchSizeFinder(steps_per_trial=1, max_trials=3),
        lambda run: (
            run.trainer.state.train_batch_size
            == run.trainer._train_batch_size
            == (8 if run.mode == "resume" else run.callback.optimal_batch_size)
            == 8
        ),
        changes_weights=True,
    ),
    "Callback": Case(Counts, lambda run: run.callback.batches > 0),
    "Checkpoint": Case(Saves, lambda run: run.callback.saved and list(run.folder.glob("own-*.ckpt"))),
    "DeviceStatsMonitor": Case(lambda: of.DeviceStatsMonitor(cpu_stats=True), logged("DeviceStatsMonitor")),
    "EarlyStopping": Case(
        lambda: of.EarlyStopping("eval_loss", patience=2, min_delta=10.0),
        lambda run: run.trainer.state.global_step < 20,
    ),
    "GradientAccumulationScheduler": Case(
        lambda: of.GradientAccumulationScheduler({0: 1, 1: 2}),
        lambda run: run.trainer.state.epoch == 3 and run.trainer.state.global_step == 10 + 5 + 5,
        {"max_steps": -1},
        changes_weights=True,
    ),
    "LambdaCallback": Case(
        lambda: of.LambdaCallback(on_train_end=lambda trainer, module: setattr(trainer, "ended", True)),
        lambda run: run.trainer.lightning_trainer.ended,
    ),
    "LearningRateFinder": Case(
        lambda: of.LearningRateFinder(num_training_steps=20, min_lr=1e-5, max_lr=0.1, early_stop_threshold=None),
        lr_finder,
        changes_weights=True,
    ),
    "LearningRateMonitor": Case(of.LearningRateMonitor, logged("lr-AdamW")),
    "ModelCheckpoint": Case(
        lambda: of.ModelCheckpoint(every_n_train_steps=5, save_top_k=-1),
        lambda run: run.callback.best_model_path and (run.folder / "checkpoint-20").is_dir(),
    ),
    "ModelPruning": Case(
        lambda: of.ModelPruning("l1_unstructured", parameter_names=["weight"], amount=0.3), pruned, changes_weights=True
    ),
    "ModelSummary": Case(of.ModelSummary, lambda run: "Trainable params" in run.out),
    "OnExceptionCheckpoint": Case(lambda: of.OnExceptionCheckpoint("unused"), lambda run: True),
    "ProgressBar": Case(Bar, lambda run: run.callback.total > 0),
    "RichModelSummary": Case(of.RichModelSummary, lambda run: "Trainable params" in run.out),
    "RichProgressBar": Case(of.RichProgressBar, lambda run: "Epoch" in run.out),
    "StochasticWeightAveraging": Case(
        lambda: of.StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1, annealing_epochs=1),
        lambda run: run.callback.n_averaged.item() > 0 and run.logs["learning_rate"] == pytest.approx(0.05),
        {"max_steps": -1, "num_train_epochs": 4},
        changes_weights=True,
    ),
    "SpikeDetection": Case(lambda: of.SpikeDetection(warmup=1000), spiked),
    "ThroughputMonitor": Case(
        lambda: of.ThroughputMonitor(batch_size_fn=lambda batch: len(batch["labels"]), window_size=4),
        logged("train/device/batches_per_sec"),
        {"logging_steps": 2},
    ),
    "Timer": Case(lambda: of.Timer(duration={"hours": 1}), lambda run: run.callback.time_elapsed("train") > 0),
    "TQDMProgressBar": Case(of.TQDMProgressBar, lambda run: "Epoch" in run.out),
    "EMAWeightAveraging": Case(lambda: of.EMAWeightAveraging(decay=0.8), averaged, changes_weights=True),
    "WeightAveraging": Case(of.WeightAveraging, averaged, changes_weights=True),
}
REFUSED = {
    ("GradientAccumulationScheduler", "accumulation 2"): "gradient_accumulation_steps=2 and Gradient",
    ("EarlyStopping", "fit"): "reads evaluations, and the run has none",
}


def test_every_class_has_its_case():
    assert CASES.keys() == LIGHTNING_CALLBACKS.keys() == set(lightning_callbacks.__all__)


def make_trainer(folder, callbacks, **settings):
    defaults = {
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 8,
        "learning_rate": 1e-2,
        "save_strategy": "steps",
        "save_steps": 5,
        "logging_steps": 5,
        "disable_tqdm": True,
        "use_cpu": True,
    }
    args = TrainingArguments(str(folder), **{**defaults, **STEPS, **settings})
    data = plain_data()
    return Trainer(Model(), args, train_dataset=data, eval_dataset=data[:19], callbacks=callbacks)


MODE_SETTINGS = {
    "fit": {},
    "fit with evaluation": {"eval_strategy": "steps", "eval_steps": 5},
    "accumulation 2": {"eval_strategy": "steps", "eval_steps": 2, "gradient_accumulation_steps": 2},
    "resume": {"eval_strategy": "steps", "eval_steps": 5},
}


@pytest.mark.parametrize("mode", MODE_SETTINGS)
@pytest.mark.parametrize("name", CASES)
def test_callback(tmp_path, name, mode, capfd, monkeypatch):
    case = CASES[name]
    settings = {**case.settings, **MODE_SETTINGS[mode]}
    if (name, mode) in REFUSED:
        with pytest.raises(UnsupportedArgument, match=REFUSED[name, mode]):
            make_trainer(tmp_path, [case.make()], **settings).train()
        return
    callback = case.make()
    summary = logging.getLogger("lightning.pytorch.callbacks.model_summary")
    monkeypatch.setattr(summary, "info", print)  # which the level of the tests leaves out
    trainer = make_trainer(tmp_path / "a", [callback], **settings)
    trainer.train()
    folder = tmp_path / "a"
    if mode == "resume":
        whole = trainer
        for step in (5, 15, 25, 10):  # in the middle of an epoch, and at its end
            if step >= whole.state.global_step:
                continue
            folder, callback = tmp_path / f"from-{step}", case.make()
            trainer = make_trainer(folder, [callback], **settings)
            trainer.train(resume_from_checkpoint=str(tmp_path / "a" / f"checkpoint-{step}"))
            if name != "EarlyStopping" or step < 15:  # which is where it had stopped
                assert trainer.state.global_step == whole.state.global_step
                assert_same_weights(trainer.model, whole.model)
    captured = capfd.readouterr()
    assert case.check(Run(trainer, callback, mode, folder, captured.out + captured.err)), name
    if mode in ("fit", "fit with evaluation"):
        plain = make_trainer(tmp_path / "plain", [], **settings)
        plain.train()
        same = all(torch.equal(a, b) for a, b in zip(plain.model.parameters(), trainer.model.parameters(), strict=True))
        stopped = trainer.state.global_step < plain.state.global_step
        assert stopped or same != case.changes_weights


def assert_same_weights(ours, theirs):
    for (name, a), b in zip(ours.state_dict().items(), theirs.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


AVERAGING = {
    "ema": lambda: of.EMAWeightAveraging(decay=0.8),
    "mean": of.WeightAveraging,
    "swa": lambda: of.StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1),
}


@pytest.mark.parametrize("make", AVERAGING.values(), ids=AVERAGING)
def test_one_callback_for_two_trainers(tmp_path, make):
    """As in cross-validation: the second run is what it is with a callback of its own."""
    settings = {"max_steps": -1, "save_strategy": "no"}
    callback = make()
    make_trainer(tmp_path, [callback], **settings).train()
    again = make_trainer(tmp_path, [callback], **settings)
    again.train()
    own = make_trainer(tmp_path, [make()], **settings)
    own.train()
    assert_same_weights(again.model, own.model)
    start = Model()
    assert not all(torch.equal(a, b) for a, b in zip(again.model.parameters(), start.parameters(), strict=True))


@pytest.mark.parametrize("make", AVERAGING.values(), ids=AVERAGING)
def test_two_runs_of_one_trainer(tmp_path, make):
    trainer = make_trainer(tmp_path, [make()], max_steps=-1, save_strategy="no", logging_steps=1)
    trainer.train()
    before = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    first = trainer.state.log_history[0]["learning_rate"]
    trainer.train()
    assert trainer.state.log_history[0]["learning_rate"] == first
    assert any(not torch.equal(tensor, before[name]) for name, tensor in trainer.model.state_dict().items())


@pytest.mark.parametrize("make", AVERAGING.values(), ids=AVERAGING)
def test_evaluation_after_training_is_of_the_model(tmp_path, make):
    trainer = make_trainer(tmp_path, [make()], max_steps=-1, save_strategy="no")
    trainer.train()
    for parameter in trainer.model.parameters():
        parameter.data.zero_()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(math.log(3))


def test_overrides_save_the_average(tmp_path):
    """As libraries do that write the model themselves; a resumed run is exact all the same."""

    class Own(Trainer):
        def _save(self, output_dir=None, state_dict=None):
            super()._save(output_dir)
            torch.save(self.model.state_dict(), f"{output_dir}/own.pt")

    def trained(folder, **keywords):
        trainer = make_trainer(folder, [of.EMAWeightAveraging(decay=0.7)], **keywords)
        trainer.__class__ = Own
        return trainer

    from safetensors.torch import load_file

    whole = trained(tmp_path / "a")
    whole.train()
    for step in (5, 20):
        folder = tmp_path / "a" / f"checkpoint-{step}"
        own, saved = torch.load(folder / "own.pt"), load_file(folder / "model.safetensors")
        assert all(torch.equal(tensor, saved[name]) for name, tensor in own.items())
    resumed = trained(tmp_path / "b")
    resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-5"))
    assert_same_weights(resumed.model, whole.model)


def test_a_callback_is_asked_once_for_each_checkpoint(tmp_path):
    asked = []
    callback = of.LambdaCallback(on_save_checkpoint=lambda trainer, module, checkpoint: asked.append(module))
    make_trainer(tmp_path, [callback]).train()
    assert len(asked) == 4


@pytest.mark.parametrize("calls_super", [True, False])
def test_metrics_that_overrides_add_are_monitored(tmp_path, calls_super):
    class Adds(Trainer):
        def evaluate(self, *args, **kwargs):
            metrics = super().evaluate(*args, **kwargs) if calls_super else {}
            metrics["eval_extra"] = float(self.state.global_step)
            return metrics

    stopper = of.EarlyStopping("eval_extra", patience=1)
    trainer = make_trainer(tmp_path, [stopper], eval_strategy="steps", eval_steps=5)
    trainer.__class__ = Adds
    assert trainer.train().global_step == 10  # it grows, and smaller is better
    assert stopper.best_score == 5


def test_spike_stops_training_and_names_the_batches(tmp_path):
    class Spikes(Trainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            loss = super().compute_loss(model, inputs, *args, **kwargs)
            return loss * 1000 if self.state.global_step == 8 else loss

    trainer = make_trainer(tmp_path, [of.SpikeDetection(window=5, warmup=5, atol=1.0)])
    trainer.__class__ = Spikes
    with pytest.raises(TrainingSpikeException):
        trainer.train()
    assert json.loads((tmp_path / "skip_batches.json").read_text())


def test_exception_leaves_a_lightning_checkpoint(tmp_path):
    class Fails(of.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if trainer.global_step == 3:
                raise RuntimeError("enough")

    trainer = make_trainer(tmp_path, [of.OnExceptionCheckpoint(tmp_path / "rescued"), Fails()])
    with pytest.raises(RuntimeError, match="enough"):
        trainer.train()
    saved = torch.load(tmp_path / "rescued" / "on_exception.ckpt", weights_only=False)
    assert saved["global_step"] == 3


def test_timer_stops_training(tmp_path):
    trainer = make_trainer(tmp_path, [of.Timer(duration={"seconds": 0})], max_steps=10_000)
    assert trainer.train().global_step < 10_000


def test_evaluation_sees_the_average(tmp_path):
    """The logged `eval_loss` is that of the weights in the checkpoint of the same step, which are the average."""
    from safetensors.torch import load_file

    settings = {"eval_strategy": "steps", "eval_steps": 5, "load_best_model_at_end": True}
    trainer = make_trainer(tmp_path, [of.EMAWeightAveraging(decay=0.7)], **settings)
    trainer.train()
    plain = make_trainer(tmp_path / "plain", [], **settings)
    plain.train()
    for step in (5, 10, 15, 20):
        other = make_trainer(tmp_path / "other", [])
        other.model.load_state_dict(load_file(tmp_path / f"checkpoint-{step}" / "model.safetensors"))
        of_step = [
            line["eval_loss"] for line in trainer.state.log_history if line["step"] == step and "eval_loss" in line
        ]
        assert other.evaluate()["eval_loss"] == of_step[0]
        assert of_step[0] not in [line.get("eval_loss") for line in plain.state.log_history]


def test_averaged_batch_norm_has_statistics_of_its_own(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))

    class Normalized(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = model

        def forward(self, x, labels=None):
            logits = self.layers(x)
            return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}

    args = TrainingArguments(
        str(tmp_path), num_train_epochs=4, per_device_train_batch_size=19, use_cpu=True, disable_tqdm=True
    )
    averaging = of.StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1)
    data = plain_data()
    trainer = Trainer(Normalized(), args, train_dataset=data, callbacks=[averaging])
    trainer.train()
    with torch.no_grad():
        x = model[0](torch.stack([sample["x"] for sample in data]))
    assert model[1].num_batches_tracked == 2
    torch.testing.assert_close(model[1].running_mean, x.mean(0))  # of two batches of one size
    assert model[1].momentum == 0.1
    assert model.training


@pytest.mark.parametrize("kind", [of.LearningRateFinder, of.BatchSizeFinder])
def test_finders_leave_nothing_behind(tmp_path, kind):
    """A run with the found numbers given by hand is the same run."""
    options = {"num_training_steps": 15, "max_lr": 0.1} if kind is of.LearningRateFinder else {"max_trials": 3}
    finder = kind(**options)
    found = make_trainer(tmp_path / "a", [finder], weight_decay=0.1)
    found.train()
    if kind is of.LearningRateFinder:
        settings = {"learning_rate": finder.optimal_lr.suggestion()}
    else:
        settings = {"per_device_train_batch_size": finder.optimal_batch_size}
    given = make_trainer(tmp_path / "b", [], weight_decay=0.1, **settings)
    given.train()
    for ours, theirs in zip(found.state.log_history[:-1], given.state.log_history[:-1], strict=True):
        assert ours == theirs
    assert_same_weights(found.model, given.model)
    assert not list(tmp_path.glob("**/.lr_find*"))
    assert not list(tmp_path.glob("**/.scale_batch_size*"))


def test_one_that_suggests_only(tmp_path):
    finder = of.LearningRateFinder(num_training_steps=15, max_lr=0.1, update_attr=False)
    trainer = make_trainer(tmp_path, [finder])
    trainer.train()
    assert trainer.state.log_history[0]["learning_rate"] < 1e-2
    assert math.isfinite(finder.optimal_lr.suggestion())


class FinderByEpoch(of.LearningRateFinder):
    def on_train_epoch_start(self, trainer, pl_module):
        self.lr_find(trainer, pl_module)


@pytest.mark.parametrize(
    ("callback", "settings", "words"),
    [
        (lambda: of.ModelPruning("l1_unstructured", make_pruning_permanent=False), {}, "make_pruning_permanent"),
        (lambda: of.GradientAccumulationScheduler({1: 2}), {"gradient_accumulation_steps": 3}, "steps=3"),
        (of.BatchSizeFinder, {"auto_find_batch_size": True}, "auto_find_batch_size and BatchSizeFinder"),
        (FinderByEpoch, {}, "FinderByEpoch.on_train_epoch_start"),
        (lambda: of.ModelCheckpoint(monitor="eval_loss"), {}, "waits for evaluations"),
    ],
)
def test_refusals_say_why(tmp_path, callback, settings, words):
    with pytest.raises(UnsupportedArgument, match=words):
        make_trainer(tmp_path, [callback()], **settings).train()


@pytest.mark.parametrize("max_steps", [-1, 7, 18])
def test_accumulation_by_epoch_counts_steps(tmp_path, max_steps):
    trainer = make_trainer(
        tmp_path, [of.GradientAccumulationScheduler({0: 1, 1: 4})], max_steps=max_steps, num_train_epochs=2
    )
    output = trainer.train()
    assert output.global_step == (10 + 3 if max_steps == -1 else max_steps)
    assert trainer.state.max_steps == output.global_step
    assert trainer.state.log_history[-1]["epoch"] == pytest.approx(
        {-1: 2, 7: 0.7, 18: 3.8 if max_steps == 18 else 0}[max_steps]
    )


@pytest.mark.parametrize(
    "callback", [lambda: of.EarlyStopping("eval_acuracy"), lambda: of.ModelCheckpoint(monitor="eval_acuracy")]
)
def test_a_monitor_that_no_metric_matches(tmp_path, callback):
    trainer = make_trainer(tmp_path, [callback()], eval_strategy="steps", eval_steps=5)
    with pytest.raises(Exception, match=r"eval_acuracy.*eval_loss"):
        trainer.train()
    assert trainer.state.global_step == 5
