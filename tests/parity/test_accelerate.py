"""accelerate in one process: its global states and loggers, and what each key of `accelerator_config` changes."""

import copy
import importlib
import json
import os
import sys

import accelerate
import pytest
import torch
import transformers
from accelerate.logging import get_logger
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import broadcast_object_list, gather, gather_object
from transformers.trainer_pt_utils import AcceleratorConfig as TheirConfig

import hftrainer
from hftrainer.arguments import accelerate as accelerate_arguments
from hftrainer.arguments.accelerator_config import AcceleratorConfig
from hftrainer.errors import InvalidArgument, UnsupportedArgument
from tests.support.parity import assert_agree, assert_same_weights, build, callback, compare, train
from tests.support.small_models import Stream, make_plain, plain_data

KEEP_STATE = {"use_configured_state": True}
both_libraries = pytest.mark.parametrize("library", [hftrainer, transformers], ids=lambda library: library.__name__)


@pytest.fixture(autouse=True)
def reset_accelerate_state(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def arguments(library=hftrainer, **settings):
    return library.TrainingArguments("unused", use_cpu=True, report_to="none", **settings)


def make_trainer(args, library=hftrainer):
    return library.Trainer(make_plain(), args, train_dataset=plain_data())


def test_arguments_create_only_the_partial_state():
    def run(name):
        args = arguments(importlib.import_module(name))
        assert args.distributed_state.distributed_type == "NO"
        found = dict(PartialState().__dict__)
        with pytest.raises(ValueError, match="initialize your accelerator"):
            AcceleratorState()
        return found

    assert_agree(run)


@pytest.mark.parametrize("settings", [{}, {"bf16": True}])
def test_trainer_creates_the_same_accelerator_state(tmp_path, settings):
    def script(trainer):
        state = AcceleratorState()
        assert trainer.accelerator.state.mixed_precision == state.mixed_precision
        assert state.deepspeed_plugin is None
        assert not hasattr(state, "fsdp_plugin")
        return {name: str(value) for name, value in state.__dict__.items()}

    compare(tmp_path, "plain", script=script, **settings)


def test_gather_and_broadcast_helpers_of_accelerate_work(tmp_path):
    build("hftrainer", "plain", tmp_path)
    assert gather(torch.ones(2)).tolist() == [1.0, 1.0]
    assert gather_object([3]) == [3] and broadcast_object_list([4]) == [4]


@pytest.mark.parametrize("launched", [{}, {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}])
def test_loggers_of_accelerate_work_once_there_are_arguments(monkeypatch, caplog, launched):
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    log = get_logger("a.script", log_level="INFO")
    with pytest.raises(RuntimeError, match="initialize the accelerate state"):
        log.info("too early")
    arguments()
    log.info("begun", main_process_only=True)
    assert "begun" in caplog.text
    assert PartialState().num_processes == 1
    assert not torch.distributed.is_initialized()


def test_accelerator_state_is_that_of_the_trainer_that_trains(tmp_path):
    """Of two Trainers with different precisions, the newest sets the state until the other one trains."""
    seen = set()

    def on_step_end(self, args, state, control, **kwargs):
        seen.add(AcceleratorState().mixed_precision)

    watching = callback(on_step_end=on_step_end)
    first, _ = build("hftrainer", "plain", tmp_path / "first", bf16=True, callback=watching)
    assert AcceleratorState().mixed_precision == "bf16"
    build("hftrainer", "plain", tmp_path / "second")
    assert AcceleratorState().mixed_precision == "no"
    first.train()
    assert seen == {"bf16"}


@both_libraries
def test_state_created_by_the_script_is_replaced_or_kept_on_request(library):
    mine = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    arguments(library)
    assert not mine.state._shared_state.get("_mixed_precision")
    AcceleratorState._reset_state(reset_partial_state=True)
    mine = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    make_trainer(arguments(library, bf16=True, accelerator_config=dict(KEEP_STATE)), library)
    assert mine.state.mixed_precision == "bf16" and AcceleratorState().__dict__ is mine.state.__dict__


def test_partial_state_of_the_script_can_be_kept():
    before = PartialState(cpu=True).__dict__
    make_trainer(arguments(accelerator_config=KEEP_STATE))
    assert PartialState().__dict__ is before and AcceleratorState().mixed_precision == "no"


def test_use_configured_state_refuses_a_missing_or_other_state(monkeypatch):
    with pytest.raises(InvalidArgument, match="accelerate has no state yet"):
        arguments(accelerator_config=KEEP_STATE)
    accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    with pytest.raises(InvalidArgument, match="mixed_precision='bf16', but the arguments ask for 'no'"):
        make_trainer(arguments(accelerator_config=KEEP_STATE))
    on_a_gpu = type("OnAGpu", (), {"_shared_state": {"there": True}, "device": torch.device("cuda", 0)})
    with monkeypatch.context() as patch:
        patch.setattr(accelerate.state, "PartialState", on_a_gpu)
        with pytest.raises(InvalidArgument, match="accelerate's state is on cuda:0"):
            arguments(accelerator_config=KEEP_STATE)


def test_scripts_can_change_and_replace_distributed_state():
    args = arguments()
    args.distributed_state.distributed_type = accelerate.DistributedType.DEEPSPEED
    assert PartialState().distributed_type == "DEEPSPEED"
    other = object()
    args.distributed_state = other
    assert args.distributed_state is other


def test_arguments_of_transformers_configure_our_trainer():
    args = arguments(transformers, accelerator_config={"non_blocking": True})
    assert make_trainer(args).get_train_dataloader().non_blocking
    assert AcceleratorState().device == args.device and args.distributed_state.num_processes == 1
    args.accelerator_config.gradient_accumulation_kwargs = {"num_steps": 3}
    make_trainer(args)
    assert args.gradient_accumulation_steps == 3
    args.gradient_accumulation_steps = 2
    with pytest.raises(InvalidArgument, match="contradict each other: set only one"):
        make_trainer(args)


def test_making_a_trainer_keeps_environment_and_thread_count(tmp_path):
    before, threads = dict(os.environ), torch.get_num_threads()
    build("hftrainer", "plain", tmp_path)
    assert dict(os.environ) == before and torch.get_num_threads() == threads


def test_mixed_precision_set_on_the_arguments_takes_effect():
    def run(name, precision="bf16"):
        library = importlib.import_module(name)
        args = arguments(library, max_steps=3, logging_steps=1)
        assert args.mixed_precision == "no"
        args.mixed_precision = precision
        trainer = make_trainer(args, library)
        assert trainer.accelerator.mixed_precision == args.mixed_precision == precision
        trainer.train()
        return [line["loss"] for line in trainer.state.log_history if "loss" in line]

    assert assert_agree(run) != run("hftrainer", "no")
    with pytest.raises(UnsupportedArgument, match="choose 'no', 'fp16' or 'bf16'"):
        arguments().mixed_precision = "fp8"


@both_libraries
def test_subclass_can_override_setup_devices(library):
    class Elsewhere(library.TrainingArguments):
        @property
        def _setup_devices(self):
            return torch.device("meta")

    assert Elsewhere("unused", report_to="none").device.type == "meta"


def test_loggers_work_when_accelerate_is_imported_later(tmp_path, processes):
    script = f"""
import hftrainer, logging
hftrainer.TrainingArguments({str(tmp_path)!r}, use_cpu=True)
from accelerate.logging import get_logger
logging.basicConfig(level="INFO")
get_logger("late").info("said")
"""
    run = processes.run("-c", script, fresh=True)
    assert "INFO:late:" in run.stderr and "said" in run.stderr, run.stderr[-2000:]


def test_distributed_state_works_without_accelerate(monkeypatch):
    monkeypatch.setattr(accelerate_arguments, "_import_state_module", lambda: None)
    args = arguments()
    state = args.distributed_state
    assert (state.distributed_type, state.num_processes, state.is_last_process) == ("NO", 1, True)
    with state.main_process_first(), state.split_between_processes([1, 2]) as part:
        assert part == [1, 2]
    make_trainer(args)
    assert not AcceleratorState._shared_state


def test_broken_accelerate_warns_and_is_ignored(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "accelerate", None)
        assert arguments().distributed_state.num_processes == 1
    original = importlib.import_module

    def broken(name, *args):
        if name == "accelerate.state":
            raise ImportError("made for another torch")
        return original(name, *args)

    monkeypatch.setattr(importlib, "import_module", broken)
    with pytest.warns(UserWarning, match="accelerate cannot be imported .made for another torch."):
        assert arguments().distributed_state.num_processes == 1


KEYS = {
    "split_batches": True,
    "dispatch_batches": True,
    "even_batches": False,
    "use_seedable_sampler": False,
    "non_blocking": True,
    "gradient_accumulation_kwargs": {"num_steps": 3, "sync_with_dataloader": False},
}


@pytest.mark.parametrize("key", KEYS)
def test_each_config_key_trains_alike(tmp_path, key):
    def run(name):  # transformers writes into what it is given
        return train(name, "plain", tmp_path / name, accelerator_config=copy.deepcopy({key: KEYS[key]}))

    changes = key in ("use_seedable_sampler", "gradient_accumulation_kwargs")
    assert (assert_agree(run).logs != train("hftrainer", "plain", tmp_path / "without").logs) == changes


@pytest.mark.parametrize("dispatched", [True, False])
def test_streams_train_alike_dispatched_or_not(tmp_path, dispatched):
    data = {"trainer": {"train_dataset": Stream(38)}}
    compare(tmp_path, "plain", accelerator_config={"dispatch_batches": dispatched}, max_steps=12, **data)


def test_resume_without_seedable_sampler_and_warning_if_it_changed(tmp_path, caplog):
    saves = {"save_strategy": "steps", "save_steps": 4}
    torchs = {"accelerator_config": {"use_seedable_sampler": False}, **saves}
    whole = train("hftrainer", "plain", tmp_path, **torchs)
    resumed = train("hftrainer", "plain", tmp_path, str(tmp_path / "checkpoint-4"), **torchs)
    assert resumed.logs[:-1] == whole.logs[:-1]
    assert_same_weights(resumed.weights, whole.weights)
    assert "Resuming with accelerator_config=" not in caplog.text
    train("hftrainer", "plain", tmp_path, str(tmp_path / "checkpoint-4"), **saves)
    assert "Resuming with accelerator_config=" in caplog.text


def test_config_is_read_from_dict_file_object_and_json(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(KEYS))
    for form in (KEYS, str(path), path, TheirConfig(**KEYS), json.dumps(KEYS)):
        read = AcceleratorConfig.read(arguments(accelerator_config=form).accelerator_config)
        assert read == AcceleratorConfig(**KEYS)
    assert AcceleratorConfig.read(None) == AcceleratorConfig() == AcceleratorConfig.read({})


def test_non_blocking_warns_without_pinned_memory(caplog):
    for pinned in (True, False):
        args = arguments(accelerator_config={"non_blocking": True})
        args.dataloader_pin_memory = pinned  # use_cpu has turned it off
        caplog.clear()
        assert make_trainer(args).get_train_dataloader().non_blocking
        assert ("dataloader_pin_memory=False" in caplog.text) is not pinned


WRONG = [
    ({"split_batch": True}, "has no key 'split_batch'; did you mean 'split_batches'?"),
    ({"zzz": True}, "has no key 'zzz': the keys are dispatch_batches"),
    ({"split_batches": "yes"}, "['split_batches']='yes': use True or False"),
    ({"split_batches": None}, "['split_batches']=None: use True or False"),
    ({"gradient_accumulation_kwargs": 3}, "['gradient_accumulation_kwargs']=3: use a dict"),
    ({"gradient_accumulation_kwargs": {"num_step": 3}}, "did you mean 'num_steps'?"),
    ({"gradient_accumulation_kwargs": {"num_steps": 0}}, "['num_steps']=0: use a number of micro-batches"),
    ({"gradient_accumulation_kwargs": {"num_steps": True}}, "['num_steps']=True: use a number of micro-batches"),
    ({"gradient_accumulation_kwargs": {"sync_each_batch": 1}}, "['sync_each_batch']=1: use True or False"),
    (TheirConfig, "callable to `accelerator_config`, the class AcceleratorConfig: pass an instance"),
    (7, "accelerator_config=7: pass a dict or the path of a JSON file"),
    ("missing.json", "accelerator_config='missing.json' cannot be read: No such file"),
    ("list.json", "must hold keys and values"),
    ("cut.json", "is not valid JSON"),
]


@pytest.mark.parametrize(("config", "sentence"), WRONG)
def test_wrong_config_is_refused(tmp_path, config, sentence):
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "cut.json").write_text("{")
    with pytest.raises(InvalidArgument) as caught:
        arguments(accelerator_config=config)
    assert sentence in str(caught.value)


