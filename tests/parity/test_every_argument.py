"""No row of the table is untested: each argument is given another value than its default, and something changes.

`mapped` and `handled` arguments must change what a tiny run leaves behind, or what it was built with; `inert` ones must
change nothing; `planned` and `refused` ones are refused (`tests/api`).
"""

import dataclasses
import importlib
import json
import logging
import shlex
import warnings

import pytest
import torch

import hftrainer
import hftrainer.errors
from hftrainer.arguments.legacy import LegacyArguments
from hftrainer.arguments.resolved import ResolvedArguments
from hftrainer.arguments.table import TABLE, check_supported, make_plan
from tests.support.arguments import DEFAULTS, HANDLED
from tests.support.parity import accuracy, make_recorder, record
from tests.support.tiny import make_plain, plain_data

LEGACY = {field.name for field in dataclasses.fields(LegacyArguments)}

# Where a run on this machine is the same either way, the test that shows the effect:
ELSEWHERE = {
    "average_tokens_across_devices": "tests/distributed/test_training.py::test_same_as_transformers",
    "save_on_interrupt": "tests/reliability/test_interruption.py::test_signal",
    "enable_jit_checkpoint": "tests/reliability/test_interruption.py::test_jit_checkpoint",
    "ignore_data_skip": "tests/parity/test_resume.py::test_ignore_data_skip",
    "restore_callback_states_from_checkpoint": "tests/parity/test_resume.py::test_callback_states",
    "debug": "tests/unit/test_debug_utils.py::test_underflow_overflow",
    "push_to_hub": "tests/parity/test_hub.py::test_strategies",
    "hub_model_id": "tests/parity/test_hub.py::test_strategies",
    "hub_strategy": "tests/parity/test_hub.py::test_strategies",
    "hub_token": "tests/reliability/test_hub.py::test_refused_at_the_start",
    "hub_private_repo": "tests/parity/test_hub.py::test_settings[private]",
    "hub_always_push": "tests/reliability/test_hub.py::test_saves_that_wait_for_their_turn",
    "hub_revision": "tests/parity/test_hub.py::test_settings[revision]",
    "logging_nan_inf_filter": "tests/parity/test_losses.py::test_nan_losses",
    "eval_accumulation_steps": "tests/parity/test_single_arguments.py::test_argument[eval-accumulation]",
    "log_on_each_node": "test_what_processes_write",
    "log_level_replica": "tests/unit/arguments/test_fields.py::test_log_levels",
    "save_on_each_node": "test_what_processes_write",
    "eval_use_gather_object": "tests/distributed/test_evaluation.py::test_gather_object",
    "eval_memmap_dir": "tests/unit/evaluation/test_evaluation.py::test_memory_mapped_predictions",
    "batch_eval_metrics": "tests/parity/test_evaluation.py::test_batch_eval_metrics",
    "bf16_full_eval": "tests/parity/test_evaluation.py::test_half_precision_evaluation",
    "fp16_full_eval": "tests/parity/test_evaluation.py::test_half_precision_evaluation",
    "length_column_name": "tests/parity/test_evaluation.py::test_lengths",
    "optim_target_modules": "tests/parity/test_optimizers.py::test_targets",
    **dict.fromkeys(
        """
        activation_checkpointing activation_checkpointing_kwargs gradient_checkpointing gradient_checkpointing_kwargs
        torch_compile torch_compile_backend torch_compile_mode use_liger_kernel liger_kernel_config neftune_noise_alpha
        """.split(),
        "tests/parity/test_model_changes.py",
    ),
    "auto_find_batch_size": "tests/parity/test_batch_size_that_fits.py",
    "torch_empty_cache_steps": "tests/parity/test_memory_and_speed.py::test_emptied_caches",
    "tf32": "tests/parity/test_precision.py::test_tf32",
    "optim": "the same numbers by other kernels: the optimizer's `fused` flag",
    "dataloader_pin_memory": "test_pinned_memory",
    "remove_unused_columns": "test_unused_columns",
    "run_name": "tests/parity/test_trackers.py::test_wandb",
    **dict.fromkeys(
        "project trackio_space_id trackio_bucket_id trackio_static_space_id".split(),
        "tests/lightning/test_loggers.py::test_callbacks_of_transformers",
    ),
}


