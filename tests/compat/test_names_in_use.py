"""Every name that libraries use: overridden it is called, set it counts, read it has the value, as in transformers.

`pytest -s` prints the table.
"""

import copy
import dataclasses
import functools
import importlib
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn

import hftrainer
from hftrainer.arguments import behaviours
from hftrainer.cli import install
from hftrainer.errors import UnsupportedArgument
from hftrainer.search.ray_search import RaySearch
from tests.compat.names_in_use import ABSENT, IN_USE
from tests.support.hub_runs import hub as hub
from tests.support.hub_runs import make_pushing
from tests.support.methods import SETTINGS, in_class, use
from tests.support.parity import EVENTS, LIBRARIES, accuracy, alike, assert_equal, build, comparable
from tests.support.tiny import make_bert, make_plain, plain_data

pytestmark = pytest.mark.usefixtures("as_installed")


@pytest.fixture(scope="module")
def as_installed():
    """Ours follows the installed release, as after `install()`: these tests compare with it."""
    release = behaviours.installed_release()
    behaviours.follow(release)
    install._set_defaults(behaviours.earlier_defaults(release))
    yield
    install.uninstall()


# ---- Methods: overridden in a subclass, called as often and between the same events ----------------------------------


def run_plainly(kind: type, library: Any, folder: Path) -> list[Any]:
    """Construct, train, evaluate, predict, save, go on from a checkpoint, and end."""
    trainer, recorder = build(library.__name__, "plain", folder, trainer_class=lambda _: kind, **SETTINGS)
    trainer.add_callback(type("Further", (library.TrainerCallback,), {}))
    trainer.pop_callback(library.PrinterCallback)
    trainer.remove_callback(library.EarlyStoppingCallback)
    use(trainer, folder)
    if is_there("end"):
        trainer.end()
    return recorder.events


def run_on_datasets(kind: type, library: Any, folder: Path) -> list[Any]:
    """`datasets.Dataset`, and a batch size to be found."""
    from datasets import Dataset

    data = [{"x": sample["x"].tolist(), "labels": int(sample["labels"]), "text": "?"} for sample in plain_data()]
    trainer, recorder = build(
        library.__name__,
        "plain",
        folder,
        trainer_class=lambda _: kind,
        auto_find_batch_size=True,
        trainer={"train_dataset": Dataset.from_list(data), "eval_dataset": Dataset.from_list(data[:9])},
    )
    trainer.train()
    trainer.evaluate()
    return recorder.events


def run_mixed_gradients(kind: type, library: Any, folder: Path) -> list[Any]:
    """Gradients that a subclass says are on several meshes."""
    trainer, recorder = build(library.__name__, "plain", folder, trainer_class=lambda _: kind, max_steps=2)
    trainer._mixed_mesh_grads = True
    trainer.train()
    return recorder.events


def run_search(kind: type, library: Any, folder: Path) -> list[Any]:
    """Two trials."""
    trainer, recorder = build(
        library.__name__,
        "plain",
        folder,
        trainer_class=lambda _: kind,
        eval_strategy="epoch",
        trainer={"model_init": make_plain},
    )
    trainer.hyperparameter_search(
        lambda trial: {"learning_rate": trial.suggest_float("learning_rate", 1e-3, 1e-2)}, n_trials=2, backend="optuna"
    )
    return recorder.events