CONFIGURATIONS = [
    None,
    {"dispatch_batches": False, "even_batches": False, "non_blocking": True},
    {"split_batches": True, "use_seedable_sampler": False},
    {"gradient_accumulation_kwargs": {"sync_each_batch": True, "adjust_scheduler": False}},
    {"gradient_accumulation_kwargs": {"sync_with_dataloader": True}},
]
NAMES = "split_batches dispatch_batches even_batches use_seedable_sampler non_blocking gradient_accumulation_steps"
NAMES_OF_STATE = "num_steps adjust_scheduler sync_with_dataloader plugin_kwargs"


@pytest.mark.parametrize("config", CONFIGURATIONS)
def test_accelerator_attributes_report_the_config(tmp_path, config):
    def run(name):
        settings = {"accelerator_config": copy.deepcopy(config), "gradient_accumulation_steps": 2}
        trainer, _ = build(name, "plain", tmp_path / name, **settings)
        accelerator = trainer.accelerator
        prepared = accelerator.prepare(torch.utils.data.DataLoader(plain_data(10), batch_size=3))
        loaders = [trainer.get_train_dataloader(), trainer.get_eval_dataloader(), prepared]
        told = [getattr(accelerator, each) for each in NAMES.split()]
        told += [getattr(accelerator.gradient_state, each) for each in NAMES_OF_STATE.split()]
        return told, [loader.total_batch_size for loader in loaders]

    assert_agree(run)


