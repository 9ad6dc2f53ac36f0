"""The callbacks of trackers, where and as scripts look for them. Each shape here is that of public code."""

import importlib
import types

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

import hftrainer
from hftrainer.reporting import tracker_callbacks
from hftrainer.reporting.tracker_callbacks import ReportingCallback
from tests.support.parity import LIBRARIES
from tests.support.tracking import make_trainer, mlflow_database, scalars, texts, wandb_items, wandb_records

for package in ("tensorboard", "wandb", "mlflow", "comet_ml"):
    pytest.importorskip(package)
CLASSES = ("TensorBoardCallback", "WandbCallback", "MLflowCallback", "CometCallback")


def kind_of(library, name):
    """The callback class of a library."""
    module = "transformers.integrations" if library == "transformers" else "hftrainer.reporting.tracker_callbacks"
    return getattr(importlib.import_module(module), name)


def kinds(trainer):
    return [type(callback).__name__ for callback in trainer.callback_handler.callbacks]


def callback_of(trainer, kind):
    """As scripts look for one."""
    return next(callback for callback in trainer.callback_handler.callbacks if isinstance(callback, kind))


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    """Trackers write below the test's folder, and to no server."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("COMET_START_ONLINE", "0")
    yield
    wandb = importlib.import_module("wandb")
    wandb.finish()
    wandb.teardown()


@pytest.mark.parametrize(
    "report_to",
    ["tensorboard", ["wandb", "tensorboard"], ["mlflow", "comet_ml", "tensorboard", "wandb"], "none"],
)
def test_order(tmp_path, report_to):
    """That of report_to, before the script's own."""

    def made(library):
        own = type("Own", (importlib.import_module(library).TrainerCallback,), {})
        return kinds(make_trainer(library, tmp_path, report_to=report_to, trainer={"callbacks": [own]}))

    ours, theirs = made("hftrainer"), made("transformers")
    assert ours == theirs


@pytest.mark.parametrize("name", CLASSES)
def test_every_public_name(name):
    """Attributes and methods of theirs, made with nothing, are there."""
    their_class, our_class = (kind_of(library, name) for library in LIBRARIES)
    ours, theirs = our_class(), their_class()
    wanted = {each for each in {*vars(theirs), *dir(their_class)} if not each.startswith("__")}
    known = {"_MAX_PARAM_VAL_LENGTH", "_MAX_PARAMS_TAGS_PER_BATCH"}  # MLflow's own limits, by other names
    assert wanted - set(dir(ours)) - known == set()


# ---- TensorBoard -----------------------------------------------------------------------------------------------------


def write_before(trainer, kind):
    """A script that notes its settings before training."""
    callback = callback_of(trainer, kind)
    callback.logging_dir = f"{trainer.args.output_dir}/logs"
    if callback.tb_writer is None:
        callback._init_summary_writer(args=trainer.args)
    callback.tb_writer.add_text("settings", "mine")


def move_to_the_end(trainer, kind):
    """So that it sees what other callbacks add to the line."""
    callbacks = trainer.callback_handler.callbacks
    place = next(i for i, callback in enumerate(callbacks) if isinstance(callback, kind))
    callbacks.append(callbacks.pop(place))
    adding = type(
        "Adds", (type(callbacks[0]).__mro__[1],), {"on_log": lambda self, *a, logs=None, **k: logs.update(added=1.0)}
    )
    callbacks.insert(0, adding())


def patch_the_beginning(trainer, kind):
    """Another `on_train_begin` on the instance."""

    def on_train_begin(self, args, state, control, **kwargs):
        self.logging_dir = f"{args.output_dir}/logs"
        self._init_summary_writer(args)
        self.tb_writer.add_text("begun", "mine")

    callback = callback_of(trainer, kind)
    callback.on_train_begin = types.MethodType(on_train_begin, callback)


def write_from_the_loss(trainer, kind):
    """A scalar of the script's own within a step."""
    compute_loss = trainer.compute_loss

    def with_scalar(*args, **kwargs):
        callback_of(trainer, kind).tb_writer.add_scalar(
            "mine/step", trainer.state.global_step, trainer.state.global_step
        )
        return compute_loss(*args, **kwargs)

    trainer.compute_loss = with_scalar
    trainer.args.eval_strategy = type(trainer.args.eval_strategy)("no")


