"""Going on from a checkpoint: the end is that of the undisturbed run, whichever library wrote the checkpoint."""

import functools
import importlib
import shutil

import pytest
import torch

from tests.support.parity import alike, assert_equal, assert_same_weights, build, train
from tests.support.tiny import Stream, plain_data

# 10 micro-batches an epoch. With accumulation 3 an epoch has 4 optimizer steps, the last of 1 micro-batch.
CASES = [
    pytest.param(1, 4, id="mid-epoch"),
    pytest.param(1, 10, id="epoch-end"),
    pytest.param(1, 13, id="mid-second-epoch"),
    pytest.param(3, 2, id="mid-epoch-accumulating"),
    pytest.param(3, 4, id="epoch-end-accumulating"),
    pytest.param(3, 6, id="mid-second-epoch-accumulating"),
]
MODELS = ["plain", "bert", "llama", "peft"]


def settings(accumulation, step, **more):
    return {
        "gradient_accumulation_steps": accumulation,
        "save_strategy": "steps",
        "save_steps": step,
        "eval_strategy": "steps",
        "eval_steps": 3,
        "logging_steps": 1,
        **more,
    }


@pytest.fixture(scope="module")
def whole_runs(tmp_path_factory):
    """A run of a library from beginning to end, and its folder: several readers go on from one writer's checkpoint."""

    @functools.cache
    def run(writer, model, accumulation, step):
        folder = tmp_path_factory.mktemp("whole")
        return train(writer, model, folder, **settings(accumulation, step)), folder

    return run


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("accumulation", "step"), CASES)
@pytest.mark.parametrize(
    ("writer", "reader"),
    [("hftrainer", "hftrainer"), ("transformers", "hftrainer"), ("hftrainer", "transformers")],
    ids=["ours-ours", "theirs-ours", "ours-theirs"],
)
def test_resumed_run_ends_as_the_undisturbed_one(tmp_path, whole_runs, model, accumulation, step, writer, reader):
    undisturbed, written = whole_runs(writer, model, accumulation, step)
    folder = tmp_path / "resumed"
    shutil.copytree(written / f"checkpoint-{step}", folder / f"checkpoint-{step}")
    resumed = train(reader, model, folder, resume=True, **settings(accumulation, step))
    assert_same_weights(resumed.weights, undisturbed.weights)
    assert resumed.logs[:-1] == undisturbed.logs[:-1]  # the last line has the mean loss of this call alone
    assert resumed.extra["global_step"] == undisturbed.extra["global_step"]


@pytest.mark.parametrize(("accumulation", "step"), CASES)
def test_events_after_resuming(tmp_path, accumulation, step):
    """A resumed run announces what a resumed run of transformers announces."""
    train("transformers", "plain", tmp_path / "whole", **settings(accumulation, step))
    results = []
    for name in ("hftrainer", "transformers"):
        shutil.copytree(tmp_path / "whole" / f"checkpoint-{step}", tmp_path / name / f"checkpoint-{step}")
        path = str(tmp_path / name / f"checkpoint-{step}")
        results.append(train(name, "plain", tmp_path / name, resume=path, **settings(accumulation, step)))
    ours, theirs = results
    assert ours.events == theirs.events
    assert ours.logs == theirs.logs
    assert ours.files == theirs.files


def test_bf16(tmp_path):
    undisturbed = train("hftrainer", "llama", tmp_path / "whole", **settings(3, 2, bf16=True))
    shutil.copytree(tmp_path / "whole" / "checkpoint-2", tmp_path / "resumed" / "checkpoint-2")
    resumed = train("hftrainer", "llama", tmp_path / "resumed", resume=True, **settings(3, 2, bf16=True))
    assert_same_weights(resumed.weights, undisturbed.weights)


def own_training_step(library):
    class Own(library.Trainer):
        def training_step(self, *args, **kwargs):
            return super().training_step(*args, **kwargs)

    return Own


@pytest.mark.parametrize(("accumulation", "step"), CASES)
def test_manual_optimization(tmp_path, accumulation, step):
    given = settings(accumulation, step, trainer_class=own_training_step)
    undisturbed = train("hftrainer", "plain", tmp_path / "whole", **given)
    shutil.copytree(tmp_path / "whole" / f"checkpoint-{step}", tmp_path / "resumed" / f"checkpoint-{step}")
    resumed = train("hftrainer", "plain", tmp_path / "resumed", resume=True, **given)
    assert_same_weights(resumed.weights, undisturbed.weights)


def test_ignore_data_skip(tmp_path):
    train("transformers", "plain", tmp_path / "whole", **settings(1, 4))
    results = []
    for name in ("hftrainer", "transformers"):
        shutil.copytree(tmp_path / "whole" / "checkpoint-4", tmp_path / name / "checkpoint-4")
        results.append(train(name, "plain", tmp_path / name, resume=True, **settings(1, 4, ignore_data_skip=True)))
    assert results[0].events == results[1].events
    assert results[0].logs == results[1].logs
    assert_same_weights(results[0].weights, results[1].weights)


@pytest.mark.parametrize("streams", [True, False], ids=["stream", "workers"])
def test_other_loaders(tmp_path, streams):
    more = {"trainer": {"train_dataset": Stream(38)}, "max_steps": 14} if streams else {"dataloader_num_workers": 2}
    undisturbed = train("hftrainer", "plain", tmp_path / "whole", **settings(2, 3, **more))
    shutil.copytree(tmp_path / "whole" / "checkpoint-3", tmp_path / "resumed" / "checkpoint-3")
    resumed = train("hftrainer", "plain", tmp_path / "resumed", resume=True, **settings(2, 3, **more))
    assert_same_weights(resumed.weights, undisturbed.weights)


@pytest.mark.parametrize("restore", [False, True])
def test_callback_states(tmp_path, restore):
    """Early stopping counts on from the checkpoint, if that is asked for."""

    def run(name):
        library = importlib.import_module(name)
        more = {"load_best_model_at_end": True, "eval_steps": 2, "metric_for_best_model": "loss"}
        more["restore_callback_states_from_checkpoint"] = restore
        given = settings(1, 4, **more)
        trainer, _ = build(name, "plain", tmp_path / name, **given)
        trainer.add_callback(library.EarlyStoppingCallback(9, early_stopping_threshold=5.0))
        trainer.train()
        resumed, _ = build(name, "plain", tmp_path / name, **given)
        resumed.add_callback(library.EarlyStoppingCallback(50, early_stopping_threshold=5.0))
        resumed.train(resume_from_checkpoint=str(tmp_path / name / "checkpoint-8"))
        (stopper,) = [cb for cb in resumed.callback_handler.callbacks if isinstance(cb, library.EarlyStoppingCallback)]
        return (stopper.early_stopping_patience, stopper.early_stopping_patience_counter)

    ours = alike(run, assert_equal)
    assert ours[0] == (9 if restore else 50)


def test_complete_run_resumed_with_eval_on_start(tmp_path):
    results = []
    for name in ("hftrainer", "transformers"):
        settings = {"save_strategy": "epoch", "num_train_epochs": 1, "eval_on_start": True}
        train(name, "plain", tmp_path / name, **settings)
        results.append(train(name, "plain", tmp_path / name, resume=True, **settings))
    assert results[0].logs == results[1].logs
    assert results[0].events == results[1].events


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
