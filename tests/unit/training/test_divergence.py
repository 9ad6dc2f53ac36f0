"""After a step that diverges, the run returns to its last checkpoint, and ends as if its data lacked the samples."""

import contextlib
import random
import shutil

import pytest
import torch
from lightning.pytorch.callbacks import OnExceptionCheckpoint

from hftrainer import Trainer, TrainerCallback
from hftrainer.errors import TrainingDiverged, UnsupportedArgument
from hftrainer.trainer_callback import ExportableState
from tests.support.checkpoints import BACKGROUND, AtStep, assert_same_end, make_trainer, train_to_end
from tests.support.divergence import FAULTS, SEQUENTIAL, SIZE, STEPS, Rows, Sensitive, entries, fit, rows, rows_without
from tests.support.tracking import scalars


@pytest.mark.slow
@pytest.mark.parametrize("kind", FAULTS)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_rollback_skips_bad_samples_exactly(tmp_path, kind, accumulation):
    size = SIZE * accumulation
    draw = random.Random(f"{kind}{accumulation}")
    windows = sorted(draw.sample(range(22 if kind == "spike" else 0, STEPS), 2))
    bad = {window * size + draw.randrange(size) for window in windows}
    settings = {"gradient_accumulation_steps": accumulation, "max_steps": STEPS - 2}
    if kind == "spike":
        settings["divergence_threshold"] = 10
        settings["on_divergence"] = "stop"
    good = fit(tmp_path / "good", rows_without(windows, size), **settings)
    settings["on_divergence"] = "rollback"
    rolled = fit(tmp_path / "bad", rows(STEPS * size, bad, FAULTS[kind]), **settings)
    assert_same_end(rolled, good)
    found = entries(tmp_path / "bad")
    assert [entry["samples"] for entry in found] == [
        [[[*range(start, start + SIZE)] for start in range(window * size, (window + 1) * size, SIZE)]]
        for window in windows
    ]