PLAIN = """
    _clip_grad_norm _determine_best_metric _evaluate _get_collator_with_removed_columns _get_dataloader
    _get_eval_sampler _get_grad_norm _get_learning_rate _get_output_dir _get_train_sampler _has_mixed_mesh_grads
    _hp_search_setup _inner_training_loop _issue_warnings_after_load _load_best_model _load_from_checkpoint
    _load_optimizer_and_scheduler _load_rng_state _maybe_log_save_evaluate _prepare_context_parallel_inputs
    _prepare_for_training _prepare_inputs _run_epoch _save _save_checkpoint _set_signature_columns_if_needed _wrap_model
    add_callback call_model_init compute_loss compute_loss_context_manager create_accelerator_and_postprocess
    create_optimizer end evaluate evaluation_loop get_batch_samples get_cp_size
    get_decay_parameter_names get_eval_dataloader get_optimizer_cls_and_kwargs get_sp_size get_test_dataloader
    get_total_train_batch_size get_tp_size get_train_dataloader is_world_process_zero log pop_callback prediction_step
    remove_callback save_model store_flos train training_step
""".split()
#: Scenario → names of methods that it calls in transformers.
SCENARIOS: dict[Any, list[str]] = {
    run_plainly: PLAIN,
    run_on_datasets: ["_remove_unused_columns", "_update_auto_batch_size"],
    run_mixed_gradients: ["_mixed_mesh_grad_norm"],
    run_search: ["hyperparameter_search", "_hp_search_setup", "call_model_init", "_get_output_dir"],
}
#: Both are asked for in other places too: transformers calls them for its log, and ours for its choices.
OFTENER = {"is_world_process_zero": "who writes", "create_accelerator_and_postprocess": "a trial"}


@functools.cache
def calls_of(library_name: str, scenario: Any, deciding: bool) -> dict[str, list[int]]:
    """Method → for each call the number of events before it, all methods of a scenario being overridden at once.

    Args:
        library_name: whose Trainer.
        scenario: what is done with it.
        deciding: override those alone that decide who runs backward.
    """
    library, calls = importlib.import_module(library_name), {}
    events = [0]

    def note(name: str) -> None:
        calls.setdefault(name, []).append(events[0])

    chosen = [name for name in SCENARIOS[scenario] if (name in DECIDING) is deciding and is_there(name)]
    kind = type("Own", (library.Trainer,), {name: in_class(library.Trainer, name, note) for name in chosen})
    original = library.trainer_callback.CallbackHandler.call_event

    def count(handler, event, *args, **kwargs):
        events[0] += event in EVENTS
        return original(handler, event, *args, **kwargs)

    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(library.trainer_callback.CallbackHandler, "call_event", count)
        scenario(kind, library, Path(folder))
    return calls


DECIDING = {"training_step", "_prepare_context_parallel_inputs"}


def is_there(name: str) -> bool:
    """Whether the installed transformers has a method."""
    return hasattr(transformers.Trainer, name)


#: Runs of v4.48 call these at other events, which are those of a resumed run with a ragged last window: see the ledger.
AT_OTHER_EVENTS = """
    _get_output_dir _issue_warnings_after_load _load_best_model _load_optimizer_and_scheduler _load_rng_state
    _maybe_log_save_evaluate log store_flos
""".split()
METHODS = [
    pytest.param(
        scenario,
        name,
        marks=[pytest.mark.newest_peer]
        if not is_there(name) or (scenario is run_plainly and name in AT_OTHER_EVENTS)
        else [],
    )
    for scenario, names in SCENARIOS.items()
    for name in names
]


def show(name: str, how: str) -> None:
    print(f"| `{name}` | {how} |")


@pytest.mark.parametrize(("scenario", "name"), METHODS, ids=lambda value: getattr(value, "__name__", value))
def test_overridden_method_is_called_at_the_same_events(scenario, name):
    theirs, ours = (calls_of(each, scenario, name in DECIDING).get(name, []) for each in LIBRARIES)
    assert theirs, f"transformers does not call {name} in {scenario.__name__}: this compares nothing"
    if name in OFTENER:
        assert ours
    else:
        assert ours == theirs
    show(name, f"overridden: {len(ours)} calls in {scenario.__name__}, as in transformers")