def wrap(trainer, kind):
    """Something around the callback in its place."""
    callbacks = trainer.callback_handler.callbacks

    class Tolerant(type(callbacks[0]).__mro__[1]):
        def __init__(self, inner):
            self.inner = inner

        def on_train_begin(self, *args, **kwargs):
            self.inner.on_train_begin(*args, **kwargs)

        def on_log(self, *args, **kwargs):
            self.inner.on_log(*args, **kwargs)

        def on_train_end(self, *args, **kwargs):
            self.inner.on_train_end(*args, **kwargs)

    place = next(i for i, callback in enumerate(callbacks) if isinstance(callback, kind))
    callbacks[place] = Tolerant(callbacks[place])


def take_out(trainer, kind):
    """A script that brings its own."""
    from torch.utils.tensorboard import SummaryWriter

    assert isinstance(trainer.pop_callback(kind), kind)
    assert trainer.pop_callback(kind) is None
    trainer.add_callback(kind(tb_writer=SummaryWriter(f"{trainer.args.output_dir}/logs")))


def take_out_for_good(trainer, kind):
    trainer.remove_callback(kind)


def other_writer(trainer, kind):
    """A writer of another class."""
    from torch.utils.tensorboard import SummaryWriter

    class Doubling(SummaryWriter):
        def add_scalar(self, tag, scalar_value, *args, **kwargs):
            super().add_scalar(f"doubled/{tag}", scalar_value * 2, *args, **kwargs)

    callback_of(trainer, kind)._SummaryWriter = Doubling


def no_writer(trainer, kind):
    callback_of(trainer, kind)._SummaryWriter = None


SHAPES = [
    write_before,
    move_to_the_end,
    patch_the_beginning,
    write_from_the_loss,
    wrap,
    take_out,
    take_out_for_good,
    other_writer,
    no_writer,
]


def written(folder):
    """Scalars, and the tags of texts, of all folders with event files."""
    found = sorted({path.parent for path in folder.rglob("events*")})
    tags = [{**scalars(path), "texts": sorted(texts(path))} for path in found]
    for each in tags:
        each.pop("train/total_flos", None)  # which their PrinterCallback takes out of the line, for all behind it
    return tags


def assert_equal(ours, theirs):
    assert len(ours) == len(theirs)
    for our_tags, their_tags in zip(ours, theirs, strict=True):
        assert our_tags.keys() == their_tags.keys()
        assert {tag: (our_tags[tag], value) for tag, value in their_tags.items() if our_tags[tag] != value} == {}


@pytest.mark.parametrize("shape", SHAPES)
def test_tensorboard(tmp_path, shape):
    found = {}
    for library in LIBRARIES:
        trainer = make_trainer(library, tmp_path / library, report_to="tensorboard")
        shape(trainer, kind_of(library, "TensorBoardCallback"))
        trainer.train()
        found[library] = written(tmp_path / library)
    assert_equal(found["hftrainer"], found["transformers"])
    assert bool(found["hftrainer"]) == (shape not in (take_out_for_good, no_writer))


def subclass_of(kind):
    class Renames(kind):
        """Its own folder, and its own names."""

        def _init_summary_writer(self, args, log_dir=None):
            self.tb_writer = self._SummaryWriter(log_dir=f"{args.output_dir}/own")

        def on_log(self, args, state, control, logs=None, **kwargs):
            super().on_log(
                args, state, control, logs={f"renamed_{name}": value for name, value in logs.items()}, **kwargs
            )
            self.tb_writer.add_scalar("more", 1.0, state.global_step)

    return Renames