#: Bad windows of the 36, steps of the run, and the number of windows that it skips, again in each epoch that has them.
PLACES = {
    "first and last": ([0, 1, STEPS - 1], STEPS - 2, 5),  # its last step begins a second epoch
    "stream": ([3, 4, 9], STEPS - 3, 3),
    "background": ([3, 4, 9], STEPS - 3, 3),
    "two epochs": ([3, 4, 9], 2 * (STEPS - 3) + 1, 6),  # and the first step of a third
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", PLACES)
def test_rollback_finds_bad_samples_in_streams_and_later_epochs(tmp_path, kind):
    windows, steps, skipped = PLACES[kind]
    make, saving = Rows if kind == "stream" else list, BACKGROUND if kind == "background" else {}
    settings = {"max_steps": steps, "on_divergence": "rollback", **saving}
    good = fit(tmp_path / "good", make(rows_without(windows, SIZE)), **settings)
    bad = rows(STEPS * SIZE, [window * SIZE for window in windows])
    rolled = fit(tmp_path / "bad", make(bad), **settings | {"max_rollbacks": 6})
    assert_same_end(rolled, good)
    assert entries(tmp_path / "good") == []
    assert len(entries(tmp_path / "bad")) == skipped
    if kind == "stream":
        assert entries(tmp_path / "bad")[0]["samples"] == [None]


def test_tensorboard_shows_no_step_twice(tmp_path):
    """Step 5 diverges: from the checkpoint of step 3 on, step 4 is logged again."""
    bad = rows(STEPS * SIZE, [4 * SIZE])
    fit(tmp_path, bad, max_steps=6, save_steps=3, on_divergence="rollback", report_to="tensorboard")
    (events,) = {path.parent for path in tmp_path.rglob("events*")}
    assert [step for step, _ in scalars(events)["train/loss"]] == [*range(1, 7)]


def test_rollback_makes_up_max_steps_in_a_further_epoch(tmp_path):
    """With max_steps, a run makes them all; with epochs it ends with its data."""
    bad = rows(STEPS * SIZE, [8])
    rolled = fit(tmp_path / "steps", bad, max_steps=STEPS, on_divergence="rollback")
    assert rolled.state.global_step == STEPS
    rolled = fit(tmp_path / "epochs", bad, num_train_epochs=1, max_steps=-1, on_divergence="rollback")
    assert rolled.state.global_step == STEPS - 1
    assert [line["step"] for line in rolled.state.log_history if "loss" in line] == [*range(1, STEPS)]


def test_divergence_error_names_step_and_samples(tmp_path):
    bad = rows(STEPS * SIZE, [8, 20, 33])
    said = r"(?s)Step 15 diverged: the loss is not finite \(nan\).*max_rollbacks=2.*32, 33.*20, 21"
    with pytest.raises(TrainingDiverged, match=said):
        fit(tmp_path, bad, max_steps=STEPS, on_divergence="rollback", max_rollbacks=2)
    with pytest.raises(TrainingDiverged, match=r"Step 5 diverged.*on_divergence='stop'.*8, 9"):
        fit(tmp_path, bad, max_steps=STEPS, on_divergence="stop")


def test_divergence_without_the_argument_only_warns(tmp_path, caplog):
    rolled = fit(tmp_path, rows(STEPS * SIZE, [SIZE * 6]), max_steps=STEPS, save_steps=5, save_total_limit=2)
    assert all(weight.isnan().any() for weight in rolled.model.parameters())
    assert not (tmp_path / "skipped_samples.jsonl").exists()
    assert "log_history leaves it out of its means" in caplog.text
    assert "save_total_limit=2 will delete the checkpoints from before: on_divergence='stop'" in caplog.text
    caplog.clear()
    fit(tmp_path, rows(STEPS * SIZE, [8]), max_steps=STEPS, on_divergence="rollback")
    assert "Rollback 1 of 3" in caplog.text and "log_history leaves" not in caplog.text


@pytest.mark.slow
def test_resumed_run_skips_known_bad_samples(tmp_path):
    """Also if it resumes from before the bad step, or from a copy of the checkpoint elsewhere.

    A torn line is ignored, and a run from the start forgets the list.
    """
    bad = rows(STEPS * SIZE, [8, 40])
    settings = {"max_steps": STEPS - 2, "on_divergence": "rollback", "max_rollbacks": 2}
    good = fit(tmp_path / "good", rows_without([4, 20], SIZE), **settings)
    fit(tmp_path / "bad", bad, **settings)
    shutil.copytree(tmp_path / "bad" / "checkpoint-2", tmp_path / "other" / "checkpoint-2")
    assert_same_end(fit(tmp_path / "bad", bad, tmp_path / "other" / "checkpoint-2", **settings), good)
    assert len(entries(tmp_path / "bad")) == 2
    assert not (tmp_path / "bad" / "earlier_skipped_samples.jsonl").exists()
    skipped = tmp_path / "bad" / "skipped_samples.jsonl"
    with skipped.open("a") as file:
        file.write('{"step": 1')
    settings = {**SEQUENTIAL, "per_device_train_batch_size": SIZE, **settings}
    again = make_trainer(tmp_path / "bad", trainer={"model": Sensitive(), "train_dataset": bad}, **settings)
    train_to_end(again, tmp_path / "bad" / "checkpoint-2")
    assert_same_end(again, good)
    assert len(skipped.read_text().splitlines()) == 3
    fit(tmp_path / "bad", bad, **settings)
    assert [entry["samples"][0][0] for entry in entries(tmp_path / "bad")] == [[8, 9], [40, 41]]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"per_device_train_batch_size": 4}, "per_device_train_batch_size=4, was 2"),
        ({"seed": 1}, "seed=1, was 42"),
        ({"data_seed": 1, "elastic": True}, "seed=1, was 42"),
    ],
)
def test_skipped_samples_of_other_batches_are_ignored(tmp_path, caplog, changed, said):
    bad = rows(STEPS * SIZE, [8])
    settings = {"max_steps": 12, "on_divergence": "rollback"}
    fit(tmp_path, bad, **settings)
    fit(tmp_path, bad, tmp_path / "checkpoint-2", **settings, **changed)
    assert "not skipped" in caplog.text and said in caplog.text


class Counts(TrainerCallback, ExportableState):
    """Counts steps, as early stopping counts evaluations."""

    def __init__(self, steps=0):
        self.steps = steps

    def state(self):
        return {"args": {"steps": self.steps}, "attributes": {}}

    def on_step_end(self, args, state, control, **kwargs):
        self.steps += 1


@pytest.mark.parametrize("save_steps", [4, 50])
def test_rollback_restores_the_state_of_callbacks(tmp_path, save_steps):
    """Callbacks return to their state at the checkpoint, or at the start."""
    counts = Counts()
    settings = {"max_steps": 8, "save_steps": save_steps, "on_divergence": "rollback"}
    rolled = fit(tmp_path, rows(STEPS * SIZE, [6 * SIZE]), callbacks=[counts], **settings)
    assert entries(tmp_path)[0]["checkpoint"] == (str(tmp_path / "checkpoint-4") if save_steps == 4 else None)
    assert counts.steps == rolled.state.global_step == 8


