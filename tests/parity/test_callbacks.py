"""What callbacks can do to a run."""

import importlib

import pytest

from tests.support.parity import EVERY_STEP, alike, build, record


def stops(library, event, at, switch):
    """A callback that sets a switch of `control` at an event and step."""

    class Sets(library.TrainerCallback):
        pass

    def handler(self, args, state, control, **kwargs):
        if state.global_step == at:
            setattr(control, switch, True)
        return control

    setattr(Sets, event, handler)
    return Sets()


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize(
    "switch", ["should_training_stop", "should_epoch_stop", "should_log", "should_evaluate", "should_save"]
)
@pytest.mark.parametrize("event", ["on_step_begin", "on_step_end", "on_substep_end", "on_log", "on_optimizer_step"])
def test_control(tmp_path, event, switch, accumulation):
    def run(name):
        library = importlib.import_module(name)
        folder = tmp_path / name
        trainer, recorder = build(name, "plain", folder, gradient_accumulation_steps=accumulation)
        trainer.add_callback(stops(library, event, 2, switch))
        trainer.train()
        return record(trainer, recorder, folder)

    alike(run)


def test_early_stopping(tmp_path):
    def run(name):
        library = importlib.import_module(name)
        folder = tmp_path / name
        settings = {**EVERY_STEP, "load_best_model_at_end": True, "learning_rate": 0.3, "num_train_epochs": 5}
        trainer, recorder = build(name, "plain", folder, **settings)
        trainer.add_callback(library.EarlyStoppingCallback(early_stopping_patience=2, early_stopping_threshold=0.01))
        trainer.train()
        assert trainer.state.global_step < trainer.state.max_steps
        return record(trainer, recorder, folder)

    alike(run)


def test_transformers_callbacks_in_our_trainer(tmp_path):
    library = importlib.import_module("transformers")
    settings = {**EVERY_STEP, "load_best_model_at_end": True, "learning_rate": 0.3, "num_train_epochs": 5}

    def run(name):
        folder = tmp_path / name
        trainer, recorder = build(name, "plain", folder, **settings)
        trainer.add_callback(library.EarlyStoppingCallback(early_stopping_patience=2))
        trainer.train()
        return record(trainer, recorder, folder)

    alike(run)


def test_model_left_in_eval_mode_by_a_callback(tmp_path):
    """transformers sets training mode before every micro-batch; callbacks rely on it."""

    class Careless:
        def on_step_end(self, args, state, control, model=None, **kwargs):
            model.layers[3].eval() if state.global_step % 2 else model.eval()

    def run(name):
        library = importlib.import_module(name)
        folder = tmp_path / name
        trainer, recorder = build(name, "plain", folder)
        trainer.add_callback(type("Own", (Careless, library.TrainerCallback), {}))
        trainer.train()
        return record(trainer, recorder, folder)

    alike(run)