def test_distributed_type_equals_that_of_accelerate(tmp_path):
    theirs, kind = accelerate.DistributedType, build("hftrainer", "plain", tmp_path)[0].accelerator.distributed_type
    assert (str(kind), kind, kind.value) == (str(theirs.NO), theirs.NO, "NO")
    assert kind in (theirs.NO, theirs.FSDP) and kind != theirs.MULTI_GPU


def test_gradient_state_and_accelerator_agree_on_sync_gradients(tmp_path):
    """Training loops copied from transformers set it through accelerate's name."""
    accelerator = build("hftrainer", "plain", tmp_path)[0].accelerator
    for synchronized in (False, True):
        accelerator.gradient_state._set_sync_gradients(synchronized)
        assert accelerator.sync_gradients is accelerator.gradient_state.sync_gradients is synchronized


@pytest.mark.parametrize("count", [16, 19])
def test_gather_for_metrics_drops_padding_of_the_last_batch(tmp_path, count):
    """Values without rows, such as scalars, are returned unchanged."""
    sizes = []

    def script(trainer):
        gather = trainer.accelerator.gather_for_metrics
        values = {"rows": torch.arange(8), "nested": (torch.ones(8, 2), [torch.zeros(8)])}
        loader = trainer.get_eval_dataloader(plain_data(count))
        found = [(gather(values), gather(torch.tensor(1.0)), gather(batch)) for batch in loader]
        sizes.append(len(found[-1][0]["rows"]))
        return str(found)

    compare(tmp_path, "plain", script=script)
    assert sizes == [count % 8 or 8] * 2