def test_copy_of_the_start_is_released_after_a_checkpoint(tmp_path):
    settings = {**SEQUENTIAL, "max_steps": 4, "on_divergence": "rollback"}
    data, held = rows(STEPS * SIZE), []
    trainer = make_trainer(tmp_path, trainer={"model": Sensitive(), "train_dataset": data}, **settings)
    for step in (1, 3):  # there is a checkpoint after step 2
        trainer.add_callback(AtStep(step, lambda: held.append(trainer._hftrainer.run.initial_state is not None)))
    train_to_end(trainer)
    assert held == [True, False]
    assert trainer._hftrainer.run.skipped_samples is None


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"divergence_threshold": 8}, "divergence_threshold and max_rollbacks need on_divergence"),
        ({"max_rollbacks": 2}, "divergence_threshold and max_rollbacks need on_divergence"),
        ({"on_divergence": "rollback", "max_rollbacks": -1}, "max_rollbacks=-1: "),
        ({"on_divergence": "rollback", "max_rollbacks": 1.5}, "max_rollbacks=1.5 is a float"),
        ({"on_divergence": "stop", "divergence_threshold": True}, "divergence_threshold=True: use a number"),
        ({"on_divergence": "stop", "optim": "lomo"}, "optim='lomo' changes them during"),
        ({"on_divergence": "stop", "optim": "galore_adamw_layerwise"}, "changes them during"),
        ({"on_divergence": "rollback", "ignore_data_skip": True}, "ignore_data_skip restarts"),
        ({"on_divergence": "rollback", "save_only_model": True}, "set save_only_model=False"),
        ({"on_divergence": "rollback", "auto_find_batch_size": True}, "auto_find_batch_size=True would change"),
    ],
)
def test_conflicting_arguments_are_refused(tmp_path, settings, said):
    with pytest.raises(ValueError, match=said):
        fit(tmp_path, rows(STEPS * SIZE), **settings)


class Own(Trainer):
    def train(self, resume_from_checkpoint=None):
        return self._inner_training_loop(batch_size=SIZE, args=self.args)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"trainer_class": Own}, "on_divergence='rollback' needs Trainer.train"),
        ({"callbacks": [OnExceptionCheckpoint(".")]}, "would save the state that on_divergence='rollback' discards"),
    ],
)
def test_conflicting_override_or_callback_is_refused(tmp_path, settings, said):
    with pytest.raises(UnsupportedArgument, match=said):
        fit(tmp_path, rows(STEPS * SIZE), on_divergence="rollback", max_steps=2, **settings)


class Level(torch.nn.Linear):
    """A model whose loss is the level of its sample."""

    def forward(self, level):
        return {"loss": level.mean() + 0 * self.weight.sum()}


@pytest.mark.parametrize(("last", "diverges"), [(1.005, False), (1.02, True)])
def test_spike_exceeds_one_percent_of_the_mean_at_least(tmp_path, last, diverges):
    """Of equal losses the standard deviation is 0: without the minimum, any noise would be a spike."""
    data = [{"level": level} for level in [1.0] * 20 + [last]]
    settings = {"max_steps": 21, "per_device_train_batch_size": 1, "save_strategy": "no", "divergence_threshold": 1}
    spike = pytest.raises(TrainingDiverged, match="Step 21 diverged: the loss is a spike")
    with spike if diverges else contextlib.nullcontext():
        fit(tmp_path, data, model=Level(1, 1), on_divergence="stop", **settings)


@pytest.mark.slow
def test_clean_runs_do_not_diverge(tmp_path):
    for seed in range(3):
        settings = {"seed": seed, "num_train_epochs": 2, "max_steps": -1, "on_divergence": "stop"}
        fit(tmp_path / str(seed), rows(STEPS * SIZE), divergence_threshold=10, **settings)


def test_epoch_ends_with_its_data_after_a_rollback(tmp_path):
    """The last step has its checkpoint, as without the samples."""
    settings = {"max_steps": -1, "num_train_epochs": 1, "save_steps": 5, "lr_scheduler_type": "constant"}
    good = fit(tmp_path / "good", rows_without([7], SIZE), **settings)
    rolled = fit(tmp_path / "bad", rows(STEPS * SIZE, {7 * SIZE}), on_divergence="rollback", **settings)
    assert_same_end(rolled, good)
    assert rolled.state.max_steps == rolled.state.global_step == STEPS - 1
    assert (tmp_path / "bad" / f"checkpoint-{STEPS - 1}").is_dir()


@pytest.mark.slow
def test_checkpoint_within_a_step_records_skipped_samples(tmp_path, caplog):
    """It is written after two bad windows, at the end of an epoch, and in the next one."""
    windows = [3, 4, 9, STEPS - 1]
    settings = {"max_steps": 2 * (STEPS - 4), "on_divergence": "rollback", "max_rollbacks": 8, "save_steps": 3}
    good = fit(tmp_path / "good", rows_without(windows, SIZE), **settings)
    bad = rows(STEPS * SIZE, [window * SIZE for window in windows])
    for stop in (5, 32, 40):
        folder = tmp_path / str(stop)
        with pytest.raises(ZeroDivisionError) as caught:
            fit(folder, bad, callbacks=[AtStep(stop, lambda: 1 / 0, "on_step_begin")], **settings)
        assert "with other random numbers, since" in caught.value.__notes__[-2]
        assert_same_end(fit(folder, bad, folder / f"checkpoint-{stop}", **settings), good)