@pytest.mark.parametrize("name", ["_push_from_checkpoint", "push_to_hub", "init_hf_repo", "create_model_card"])
def test_overridden_method_of_uploads(hub, tmp_path, name):
    found = {}
    announces_uploads = hasattr(transformers.TrainerCallback, "on_push_begin")
    for library_name in LIBRARIES:
        events: list[str] = []
        library = importlib.import_module(library_name)
        kind = type("Own", (library.Trainer,), {name: in_class(library.Trainer, name, events.append)})
        trainer, callback = make_pushing(
            library_name, tmp_path / library_name, trainer_class=lambda _, kind=kind: kind, hub_model_id=library_name
        )
        for event in ("on_save", "on_train_end", *(["on_push_begin"] if announces_uploads else [])):
            method = getattr(callback, event)
            setattr(callback, event, lambda *a, m=method, e=event, s=events, **k: (s.append(e), m(*a, **k))[1])
        trainer.train()
        trainer.push_to_hub()
        found[library_name] = events
    assert found["hftrainer"] == found["transformers"]
    assert name in found["hftrainer"]
    show(name, f"overridden: {found['hftrainer'].count(name)} calls, as in transformers")


# ---- Attributes that are read: the same value at every event --------------------------------------------------------

READ = """
    accelerator args callback_handler can_return_loss compute_loss_func control current_flos
    current_gradient_accumulation_steps data_collator deepspeed eval_dataset gather_function hp_name hp_search_backend
    hub_model_id is_deepspeed_enabled is_distributed_loading_by_transformers is_fsdp_enabled is_in_train label_names
    label_smoother loss_is_scaled_for_ga lr_scheduler model model_accepts_loss_kwargs model_init model_preparation_time
    model_wrapped neftune_hook_handle neftune_noise_alpha optimizer optimizer_cls_and_kwargs processing_class state
    train_dataset _eval_dataloaders _globalstep_last_logged _initial_global_step _loss_shifts_labels _memory_tracker
    _mixed_mesh_grads _signature_columns _total_loss_scalar _tr_loss _train_batch_size _trial
""".split()
_MISSING = "not there"


def plain_value(name: str, value: Any) -> Any:
    """A value as far as two libraries can have it in common."""
    if name == "state":
        state = {key: each for key, each in dataclasses.asdict(value).items() if key != "stateful_callbacks"}
        best = value.best_model_checkpoint and Path(value.best_model_checkpoint).name
        return state | {"log_history": comparable(value.log_history), "best_model_checkpoint": best}
    if name == "control":
        return dataclasses.asdict(value)
    if name == "_signature_columns" and value is not None:
        return sorted(set(value))
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return sorted(map(str, value))
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return len(value)
    if value is None or isinstance(value, (bool, int, list, str)):
        return value
    if isinstance(value, float):
        return "measured" if name == "model_preparation_time" else value
    return "an object"


@functools.cache
def values_of(library_name: str) -> dict[str, list[Any]]:
    """Attribute → its values when the Trainer is made, at each event, and at the end."""
    library, seen = importlib.import_module(library_name), {name: [] for name in READ}

    def look(trainer: Any, event: str) -> None:
        for name in READ:
            value = getattr(trainer, name, _MISSING)
            seen[name].append((event, value if value is _MISSING else plain_value(name, value)))

    def handler(event: str):
        return lambda self, args, state, control, **kwargs: look(self.trainer, event)

    looks = {event: handler(event) for event in EVENTS if event != "on_init_end"}
    with tempfile.TemporaryDirectory() as folder:
        settings = {**SETTINGS, "dataloader_num_workers": 1, "dataloader_persistent_workers": True}
        trainer, _ = build(library_name, "bert", Path(folder), neftune_noise_alpha=5.0, **without_model(settings))
        callback = type("Looks", (library.TrainerCallback,), looks)()
        callback.trainer = trainer
        trainer.add_callback(callback)
        look(trainer, "made")
        trainer.train()
        trainer.evaluate()
        look(trainer, "end")
    return seen


def without_model(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name != "trainer"}


#: Until v4.48 the last log line is no part of training, and the state has fewer fields.
READ_NOW = [pytest.param(n, marks=[pytest.mark.newest_peer] if n in ("is_in_train", "state") else []) for n in READ]


