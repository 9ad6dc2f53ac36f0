"""Scripts find and change the callbacks of trackers as in transformers. Each change here is from public code."""

import importlib
import types

import pytest
from transformers import integrations
from transformers.integrations import integration_utils

import hftrainer
from hftrainer import integrations as ours
from tests.support import tracking
from tests.support.parity import LIBRARIES, assert_agree, assert_same_weights
from tests.support.tracking import make_tracked_trainer

CLASSES = {
    "TensorBoardCallback": tracking.TensorBoard,
    "WandbCallback": tracking.WandB,
    "MLflowCallback": tracking.MLflow,
    "CometCallback": tracking.Comet,
}
for _tracker in CLASSES.values():
    pytest.importorskip(_tracker.package)


#: Library → the module of its callbacks.
MODULES = {"transformers": integrations, "hftrainer": ours}


def callback_names(trainer):
    return [type(callback).__name__ for callback in trainer.callback_handler.callbacks]


def place_of(trainer, kind):
    return next(i for i, each in enumerate(trainer.callback_handler.callbacks) if isinstance(each, kind))


def callback_of(trainer, kind):
    return trainer.callback_handler.callbacks[place_of(trainer, kind)]


@pytest.mark.parametrize(
    "report_to", ["tensorboard", ["wandb", "tensorboard"], ["mlflow", "comet_ml", "tensorboard", "wandb"], "none"]
)
def test_callbacks_have_the_same_order(tmp_path, report_to):
    def made(library):
        own = type("Own", (importlib.import_module(library).TrainerCallback,), {})
        return callback_names(
            make_tracked_trainer(library, tmp_path, report_to=report_to, trainer={"callbacks": [own]})
        )

    assert_agree(made)


@pytest.mark.parametrize("name", CLASSES)
def test_callback_has_every_public_name(name):
    theirs, ours = (getattr(MODULES[library], name) for library in LIBRARIES)
    wanted = {each for each in {*vars(theirs()), *dir(theirs)} if not each.startswith("__")}
    known = {"_MAX_PARAM_VAL_LENGTH", "_MAX_PARAMS_TAGS_PER_BATCH"}  # MLflow's own limits, by other names
    assert wanted - set(dir(ours())) - known == set()


CHANGES = {}


def case(name, left=""):
    """Registers a change: a function of a Trainer, its callback, the class and a folder. Its result is called last."""
    return lambda function: CHANGES.setdefault(function, (name, left)) and function


def summary_writer(folder):
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(folder)


@case("TensorBoardCallback", "settings/text_summary")
def write_before(trainer, callback, kind, folder):
    callback.logging_dir = folder
    if callback.tb_writer is None:
        callback._init_summary_writer(args=trainer.args)
    callback.tb_writer.add_text("settings", "mine")


@case("TensorBoardCallback", "train/added")
def move_to_the_end(trainer, callback, kind, folder):
    """So that it sees what other callbacks add to the line."""
    callbacks = trainer.callback_handler.callbacks
    callbacks.append(callbacks.pop(callbacks.index(callback)))
    add = {"on_log": lambda self, *args, logs=None, **kwargs: logs.update(added=1.0)}
    callbacks.insert(0, type("Adds", (trainer.own_base,), add)())


@case("TensorBoardCallback", "begun/text_summary")
def patch_the_beginning(trainer, callback, kind, folder):
    def on_train_begin(self, args, state, control, **kwargs):
        self.logging_dir = folder
        self._init_summary_writer(args)
        self.tb_writer.add_text("begun", "mine")

    callback.on_train_begin = types.MethodType(on_train_begin, callback)


@case("TensorBoardCallback")
def wrap(trainer, callback, kind, folder):
    tolerant = type("Tolerant", (trainer.own_base,), {})()
    vars(tolerant).update({event: getattr(callback, event) for event in ("on_train_begin", "on_log", "on_train_end")})
    trainer.callback_handler.callbacks[place_of(trainer, kind)] = tolerant


@case("TensorBoardCallback")
def replace(trainer, callback, kind, folder):
    assert isinstance(trainer.pop_callback(kind), kind)
    assert trainer.pop_callback(kind) is None
    trainer.add_callback(kind(tb_writer=summary_writer(folder)))