def fingerprint(folder, settings) -> dict:
    args = hftrainer.TrainingArguments(**{"output_dir": str(folder), **DEFAULTS, **settings})
    recorder = make_recorder(hftrainer)
    model = make_plain()
    model.config = type("Config", (), {"use_cache": None})()
    data = plain_data()
    seen = []

    def metrics(prediction):
        seen.append((type(prediction.predictions).__name__, len(prediction.elements)))
        return {} if isinstance(prediction.predictions, list) else accuracy(prediction)

    given = {"train_dataset": data, "eval_dataset": data[:11], "callbacks": [recorder], "compute_metrics": metrics}
    trainer = hftrainer.Trainer(model, args, **given)
    level = logging.getLogger("hftrainer").getEffectiveLevel()
    importlib.import_module("transformers").logging.set_verbosity_warning()
    loader = trainer.get_train_dataloader()
    trained = trainer.train()
    left = record(trainer, recorder, folder)
    return {
        "logs": json.dumps(left.logs),
        "events": left.events,
        "files": left.files,
        "weights": [tensor.sum().item() for tensor in left.weights.values()],
        "metrics": sorted(trained.metrics),
        "seen": seen,
        "best": (trainer.state.best_metric, args.greater_is_better),
        "use_cache": model.config.use_cache,
        "level": level,
        "callbacks": trainer.callback_handler.callback_list,
        "fused": trainer.optimizer.defaults.get("fused"),
        "loader": (
            loader.num_workers,
            loader.prefetch_factor,
            loader.persistent_workers,
            loader.in_order,
            str(type(loader.multiprocessing_context).__name__),
            type(loader.collate_fn).__name__,
        ),
    }


def test_every_handled_argument_is_here():
    assert HANDLED.keys() == {name for name, row in TABLE.items() if row.kind == "handled"} - LEGACY - {
        field.name
        for field in dataclasses.fields(hftrainer.Seq2SeqTrainingArguments)
        if field.name not in {f.name for f in dataclasses.fields(hftrainer.TrainingArguments)}
    }


@pytest.mark.parametrize("name", sorted(HANDLED.keys() - ELSEWHERE.keys()))
def test_changes_something(tmp_path, name, capsys):
    value, also = HANDLED[name]
    default = {field.name: field.default for field in dataclasses.fields(hftrainer.TrainingArguments)}[name]
    assert value != default
    with_it = fingerprint(tmp_path / "with", {**also, name: value})
    without = fingerprint(tmp_path / "without", also)
    assert {key for key in with_it if with_it[key] != without[key]}
    again = fingerprint(tmp_path / "again", also)
    assert again == without  # so that what changed, changed for this