@pytest.mark.parametrize("name", READ_NOW)
def test_attribute_has_the_same_value_at_each_event(name):
    theirs, ours = (values_of(library)[name] for library in LIBRARIES)
    assert [event for event, _ in ours] == [event for event, _ in theirs]
    compared = [pair for pair in zip(ours, theirs, strict=True) if pair[1][1] != _MISSING]
    different = [(mine, other) for mine, other in compared if mine != other]
    assert not different, different[:3]
    values = {str(value) for _, value in ours}
    show(name, f"read: the same at {len(compared)} of {len(ours)} events, {len(values)} values")


# ---- Attributes that are set: they count ---------------------------------------------------------------------------


class Doubled(nn.Module):
    """The model, with a loss of twice the size."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs):
        return {**self.model(**inputs), "loss": 2 * self.model(**inputs)["loss"]}


def summed(outputs, labels, num_items_in_batch=None):
    logits = outputs["logits"]
    loss = nn.functional.cross_entropy(logits, labels, reduction="sum")
    return loss / (num_items_in_batch if num_items_in_batch is not None else len(labels))


def reset_log(trainer):
    """As TRL's trainers do when they have logged by themselves."""
    trainer._total_loss_scalar += trainer._tr_loss.item()
    trainer._globalstep_last_logged = trainer.state.global_step
    trainer._tr_loss -= trainer._tr_loss


def renewed_loss(trainer):
    trainer._tr_loss = torch.full_like(trainer._tr_loss, 7.0)


def no_flos(trainer):
    trainer.current_flos = 1000.0


def own_handler(trainer):
    """A handler of a subclass, in the place of the Trainer's."""
    old = trainer.callback_handler

    class Quiet(type(old)):
        def on_log(self, args, state, control, logs=None, **kwargs):
            if logs is not None:
                logs["seen"] = len(state.log_history)
            return super().on_log(args, state, control, logs, **kwargs)

    trainer.callback_handler = Quiet(
        old.callbacks, trainer.model, trainer.processing_class, trainer.optimizer, trainer.lr_scheduler
    )


def wrapped_handler(trainer):
    """A method of the handler, wrapped on the instance: it logs beside, and leaves the flags to what it wraps."""
    handler = trainer.callback_handler
    for event in EVENTS:
        original = getattr(handler, event)

        def wrapper(args, state, control, *given, original=original, event=event, **kwargs):
            before = dataclasses.asdict(control)
            result = original(args, state, control, *given, **kwargs)
            state.log_history.append({"event": event, "before": before, "after": dataclasses.asdict(result)})
            return result

        setattr(handler, event, wrapper)


def half_batches(trainer):
    trainer._train_batch_size = 2


def assign(**values):
    def change(trainer):
        for name, value in values.items():
            setattr(trainer, name, value(trainer) if callable(value) and value.__name__ == "<lambda>" else value)

    return change


def made_optimizer(trainer):
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.5)
    trainer.lr_scheduler = torch.optim.lr_scheduler.StepLR(trainer.optimizer, 2)


def smoother(trainer):
    module = importlib.import_module(f"{type(trainer).__base__.__module__.partition('.')[0]}.trainer_pt_utils")
    trainer.label_smoother = module.LabelSmoother(epsilon=0.3)


def other_control(trainer):
    trainer.control = dataclasses.replace(trainer.control, should_epoch_stop=True)


def advanced_state(trainer):
    trainer.state.global_step += 5


def other_args(trainer):
    trainer.args = copy.copy(trainer.args)
    trainer.args.learning_rate, trainer.args.weight_decay = 0.5, 0.0


def shuffled(trainer):
    trainer.data_collator = reverse


def reverse(samples):
    return {
        "x": torch.stack([each["x"] for each in samples]).flip(-1),
        "labels": torch.tensor([each["labels"] for each in samples]),
    }


