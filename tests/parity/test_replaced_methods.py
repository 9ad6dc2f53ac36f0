"""Whatever transformers calls is called, wherever it was replaced: as often, and between the same events."""

import functools
import tempfile
from pathlib import Path

import accelerate
import pytest
import transformers

import hftrainer
from hftrainer.training.accelerator import EngineAccelerator
from tests.support.differences import NOT_CALLED_ALIKE
from tests.support.methods import WAYS, Calls, methods_of, run

#: Who runs backward follows from these, so each is replaced in a run of its own too.
DECIDE = {
    "trainer": ("training_step", "_prepare_context_parallel_inputs"),
    "accelerator": ("backward", "no_sync"),
}
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
ACCELERATOR = """
    backward clip_grad_norm_ free_memory gather gather_for_metrics no_sync pad_across_processes prepare
    prepare_data_loader prepare_model prepare_optimizer unscale_gradients unwrap_model
""".split()


@functools.cache
def calls_of(library: str, way: str, names: frozenset[str]) -> tuple[Calls, list[str]]:
    with tempfile.TemporaryDirectory() as folder:
        return run(library, way, set(names), Path(folder))


def ours_can(way: str) -> frozenset[str]:
    if way == "accelerator":
        return frozenset(methods_of(EngineAccelerator) & methods_of(accelerate.Accelerator))
    return frozenset(methods_of(hftrainer.Trainer))


def theirs(way: str) -> tuple[Calls, list[str]]:
    if way == "accelerator":
        return calls_of("transformers", way, ours_can(way))
    return calls_of("transformers", "class", frozenset(methods_of(transformers.Trainer)))


def ours(way: str, name: str) -> tuple[Calls, list[str]]:
    """The calls of a method, when all are replaced that do not decide who runs backward; else it alone."""
    deciding = {each for names in DECIDE.values() for each in names}
    return calls_of("hftrainer", way, frozenset({name}) if name in deciding else ours_can(way) - deciding)


CASES = [*((way, name) for way in WAYS for name in TRAINER), *(("accelerator", name) for name in ACCELERATOR)]


@pytest.mark.parametrize(("way", "name"), [case for case in CASES if case[1] not in NOT_CALLED_ALIKE])
def test_replaced_method_is_called_alike(way, name):
    (their_calls, their_events), (our_calls, our_events) = theirs(way), ours(way, name)
    print(f"{way} {name}: {len(our_calls.get(name, []))} calls, as {len(their_calls[name])}")
    assert our_calls.get(name, []) == their_calls[name]
    assert our_events == their_events


@pytest.mark.parametrize(("way", "names"), [("class", TRAINER), ("accelerator", ACCELERATOR)])
def test_table_is_what_transformers_calls(way, names):
    called, _ = theirs(way)
    assert sorted(called) == sorted(names)


def test_all_replaced_at_once():
    """The run is the same when its methods are replaced, though others are called for it."""
    events = {tuple(calls_of("hftrainer", way, ours_can(way))[1]) for way in (*WAYS, "accelerator")}
    assert events == {tuple(theirs("class")[1])}


@pytest.mark.parametrize("name", [name for name in NOT_CALLED_ALIKE if name not in ACCELERATOR])
def test_ledger_of_calls_is_needed(name):
    if name in TRAINER:
        assert ours("class", name)[0].get(name, []) != theirs("class")[0][name]
    else:
        assert ours("class", name)[0].get(name, []) and name not in theirs("class")[0]
