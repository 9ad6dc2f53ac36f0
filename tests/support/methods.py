"""Which methods of a Trainer and its accelerator a run calls, how often, and between which events."""

import contextlib
import functools
import importlib
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.support.parity import build
from tests.support.tiny import make_plain

#: Ways of putting a function in the place of a method.
WAYS = ("class", "subclass", "instance")
#: Name → for each call the number of events that had been announced before it.
Calls = dict[str, list[int]]
#: A run that reads, steps, accumulates, logs, evaluates, saves and loads its best model.
SETTINGS: dict[str, Any] = {
    "num_train_epochs": 2,
    "gradient_accumulation_steps": 3,
    "eval_strategy": "steps",
    "eval_steps": 3,
    "save_strategy": "steps",
    "save_steps": 3,
    "load_best_model_at_end": True,
    "metric_for_best_model": "loss",
    "trainer": {"model_init": make_plain},
}


def calling(original: Callable[..., Any], note: Callable[[], None]) -> Callable[..., Any]:
    """A function that notes each call, and passes it on."""

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        note()
        return original(*args, **kwargs)

    return replacement


def in_class(kind: type, name: str, note: Callable[[str], None]) -> Any:
    """What stands in for a method in a class."""
    replacement = calling(getattr(kind, name), functools.partial(note, name))
    return staticmethod(replacement) if isinstance(inspect.getattr_static(kind, name), staticmethod) else replacement


def methods_of(kind: type) -> set[str]:
    """The methods that can be replaced."""
    return {
        name
        for name in dir(kind)
        if inspect.isroutine(getattr(kind, name)) and not (name.startswith("__") and name.endswith("__"))
    }


@contextlib.contextmanager
def patched(kind: type, names: set[str], note: Callable[[str], None]) -> Iterator[None]:
    """The class itself with replaced methods, as libraries that speed training up do it."""
    before = {name: vars(kind).get(name) for name in names}
    for name in names:
        setattr(kind, name, in_class(kind, name, note))
    try:
        yield
    finally:
        for name, own in before.items():
            if own is None:
                delattr(kind, name)
            else:
                setattr(kind, name, own)


def use(trainer: Any, folder: Path) -> None:
    """Train, evaluate, predict, save, and go on from the middle of an epoch."""
    trainer.train()
    trainer.evaluate()
    trainer.predict(trainer.eval_dataset)
    trainer.save_model()
    trainer.save_state()
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-6"))


def run(library: str, way: str, names: set[str], folder: Path) -> tuple[Calls, list[str]]:
    """Train, evaluate, predict, save, and go on from the middle of an epoch; the calls, and the events."""
    kind = importlib.import_module(library).Trainer
    calls: Calls = {}
    events: list[Any] = []

    def note(name: str) -> None:
        calls.setdefault(name, []).append(len(events))

    made = type("Own", (kind,), {name: in_class(kind, name, note) for name in names}) if way == "subclass" else kind
    with patched(kind, names, note) if way == "class" else contextlib.nullcontext():
        trainer, recorder = build(library, "plain", folder, trainer_class=lambda _: made, **SETTINGS)
        events = recorder.events
        calls.clear()  # construction is another story: accelerate is built there
        if way in ("instance", "accelerator"):
            holder = trainer if way == "instance" else trainer.accelerator
            for name in names:
                setattr(holder, name, calling(getattr(holder, name), functools.partial(note, name)))
        use(trainer, folder)
    return calls, [event[0] for event in events]


#: What transformers 5.23 calls when a Trainer trains, evaluates, predicts, saves and resumes.
TRAINER = """
    _clip_grad_norm _determine_best_metric _evaluate _finalize_training _finish_current_push
    _get_collator_with_removed_columns _get_dataloader _get_eval_sampler _get_grad_norm _get_learning_rate
    _get_num_items_in_batch _get_output_dir _get_train_sampler _has_mixed_mesh_grads _hp_search_setup
    _init_training_state _inner_training_loop _issue_warnings_after_load _load_best_model _load_callback_state
    _load_from_checkpoint _load_optimizer_and_scheduler _load_rng_state _load_scaler _maybe_log_save_evaluate
    _move_model_to_device _prepare_context_parallel_inputs _prepare_for_training _prepare_input _prepare_inputs
    _report_to_hp_search _run_epoch _save _save_checkpoint _save_optimizer_and_scheduler _save_rng_state _save_scaler
    _set_signature_columns_if_needed _track_num_input_tokens _wrap_model autocast_smart_context_manager
    call_model_init compute_loss compute_loss_context_manager create_optimizer create_scheduler evaluate
    evaluation_loop floating_point_ops get_batch_samples get_cp_size get_decay_parameter_names get_eval_dataloader
    get_optimizer_cls_and_kwargs get_sp_size get_test_dataloader get_total_train_batch_size get_tp_size
    get_train_dataloader is_local_process_zero is_world_process_zero log num_examples predict prediction_step
    save_model save_state set_initial_training_values store_flos train training_step
""".split()


def count_calls(kind, name):
    """A list that gets an entry for each call of a method of the class."""
    calls, original = [], getattr(kind, name)

    def counted(*args, **kwargs):
        calls.append(name)
        return original(*args, **kwargs)

    setattr(kind, name, counted)
    return calls
