"""accelerate's global states after arguments and a Trainer: its loggers and helpers find what transformers leaves."""

import importlib
import logging
import os
import sys

import accelerate
import pytest
import torch
import transformers
from accelerate.logging import get_logger
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import broadcast_object_list, gather, gather_object

import hftrainer
from hftrainer.errors import InvalidArgument, UnsupportedArgument
from tests.support.parity import alike, assert_equal, build, train
from tests.support.tiny import make_plain, plain_data

PRECISIONS = ({}, {"bf16": True})


@pytest.fixture(autouse=True)
def no_state():
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def arguments(library, folder, **settings):
    return library.TrainingArguments(str(folder), use_cpu=True, report_to="none", **settings)


def whole_state():
    return {name: str(value) for name, value in AcceleratorState().__dict__.items()}


def test_state_of_the_arguments(tmp_path):
    found = []
    for library in (hftrainer, transformers):
        args = arguments(library, tmp_path)
        assert args.distributed_state.distributed_type == "NO"
        found.append(dict(PartialState().__dict__))
        with pytest.raises(ValueError, match="initialize your accelerator"):
            AcceleratorState()
    assert found[0] == found[1]


@pytest.mark.parametrize("settings", PRECISIONS)
def test_state_of_the_trainer(tmp_path, settings):
    """Every attribute that accelerate itself sets, with its value."""

    def run(name):
        trainer, _ = build(name, "plain", tmp_path / name, **settings)
        assert trainer.accelerator.state.mixed_precision == AcceleratorState().mixed_precision
        assert AcceleratorState().deepspeed_plugin is None
        assert not hasattr(AcceleratorState(), "fsdp_plugin")
        return whole_state()

    alike(run, assert_equal)


def test_helpers_of_accelerate(tmp_path, caplog):
    build("hftrainer", "plain", tmp_path)
    assert gather(torch.ones(2)).tolist() == [1.0, 1.0]
    assert gather_object([3]) == [3] and broadcast_object_list([4]) == [4]
    with caplog.at_level(logging.INFO):
        get_logger("a.library").info("seen", main_process_only=True)
    assert "seen" in caplog.text