@pytest.mark.parametrize("given", ["class", "instance", "writer"])
def test_subclass_of_the_tensorboard_callback(tmp_path, given):
    from torch.utils.tensorboard import SummaryWriter

    found = {}
    for library in LIBRARIES:
        kind = subclass_of(kind_of(library, "TensorBoardCallback"))
        made = {"class": lambda kind=kind: kind, "instance": kind}.get(given)
        callback = made() if made else kind(SummaryWriter(str(tmp_path / library / "given")))
        trainer = make_trainer(library, tmp_path / library, report_to="none", trainer={"callbacks": [callback]})
        trainer.train()
        found[library] = written(tmp_path / library)
        trainer.evaluate()
        assert callback_of(trainer, kind).tb_writer is not None  # opened again for the evaluation
    assert_equal(found["hftrainer"], found["transformers"])
    assert "train/renamed_loss" in str(found["hftrainer"])


def test_writer_during_and_after_training(tmp_path):
    """Lightning's loggers write with it too."""
    trainer = make_trainer("hftrainer", tmp_path, report_to="tensorboard")
    callback = callback_of(trainer, tracker_callbacks.TensorBoardCallback)
    assert callback.tb_writer is None
    seen = []

    class Looks(hftrainer.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            seen.append((callback.tb_writer, trainer.loggers[0].experiment, trainer.lightning_trainer.loggers[0]))

    trainer.add_callback(Looks)
    trainer.train()
    assert len({id(writer) for writer, _, _ in seen}) == 1
    assert all(writer is experiment for writer, experiment, _ in seen)
    assert callback.tb_writer is None
    assert callback.logging_dir.startswith(str(tmp_path / "runs"))


# ---- Under install() -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CLASSES)
def test_classes_of_transformers_under_install(tmp_path, name, monkeypatch):
    monkeypatch.setattr(
        "hftrainer.cli.install.warnings_of_earlier_imports", lambda caller: []
    )  # of what other tests import
    from transformers.integrations import integration_utils

    theirs = getattr(integration_utils, name)
    report_to = next(key for key, kind in integration_utils.INTEGRATION_TO_CALLBACK.items() if kind is theirs)
    hftrainer.install()
    try:
        import transformers
        from transformers import integrations

        kind = getattr(integrations, name)
        trainer = make_trainer("transformers", tmp_path, report_to=report_to)
        assert isinstance(trainer, hftrainer.Trainer)
        assert isinstance(callback_of(trainer, kind), getattr(tracker_callbacks, name))
        assert integrations.get_reporting_integration_callbacks([report_to]) == [kind]
        assert issubclass(kind, transformers.TrainerCallback)
        trainer.remove_callback(kind)
        assert name not in kinds(trainer)
    finally:
        hftrainer.uninstall()
    assert getattr(integration_utils, name) is theirs
    assert integration_utils.INTEGRATION_TO_CALLBACK[report_to] is theirs


# ---- The others ------------------------------------------------------------------------------------------------------


def project_of_its_own(kind):
    class Own(kind):
        """Begins the run itself, as the documentation of `setup` proposes."""

        def setup(self, args, state, model, **kwargs):
            self._wandb.init(project="mine", name="by setup")
            super().setup(args, state, model, **kwargs)
            self._wandb.config.update({"more": 1})

        def on_evaluate(self, args, state, control, **kwargs):
            self._wandb.log({"samples": state.global_step})

    return Own


def wandb_run(trainer, folder):
    """Curves, configuration, and names of the run that a training writes."""
    import wandb

    trainer.train()
    wandb.finish()
    wandb.teardown()
    found = {"history": [], "config": {}, "run": []}
    for record in wandb_records(folder):
        kind = record.WhichOneof("record_type")
        if kind == "history":
            found["history"].append(wandb_items(record.history.item))
        elif kind == "config":
            found["config"] |= wandb_items(record.config.update)
        elif kind == "run":
            found["run"] = [record.run.project, record.run.display_name]
    config = found["config"]
    return found["history"], {name: config.get(name) for name in ("more", "learning_rate", "hidden_size")}, found["run"]


def replaced(trainer, kind):
    callbacks = trainer.callback_handler.callbacks
    place = next(i for i, callback in enumerate(callbacks) if isinstance(callback, kind))
    callbacks[place] = project_of_its_own(kind)()


def set_up_before(trainer, kind):
    callback = callback_of(trainer, kind)
    assert callback._initialized is False
    callback.setup(trainer.args, trainer.state, trainer.model, reinit=False)
    assert callback._initialized is True
    callback._wandb.config.update({"more": 2}, allow_val_change=True)


def patched_log(trainer, kind):
    def on_log(self, args, state, control, model=None, logs=None, **kwargs):
        self._wandb.log({"only": state.global_step})

    callback = callback_of(trainer, kind)
    callback.on_log = types.MethodType(on_log, callback)


@pytest.mark.parametrize("shape", [replaced, set_up_before, patched_log])
def test_wandb(tmp_path, monkeypatch, shape):
    found = {}
    for library in LIBRARIES:
        (tmp_path / library).mkdir()
        monkeypatch.setenv("WANDB_DIR", str(tmp_path / library))
        trainer = make_trainer(library, tmp_path / library, report_to="wandb", run_name="a-run")
        shape(trainer, kind_of(library, "WandbCallback"))
        found[library] = wandb_run(trainer, tmp_path / library)
    assert found["hftrainer"] == found["transformers"]
    assert found["hftrainer"][0]
    if shape is replaced:
        assert found["hftrainer"][2] == ["mine", "by setup"]


def test_wandb_switched_off(tmp_path):
    """A script that takes the module away gets no run."""
    import wandb

    trainer = make_trainer("hftrainer", tmp_path, report_to="wandb")
    callback_of(trainer, tracker_callbacks.WandbCallback)._wandb = None
    trainer.train()
    assert wandb.run is None


def test_mlflow(tmp_path):
    """The module, what `setup` leaves behind, and the run."""
    found = {}
    for library in LIBRARIES:
        import mlflow

        mlflow.set_tracking_uri(mlflow_database(tmp_path / f"{library}.db"))
        trainer = make_trainer(library, tmp_path / library, report_to="mlflow", run_name="a-run")
        callback = callback_of(trainer, kind_of(library, "MLflowCallback"))
        callback.setup(trainer.args, trainer.state, trainer.model)
        callback._ml_flow.log_param("mine", 3)
        states = [callback._initialized, callback._auto_end_run, callback._log_artifacts]
        callback._auto_end_run = False
        trainer.train()
        states.append(callback._ml_flow.active_run() is not None)
        run = mlflow.get_run(mlflow.last_active_run().info.run_id)
        found[library] = states, run.data.params["mine"], run.info.run_name
        mlflow.end_run()
    assert found["hftrainer"] == found["transformers"]
    assert found["hftrainer"][0] == [True, True, False, True]


def test_comet(tmp_path, monkeypatch):
    import comet_ml

    for library in LIBRARIES:
        monkeypatch.setenv("COMET_OFFLINE_DIRECTORY", str(tmp_path / library))
        trainer = make_trainer(library, tmp_path / library, report_to="comet_ml")
        callback = callback_of(trainer, kind_of(library, "CometCallback"))
        assert callback._experiment is None
        trainer.train()
        assert callback._initialized
        assert callback._experiment.get_key() == comet_ml.get_running_experiment().get_key()
        comet_ml.get_running_experiment().end()


def test_in_a_list_without_its_trainer(tmp_path):
    """One that a script has put there by hand has no Trainer to ask: it saves what it is given."""
    trainer = make_trainer("hftrainer", tmp_path / "run", max_steps=2)
    folders = []

    class Tracker:
        logger = CSVLogger(str(tmp_path))

        def begin(self, model, state):
            pass

        log = predicted = lambda self, *args: None

        def saved(self, checkpoint, state):
            folders.append(checkpoint)

        def end(self, model, state, save_model):
            (tmp_path / "saved").mkdir()
            save_model(str(tmp_path / "saved"))

    trainer.args.save_strategy = type(trainer.args.save_strategy)("steps")
    trainer.args.save_steps = 2
    trainer.callback_handler.callbacks.append(ReportingCallback([Tracker()]))
    trainer.train()
    assert folders == [str(tmp_path / "run" / "checkpoint-2")]
    saved = type(trainer.model).from_pretrained(tmp_path / "saved")
    for name, tensor in saved.state_dict().items():
        assert torch.equal(tensor, trainer.model.state_dict()[name])