MADE, STEP = "made", "on_step_end"
#: Name → when it is set, the setting, and arguments. What is compared: log lines, events, weights, predictions.
SET: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "label_names": (MADE, assign(label_names=lambda _: []), {"trainer": {}}),
    "can_return_loss": (MADE, assign(can_return_loss=True, label_names=lambda _: []), {"trainer": {}}),
    "model_accepts_loss_kwargs": (
        MADE,
        assign(model_accepts_loss_kwargs=False),
        {"gradient_accumulation_steps": 3, "model": "llama"},
    ),
    "compute_loss_func": (MADE, assign(compute_loss_func=summed), {"gradient_accumulation_steps": 3}),
    "loss_is_scaled_for_ga": (MADE, assign(loss_is_scaled_for_ga=True), {"gradient_accumulation_steps": 3}),
    "label_smoother": (MADE, smoother, {}),
    "_train_batch_size": (MADE, half_batches, {}),
    "optimizer": (MADE, made_optimizer, {}),
    "lr_scheduler": (MADE, made_optimizer, {}),
    "optimizer_cls_and_kwargs": (MADE, assign(optimizer_cls_and_kwargs=(torch.optim.SGD, {"lr": 0.1})), {}),
    "data_collator": (MADE, shuffled, {}),
    "train_dataset": (MADE, assign(train_dataset=lambda trainer: trainer.train_dataset[:11]), {}),
    "eval_dataset": (MADE, assign(eval_dataset=lambda trainer: trainer.train_dataset[:5]), {}),
    "model_init": (MADE, assign(model_init=make_plain), {}),
    "model_wrapped": (MADE, assign(model_wrapped=lambda trainer: Doubled(trainer.model)), {}),
    "callback_handler": (MADE, own_handler, {}),
    "callback_handler, its methods wrapped": (MADE, wrapped_handler, {}),
    "gather_function": (MADE, assign(gather_function=lambda trainer: trainer.accelerator.gather), {}),
    "args": (MADE, other_args, {}),
    "_globalstep_last_logged": (STEP, reset_log, {"logging_steps": 3}),
    "_total_loss_scalar": (STEP, assign(_total_loss_scalar=5.0), {}),
    "_tr_loss": (STEP, renewed_loss, {}),
    "current_flos": (STEP, no_flos, {}),
    "control": (STEP, other_control, {}),
    "state": (STEP, advanced_state, {}),
    "_mixed_mesh_grads": (MADE, assign(_mixed_mesh_grads=True), {}),
}


def outcome(library_name: str, folder: Path, name: str | None) -> Any:
    """What a run leaves when an attribute is set in it, or none."""
    library = importlib.import_module(library_name)
    when, change, settings = SET[name] if name is not None else (MADE, lambda trainer: None, {})

    class Own(library.Trainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            if when == MADE:
                change(self)

    given = {"trainer": {"compute_metrics": accuracy}, "eval_strategy": "epoch", "logging_steps": 2, **settings}
    model = given.pop("model", "plain")
    trainer, recorder = build(library_name, model, folder, trainer_class=lambda _: Own, **given)
    if when != MADE:

        class Sets(library.TrainerCallback):
            def on_step_end(self, args, state, control, **kwargs):
                if state.global_step == 4:
                    change(trainer)
                return trainer.control

        trainer.add_callback(Sets)
    output = trainer.train()
    weights = [value.tolist() for value in trainer.model.state_dict().values()]
    metrics = comparable([trainer.evaluate()])
    return comparable(trainer.state.log_history), recorder.events, output.training_loss, weights, metrics


@functools.cache
def plain_outcome() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        return outcome("hftrainer", Path(folder), None)


#: Not there in v4.48, or without effect.
SET_LATER = ("loss_is_scaled_for_ga", "_train_batch_size", "_globalstep_last_logged", "_tr_loss")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.newest_peer] if n in SET_LATER else []) for n in SET]
)
def test_attribute_that_is_set_counts(tmp_path, name):
    ours = alike(lambda library: outcome(library, tmp_path / library, name), assert_equal)
    changes = ours != plain_outcome() or name in ("gather_function", "_mixed_mesh_grads")
    assert changes, "setting it changes nothing: this compares nothing"
    show(name, f"set {'after __init__' if SET[name][0] == MADE else 'in a step'}: counts, as in transformers")