@case("TensorBoardCallback")
def remove(trainer, callback, kind, folder):
    trainer.remove_callback(kind)


@case("TensorBoardCallback")
def no_writer(trainer, callback, kind, folder):
    callback._SummaryWriter = None


@case("TensorBoardCallback", "doubled/train/loss")
def other_writer(trainer, callback, kind, folder):
    def add_scalar(self, tag, scalar_value, *args, **kwargs):
        super(type(self), self).add_scalar(f"doubled/{tag}", scalar_value * 2, *args, **kwargs)

    callback._SummaryWriter = type("Doubling", (callback._SummaryWriter,), {"add_scalar": add_scalar})


@case("TensorBoardCallback", "train/renamed_loss")
def subclass(trainer, callback, kind, folder, with_writer=False):
    class Renames(kind):
        def _init_summary_writer(self, args, log_dir=None):
            self.tb_writer = self._SummaryWriter(log_dir=f"{args.output_dir}/own")

        def on_log(self, args, state, control, logs=None, **kwargs):
            renamed = {f"renamed_{name}": value for name, value in logs.items()}
            super().on_log(args, state, control, logs=renamed, **kwargs)
            self.tb_writer.add_scalar("more", 1.0, state.global_step)

    trainer.remove_callback(kind)
    trainer.add_callback(Renames(summary_writer(folder)) if with_writer else Renames)

    def open_again():
        trainer.evaluate()
        callback_of(trainer, Renames).tb_writer.flush()

    return open_again


@case("TensorBoardCallback", "train/renamed_loss")
def subclass_with_a_writer(*args):
    return subclass(*args, with_writer=True)


@case("WandbCallback", "('mine', 'by setup')")
def begin_the_run(trainer, callback, kind, folder):
    """A subclass that begins the run itself, as the documentation of `setup` proposes."""

    class Own(kind):
        def setup(self, args, state, model, **kwargs):
            self._wandb.init(project="mine", name="by setup")
            super().setup(args, state, model, **kwargs)
            self._wandb.config.update({"more": 1})

        def on_evaluate(self, args, state, control, **kwargs):
            self._wandb.log({"samples": state.global_step})

    trainer.callback_handler.callbacks[place_of(trainer, kind)] = Own()


@case("WandbCallback")
def set_up_before(trainer, callback, kind, folder):
    assert callback._initialized is False
    callback.setup(trainer.args, trainer.state, trainer.model, reinit=False)
    assert callback._initialized is True
    callback._wandb.config.update({"more": 2}, allow_val_change=True)


@case("WandbCallback", "only")
def log_otherwise(trainer, callback, kind, folder):
    callback.on_log = lambda args, state, control, **kwargs: callback._wandb.log({"only": state.global_step})


@case("MLflowCallback")
def leave_the_run_open(trainer, callback, kind, folder):
    callback.setup(trainer.args, trainer.state, trainer.model)
    callback._ml_flow.log_param("mine", 3)
    assert [callback._initialized, callback._auto_end_run, callback._log_artifacts] == [True, True, False]
    callback._auto_end_run = False
    return lambda: callback._ml_flow.active_run() is not None


@case("CometCallback")
def look_at_the_experiment(trainer, callback, kind, folder):
    assert callback._experiment is None
    running = importlib.import_module("comet_ml").get_running_experiment
    return lambda: callback._initialized and callback._experiment.get_key() == running().get_key()


@pytest.mark.parametrize("change", CHANGES)
def test_changed_callback_writes_alike(tmp_path, monkeypatch, change):
    name, left = CHANGES[change]

    def run(library):
        tracker = CLASSES[name](tmp_path / library, monkeypatch)
        monkeypatch.chdir(tracker.folder)
        trainer = make_tracked_trainer(library, tracker.folder, **tracker.settings)
        trainer.own_base, kind = importlib.import_module(library).TrainerCallback, getattr(MODULES[library], name)
        look = change(trainer, callback_of(trainer, kind), kind, f"{trainer.args.output_dir}/mine")
        trainer.train()
        seen = look and look()
        written = tracker.read()
        tracker.close()
        # transformers' PrinterCallback removes the flops from the line for all later callbacks
        curves = {name: curve for name, curve in written.curves.items() if not name.endswith("total_flos")}
        for tags in written.details.get("scalars", []):
            tags[:] = [tag for tag in tags if not tag.endswith("total_flos")]
        parameters = {key: value for each in written.hyperparameters for key, value in each.items()}
        parameters |= written.details.pop("configuration", {})
        shown = {key: str(parameters.get(key)) for key in ("mine", "more", "learning_rate", "hidden_size")}
        details = {key: written.details[key] for key in written.details if key not in ("axes", "summary")}
        return seen, curves, details, shown

    seen, curves, details, _ = assert_agree(run)
    assert seen in (None, True)
    assert bool(curves) == (change not in (remove, no_writer))
    assert left in f"{list(curves)} {details}"