def test_one_trainer_after_another(tmp_path):
    """Of two with other precisions the last one is told of, and then the one that trains."""
    first, _ = build("hftrainer", "plain", tmp_path / "a", bf16=True)
    assert AcceleratorState().mixed_precision == "bf16"
    build("hftrainer", "plain", tmp_path / "b")
    assert AcceleratorState().mixed_precision == "no"
    seen = []

    class Seeing(hftrainer.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            seen.append(AcceleratorState().mixed_precision)

    first.add_callback(Seeing)
    first.train()
    assert set(seen) == {"bf16"}


@pytest.mark.parametrize("library", [hftrainer, transformers], ids=lambda library: library.__name__)
def test_a_state_of_the_script_is_kept_when_asked(tmp_path, library):
    mine = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    arguments(library, tmp_path)
    assert not mine.state._shared_state.get("_mixed_precision")  # taken over, unless it is to be kept
    AcceleratorState._reset_state(reset_partial_state=True)
    mine = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    args = arguments(library, tmp_path, bf16=True, accelerator_config={"use_configured_state": True})
    assert mine.state.mixed_precision == "bf16"
    library.Trainer(make_plain(), args, train_dataset=plain_data())
    assert mine.state.mixed_precision == "bf16" and AcceleratorState().__dict__ is mine.state.__dict__


def test_a_kept_state_of_another_precision(tmp_path):
    accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    args = arguments(hftrainer, tmp_path, accelerator_config={"use_configured_state": True})
    with pytest.raises(InvalidArgument, match="mixed_precision='bf16', but the arguments ask for 'no'"):
        hftrainer.Trainer(make_plain(), args, train_dataset=plain_data())


def test_only_a_partial_state_of_the_script(tmp_path):
    before = PartialState(cpu=True).__dict__
    args = arguments(hftrainer, tmp_path, accelerator_config={"use_configured_state": True})
    hftrainer.Trainer(make_plain(), args, train_dataset=plain_data())
    assert PartialState().__dict__ is before and AcceleratorState().mixed_precision == "no"


def test_arguments_of_transformers(tmp_path):
    args = arguments(transformers, tmp_path)
    hftrainer.Trainer(make_plain(), args, train_dataset=plain_data())
    assert AcceleratorState().device == args.device and args.distributed_state.num_processes == 1


def test_accelerate_that_is_imported_later(tmp_path, processes):
    """In a script that has not imported it."""
    script = (
        "import hftrainer, logging, sys\n"
        f"hftrainer.TrainingArguments({str(tmp_path)!r}, use_cpu=True)\n"
        "from accelerate.logging import get_logger\n"
        "logging.basicConfig(level='INFO')\n"
        "get_logger('late').info('said')\n"
    )
    run = processes.run("-c", script, fresh=True)
    assert "INFO:late:" in run.stderr and "said" in run.stderr, run.stderr[-2000:]


def test_the_environment_and_the_threads_stay(tmp_path):
    before, threads = dict(os.environ), torch.get_num_threads()
    build("hftrainer", "plain", tmp_path)
    assert dict(os.environ) == before and torch.get_num_threads() == threads


def test_precision_that_a_script_sets(tmp_path):
    """It counts until the Trainer is made."""
    found = []
    for library in (hftrainer, transformers):
        args = arguments(library, tmp_path / library.__name__, max_steps=3, logging_steps=1)
        assert args.mixed_precision == "no"
        args.mixed_precision = "bf16"
        trainer = library.Trainer(make_plain(), args, train_dataset=plain_data())
        trainer.train()
        found.append([line["loss"] for line in trainer.state.log_history if "loss" in line])
        assert trainer.accelerator.mixed_precision == args.mixed_precision == "bf16"
    assert found[0] == found[1]
    assert (
        found[0] != [line["loss"] for line in train("hftrainer", "plain", tmp_path / "32").logs if "loss" in line][:3]
    )
    with pytest.raises(UnsupportedArgument, match="choose 'no', 'fp16' or 'bf16'"):
        arguments(hftrainer, tmp_path).mixed_precision = "fp8"


def test_one_gpu_as_scripts_ask_for_it(tmp_path):
    args = arguments(hftrainer, tmp_path)
    assert args._n_gpu == args.n_gpu == 0
    args._n_gpu = 1
    assert args.n_gpu == 1 and args.train_batch_size == args.per_device_train_batch_size
    with pytest.raises(UnsupportedArgument, match="several GPUs need one process each"):
        args._n_gpu = 2


@pytest.mark.parametrize("library", [hftrainer, transformers], ids=lambda library: library.__name__)
def test_devices_of_a_subclass(tmp_path, library):
    class Elsewhere(library.TrainingArguments):
        @property
        def _setup_devices(self):
            return torch.device("meta")

    args = Elsewhere(str(tmp_path), report_to="none")
    assert args.device.type == "meta"


def test_without_accelerate(tmp_path, monkeypatch):
    from hftrainer.arguments import accelerate_state

    monkeypatch.setattr(accelerate_state, "_library", lambda: None)
    args = arguments(hftrainer, tmp_path)
    state = args.distributed_state
    assert (state.distributed_type, state.num_processes, state.is_last_process) == ("NO", 1, True)
    with state.main_process_first(), state.split_between_processes([1, 2]) as part:
        assert part == [1, 2]
    hftrainer.Trainer(make_plain(), args, train_dataset=plain_data())
    assert not AcceleratorState._shared_state


def test_accelerate_that_is_hidden(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "accelerate", None)
    assert arguments(hftrainer, tmp_path).distributed_state.num_processes == 1


def test_accelerate_that_cannot_be_imported(tmp_path, monkeypatch):
    original = importlib.import_module

    def broken(name, *args):
        if name == "accelerate.state":
            raise ImportError("made for another torch")
        return original(name, *args)

    monkeypatch.setattr(importlib, "import_module", broken)
    with pytest.warns(UserWarning, match="accelerate cannot be imported .made for another torch."):
        assert arguments(hftrainer, tmp_path).distributed_state.num_processes == 1


def test_a_state_that_a_script_changes(tmp_path):
    """As scripts for quantized models with DeepSpeed do."""
    args = arguments(hftrainer, tmp_path)
    args.distributed_state.distributed_type = accelerate.DistributedType.DEEPSPEED
    assert PartialState().distributed_type == "DEEPSPEED"
    other = object()
    args.distributed_state = other
    assert args.distributed_state is other