#: What a subclass may set in its `__init__` and finds again after each `train()` with a `model_init`.
KEPT = {
    "label_names": ["labels", "mine"],
    "can_return_loss": True,
    "model_accepts_loss_kwargs": False,
    "_signature_columns": ["input_ids", "attention_mask", "label", "labels", "mine"],
    "_loss_shifts_labels": True,
    "label_smoother": None,
    "place_model_on_device": False,
    "is_model_parallel": True,
    "compute_loss_func": None,
    "loss_is_scaled_for_ga": True,
    "neftune_noise_alpha": None,
    "_train_batch_size": 8,
}


def test_what_a_subclass_sets_survives_a_new_model(tmp_path):
    found = {}
    for library_name in LIBRARIES:
        library = importlib.import_module(library_name)

        class Own(library.Trainer):
            def __init__(self, *args, **kwargs):
                super().__init__(*args, **kwargs)
                for name, value in KEPT.items():
                    setattr(self, name, value)

        trainer, _ = build(
            library_name,
            "bert",
            tmp_path / library_name,
            trainer_class=lambda _, k=Own: k,
            trainer={"model_init": make_bert},
        )
        trainer.train()
        first = {name: getattr(trainer, name) for name in KEPT}
        trainer.train()
        found[library_name] = first, {name: getattr(trainer, name) for name in KEPT}
    assert found["hftrainer"] == found["transformers"]
    before = {} if behaviours.of(behaviours.installed_release()).keeps_batch_size else {"_train_batch_size": 4}
    assert found["hftrainer"][1] == KEPT | before


def test_an_array_that_a_subclass_sets_survives(tmp_path):
    trainer, _ = build("hftrainer", "plain", tmp_path, trainer={"model_init": make_plain})
    trainer.label_names = names = np.array(["labels", "others"])
    trainer.train()
    assert trainer.label_names is names


def test_a_handle_of_neftune_that_a_script_takes_away(tmp_path):
    class Own(hftrainer.Trainer):
        def training_step(self, *args, **kwargs):
            if self.neftune_hook_handle is not None:
                self.neftune_hook_handle.remove()
                self.neftune_hook_handle = None
            return super().training_step(*args, **kwargs)

    trainer, _ = build("hftrainer", "bert", tmp_path, trainer_class=lambda _: Own, neftune_noise_alpha=5.0, max_steps=2)
    assert trainer.train().global_step == 2


def test_what_nobody_has_set_follows_the_new_model(tmp_path):
    """A `model_init` may make models of several kinds; lists that a script has extended stay extended."""

    class Other(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 3)

        def forward(self, x, label_of_other=None, **kwargs):
            return {"loss": self.layer(x).sum()}

    made = [make_plain(), make_plain(), Other()]
    args = hftrainer.TrainingArguments(str(tmp_path), max_steps=1, use_cpu=True, report_to="none", save_strategy="no")
    trainer = hftrainer.Trainer(args=args, model_init=lambda: made.pop(0), train_dataset=plain_data())
    trainer.train()
    assert trainer.label_names == ["labels"] and not trainer.model_accepts_loss_kwargs
    trainer.train()
    assert trainer.label_names == ["label_of_other"] and trainer.model_accepts_loss_kwargs
    trainer._set_signature_columns_if_needed()
    assert "label_of_other" in trainer._signature_columns
    trainer.label_names.append("mine")
    made.append(make_plain())
    trainer.train()
    assert trainer.label_names == ["label_of_other", "mine"]


def look_at_trials(seen: list[Any], holder: list[Any]) -> Any:
    """A `model_init` that looks at what a search has set."""

    def model_init(trial):
        if trial is not None:
            trainer = holder[0]
            found = trainer.hp_space(trial), trainer.compute_objective({"eval_loss": 1.5}), trainer.hp_name(trial)
            seen.append((*found, str(trainer.hp_search_backend)))
        return make_plain()

    return model_init