def test_tensorboard_writer_is_shared_and_closed_at_the_end(tmp_path):
    """Lightning's loggers write with it too."""
    trainer = make_tracked_trainer("hftrainer", tmp_path, report_to="tensorboard")
    callback = callback_of(trainer, ours.TensorBoardCallback)
    assert callback.tb_writer is None
    seen = set()

    class Looks(hftrainer.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            assert trainer.loggers[0].experiment is callback.tb_writer
            seen.add(callback.tb_writer)

    trainer.add_callback(Looks)
    trainer.train()
    assert len(seen) == 1
    assert callback.tb_writer is None
    assert callback.logging_dir.startswith(str(tmp_path / "runs"))


def test_wandb_callback_without_its_module_begins_no_run(tmp_path):
    """A script may set `_wandb` to None to switch it off."""
    import wandb

    trainer = make_tracked_trainer("hftrainer", tmp_path, report_to="wandb")
    callback_of(trainer, ours.WandbCallback)._wandb = None
    trainer.train()
    assert wandb.run is None


@pytest.mark.parametrize("name", CLASSES)
def test_classes_of_transformers_are_replaced_under_install(tmp_path, name, monkeypatch):
    # other tests have imported transformers' Trainer
    monkeypatch.setattr("hftrainer.cli.install.check_earlier_imports", lambda: [])
    theirs = getattr(integration_utils, name)
    report_to = next(key for key, kind in integration_utils.INTEGRATION_TO_CALLBACK.items() if kind is theirs)
    trainer = make_tracked_trainer("hftrainer", tmp_path, report_to=report_to)
    assert type(trainer.pop_callback(theirs)).__name__ == name  # by its class, without install() too
    assert trainer.pop_callback(theirs) is None
    hftrainer.install()
    try:
        kind = getattr(integrations, name)
        trainer = make_tracked_trainer("transformers", tmp_path, report_to=report_to)
        assert isinstance(trainer, hftrainer.Trainer)
        assert isinstance(callback_of(trainer, kind), getattr(ours, name))
        assert integrations.get_reporting_integration_callbacks([report_to]) == [kind]
        assert issubclass(kind, importlib.import_module("transformers").TrainerCallback)
        trainer.remove_callback(kind)
        assert name not in callback_names(trainer)
    finally:
        hftrainer.uninstall()
    assert getattr(integration_utils, name) is theirs
    assert integration_utils.INTEGRATION_TO_CALLBACK[report_to] is theirs


def test_callback_appended_to_the_list_uploads_saved_files(tmp_path, monkeypatch):
    """Such a callback has no Trainer: it saves the model that it is passed."""
    monkeypatch.setenv("WANDB_LOG_MODEL", "checkpoint")
    trainer = make_tracked_trainer("hftrainer", tmp_path / "run", max_steps=2, save_strategy="steps", save_steps=2)
    folders, saved = [], []

    class Keeps(ours.WandbCallback):
        def _upload(self, args, folder, metadata, aliases):
            folders.append(folder)
            if aliases == ["final_model"]:
                saved.append(type(trainer.model).from_pretrained(folder))

    tracker = tracking.WandB(tmp_path, monkeypatch)
    trainer.callback_handler.callbacks.append(Keeps())
    trainer.train()
    tracker.close()
    assert folders[1] == str(tmp_path / "run" / "checkpoint-2")
    assert_same_weights(saved[0].state_dict(), trainer.model.state_dict())