@pytest.mark.parametrize("name", sorted(name for name, row in TABLE.items() if row.kind == "inert"))
def test_inert_arguments_change_nothing(tmp_path, name):
    values = {int: 9, str: "something", type(None): "something"}
    default = getattr(hftrainer.TrainingArguments(), name)
    value = not default if isinstance(default, bool) else values[type(default)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        changed = fingerprint(tmp_path / "with", {name: value})
    assert changed == fingerprint(tmp_path / "without", {})


def test_what_processes_write(monkeypatch):
    for name, value in {"WORLD_SIZE": "4", "RANK": "2", "LOCAL_RANK": "0"}.items():  # the first of the second node
        monkeypatch.setenv(name, value)
    args = hftrainer.TrainingArguments()
    assert (args.should_log, args.should_save) == (True, False)
    args = hftrainer.TrainingArguments(log_on_each_node=False, save_on_each_node=True)
    assert (args.should_log, args.should_save) == (False, True)


def test_optimizer_kernels(tmp_path):
    fused = fingerprint(tmp_path / "a", {})["fused"], fingerprint(tmp_path / "b", {"optim": "adamw_torch"})["fused"]
    assert fused == (True, None)


def test_pinned_memory(tmp_path, monkeypatch):
    seen = []
    for pin in (True, False):
        args = hftrainer.TrainingArguments(str(tmp_path), dataloader_pin_memory=pin)
        trainer = hftrainer.Trainer(make_plain(), args, train_dataset=plain_data())
        # As on a GPU, where it matters; torch itself ignores it without one.
        monkeypatch.setattr(type(args), "device", property(lambda self: torch.device("cuda")), raising=True)
        seen.append(trainer.get_train_dataloader().pin_memory)
        monkeypatch.undo()
    assert seen == [True, False]


def test_unused_columns(tmp_path):
    rows = [{**sample, "extra": torch.ones(2)} for sample in plain_data()]
    for remove in (True, False):
        args = hftrainer.TrainingArguments(str(tmp_path), remove_unused_columns=remove, use_cpu=True)
        trainer = hftrainer.Trainer(make_plain(), args, train_dataset=rows)
        assert ("extra" in next(iter(trainer.get_train_dataloader()))) is not remove


# ---- Command lines of the documentation --------------------------------------------------------------------------

DOCUMENTED = [
    pytest.param(  # v4.1 and v4.15: run_translation, without what was for the script
        "--output_dir out --overwrite_output_dir --do_train --num_train_epochs 1 --per_device_train_batch_size 1",
        None,
        id="v4.1",
    ),
    pytest.param(
        "--output_dir out --learning_rate 3e-5 --warmup_steps 500 --adam_beta1 0.8 --adam_beta2 0.999 "
        "--adam_epsilon 1e-8 --weight_decay 3e-7 --lr_scheduler_type constant_with_warmup --fp16 --fp16_backend amp",
        None,
        id="v4.1-optimizer",
    ),
    pytest.param(
        "--output_dir out --per_device_train_batch_size 8 --gradient_accumulation_steps 2", None, id="v4.1-accumulation"
    ),
    pytest.param(
        "--output_dir out --lr_scheduler_type linear --learning_rate 3e-5 --warmup_steps 500", None, id="v4.1-scheduler"
    ),
    pytest.param(
        "--output_dir out --log_level warning --log_level_replica error --log_on_each_node 0", None, id="v4.15-logging"
    ),
    pytest.param("--output_dir out --fp16 --sharded_ddp", "fsdp='shard_grad_op'", id="v4.1-sharded"),
    pytest.param("--output_dir out --fp16 --fp16_backend apex --fp16_opt_level 01", None, id="v4.1-apex"),
    pytest.param("--output_dir out --debug", None, id="v4.1-debug"),
    pytest.param("--output_dir out --sharded_ddp simple", "fsdp='shard_grad_op'", id="v4.15-sharded"),
    pytest.param("--output_dir out --fsdp full_shard", "fsdp='full_shard'", id="v4.48-fsdp"),
    pytest.param("--output_dir out --fsdp 'full shard'", "fsdp='full shard' shards", id="v4.48-fsdp-space"),
]


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("parser", ["hftrainer", "transformers"])
@pytest.mark.parametrize(("line", "refused"), DOCUMENTED)
def test_documented_command_lines(tmp_path, monkeypatch, line, refused, parser):
    """They parse by either parser, and train, or are refused by name until this release's successors."""
    monkeypatch.chdir(tmp_path)
    library = importlib.import_module(parser)
    (args,) = library.HfArgumentParser(hftrainer.TrainingArguments).parse_args_into_dataclasses(shlex.split(line))
    args.max_steps, args.use_cpu, args.disable_tqdm = 2, True, True
    level = logging.getLogger("hftrainer").level
    try:
        if refused is not None:
            with pytest.raises(hftrainer.errors.UnsupportedArgument, match=refused):
                hftrainer.Trainer(make_plain(), args, train_dataset=plain_data())
            return
        assert hftrainer.Trainer(make_plain(), args, train_dataset=plain_data()).train().global_step == 2
    finally:
        logging.getLogger("hftrainer").setLevel(level)
        importlib.import_module("transformers").logging.set_verbosity_warning()


def test_nothing_unsupported_in_the_neutral_arguments():
    args = hftrainer.TrainingArguments(use_cpu=True)
    assert not check_supported(ResolvedArguments(args))
    assert make_plan(ResolvedArguments(args)).precision == "32-true"