def test_search_sets_what_it_searches_by(tmp_path):
    """`hp_space`, `compute_objective`, `hp_name`, `hp_search_backend` and `objective` during a search and after it."""
    found = {}
    for library_name in LIBRARIES:
        seen: list[Any] = []
        holder: list[Any] = []
        given = {"model_init": look_at_trials(seen, holder)}
        trainer, _ = build(library_name, "plain", tmp_path / library_name, trainer=given)
        holder.append(trainer)
        seen.append([hasattr(trainer, name) for name in ("hp_space", "compute_objective")])
        trainer.hyperparameter_search(
            lambda trial: {"seed": trial.suggest_int("seed", 3, 3)},
            lambda metrics: metrics["eval_loss"] * 2,
            n_trials=1,
            hp_name=lambda trial: f"trial {trial.number}",
        )
        seen.append((trainer.hp_search_backend, trainer.compute_objective({"eval_loss": 1}), trainer.objective))
        found[library_name] = seen
    assert found["hftrainer"] == found["transformers"]
    for name in ("hp_space", "compute_objective", "hp_name", "hp_search_backend", "objective"):
        show(name, "set by a search, as in transformers")


# ---- What is not there, and the whole table -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ABSENT)
def test_absent_name(tmp_path, name):
    """Nobody who overrides it is ignored in silence, and reading it is an error."""
    args = hftrainer.TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    assert not hasattr(hftrainer.Trainer(make_plain(), args), name)
    kind = type("Own", (hftrainer.Trainer,), {name: lambda self, **kwargs: {}})
    if name == "_build_accelerator_args":
        with pytest.raises(UnsupportedArgument, match="_build_accelerator_args is never called"):
            kind(make_plain(), args)
    elif name in ("_defer_fsdp_gradient_reduction", "_sync_replicated_trainable_parameters"):
        model = make_plain()
        kind(model, args)
        model.is_distributed_loading_by_transformers = True
        with pytest.raises(UnsupportedArgument, match=f"{name} is never called"):
            kind(model, args)
    show(name, f"not there: {ABSENT[name]}")


def test_a_checkpoint_for_ray_that_a_subclass_overrides(tmp_path, monkeypatch):
    args = hftrainer.TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    monkeypatch.setattr(RaySearch, "is_available", lambda: True)
    kind = type("Own", (hftrainer.Trainer,), {"_tune_save_checkpoint": lambda self, checkpoint_dir: None})
    with pytest.raises(UnsupportedArgument, match="_tune_save_checkpoint is never called"):
        kind(args=args, model_init=make_plain).hyperparameter_search(backend="ray")
    show("_tune_save_checkpoint", "a subclass that overrides it is refused in a search with Ray")


#: Names with a test of their own → where.
ELSEWHERE = {
    "__init__": "test_what_a_subclass_sets_survives_a_new_model",
    "objective": "test_search_sets_what_it_searches_by",
    "hp_space": "test_search_sets_what_it_searches_by",
    "compute_objective": "test_search_sets_what_it_searches_by",
    "push_in_progress": "tests/parity/test_hub.py",
    "_push_from_checkpoint": "test_overridden_method_of_uploads",
    "push_to_hub": "test_overridden_method_of_uploads",
    "create_model_card": "test_overridden_method_of_uploads",
    "_past": "of v4: tests/parity/test_older_code.py",
    "_tune_save_checkpoint": "test_a_checkpoint_for_ray_that_a_subclass_overrides",
}


def test_every_name_is_covered():
    covered = (
        {method.values[1] for method in METHODS}
        | {name.partition(",")[0] for name in SET}
        | {*READ, *ELSEWHERE, *ABSENT}
    )
    assert sorted(set(IN_USE) - covered) == []
    for name, where in ELSEWHERE.items():
        assert where in globals() or Path(__file__).parents[2].joinpath(where.split(": ")[-1]).is_file(), name
        show(name, where)
