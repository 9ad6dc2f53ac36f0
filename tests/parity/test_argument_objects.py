"""Arguments that hold objects, `accelerator_config` as the object that libraries change, and subclasses."""

import copy
import dataclasses
import itertools
import json
import pickle
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

import hftrainer
from hftrainer.errors import InvalidArgument, UnknownArgument, UnknownKey, UnsupportedArgument
from hftrainer.trainer_pt_utils import AcceleratorConfig
from tests.support.small_models import make_llama, make_plain, plain_data, tokenizer
from tests.support.tracking import mlflow_database

LIBRARIES = (hftrainer, transformers)
both_libraries = pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.__name__)


def make_args(library, folder, kind=None, **kwargs):
    settings = {"max_steps": 2, "save_strategy": "no", "report_to": "none", "use_cpu": True, "disable_tqdm": True}
    return (kind or library.TrainingArguments)(str(folder), **{**settings, **kwargs})


def make_trainer(library, args, **trainer_kwargs):
    return library.Trainer(make_plain(), args, train_dataset=plain_data(), **trainer_kwargs)


@both_libraries
def test_accelerator_config_can_be_changed_in_place(tmp_path, library):
    args = make_args(library, tmp_path)
    config = args.accelerator_config
    assert config.dispatch_batches is None and config.even_batches is True and config.split_batches is False
    config.dispatch_batches = config.even_batches = False
    config.non_blocking = True
    now = make_trainer(library, args).accelerator.dataloader_config
    assert (now.dispatch_batches, now.even_batches, now.non_blocking) == (False, False, True)
    assert args.to_dict()["accelerator_config"] == config.to_dict()
    assert json.loads(args.to_json_string())["accelerator_config"]["dispatch_batches"] is False


@pytest.mark.parametrize("config", [None, {"split_batches": True}, {"gradient_accumulation_kwargs": {"num_steps": 3}}])
def test_accelerator_config_is_serialized_as_in_transformers(tmp_path, config):
    ours, theirs = (make_args(each, tmp_path, accelerator_config=copy.deepcopy(config)) for each in LIBRARIES)
    assert ours.to_dict()["accelerator_config"] == theirs.to_dict()["accelerator_config"]
    assert ours.to_sanitized_dict()["accelerator_config"] == theirs.to_sanitized_dict()["accelerator_config"]


@both_libraries
def test_copies_of_arguments_keep_a_changed_accelerator_config(tmp_path, library):
    args = make_args(library, tmp_path)
    args.accelerator_config.use_seedable_sampler = False
    torch.save(args, tmp_path / "training_args.bin")
    deep, *others = (
        copy.deepcopy(args),
        dataclasses.replace(args, seed=7),
        torch.load(tmp_path / "training_args.bin", weights_only=False),
        pickle.loads(pickle.dumps(args)),
    )
    assert all(each.accelerator_config.use_seedable_sampler is False for each in (deep, *others))
    assert deep == args
    assert deep.accelerator_config is not args.accelerator_config
    deep.accelerator_config.even_batches = False
    assert deep != args


def test_accelerator_config_assigned_later_is_converted_and_checked(tmp_path):
    args = make_args(hftrainer, tmp_path)
    args.accelerator_config = {"split_batches": True}
    assert args.accelerator_config == AcceleratorConfig(split_batches=True)
    args.accelerator_config = None
    assert args.accelerator_config == AcceleratorConfig()
    with pytest.raises(UnknownKey, match="did you mean 'split_batches'"):
        args.accelerator_config = {"split_batch": True}
    args.accelerator_config.split_batch = True
    with pytest.raises(InvalidArgument, match="has no key 'split_batch'; did you mean 'split_batches'"):
        make_trainer(hftrainer, args)


@both_libraries
def test_accumulation_set_on_accelerator_config_takes_effect(tmp_path, library):
    args = make_args(library, tmp_path)
    args.accelerator_config.gradient_accumulation_kwargs = {"num_steps": 4}
    trainer = make_trainer(library, args)
    assert args.gradient_accumulation_steps == 4
    trainer.train()
    assert trainer.state.epoch > 0


@pytest.mark.parametrize("kind", [AcceleratorConfig, transformers.trainer_pt_utils.AcceleratorConfig])
def test_accelerator_config_object_is_used_without_copying(tmp_path, kind):
    """A script that keeps the object may change it later."""
    config = kind()
    args = make_args(hftrainer, tmp_path, accelerator_config=config)
    assert args.accelerator_config is config
    config.non_blocking = True
    assert make_trainer(hftrainer, args).accelerator.non_blocking
    assert "use_configured_state" not in args.to_dict()["accelerator_config"]
    assert kind(use_configured_state=True).to_dict()["use_configured_state"] is True


def test_changed_accelerator_settings_affect_later_loaders(tmp_path):
    def orders(library):
        trainer = make_trainer(library, make_args(library, tmp_path))
        accelerator = trainer.accelerator

        def order():
            return [batch["x"].tolist() for batch in trainer.get_train_dataloader()]

        yield order()
        accelerator.even_batches = False
        assert accelerator.dataloader_config.even_batches is accelerator.even_batches is False
        accelerator.dataloader_config.data_seed = 1234
        yield order()
        accelerator.dataloader_config.use_seedable_sampler = False
        torch.manual_seed(0)
        yield order()

    ours, theirs = (list(orders(library)) for library in LIBRARIES)
    assert ours == theirs
    assert all(first != second for first, second in itertools.combinations(ours, 2))


def test_stateful_dataloaders_are_refused(tmp_path):
    trainer = make_trainer(hftrainer, make_args(hftrainer, tmp_path))
    trainer.accelerator.dataloader_config.use_stateful_dataloader = True
    with pytest.raises(UnsupportedArgument, match="use_stateful_dataloader"):
        trainer.get_train_dataloader()


def test_setting_deepspeed_plugin_is_refused(tmp_path):
    args = make_args(hftrainer, tmp_path)
    args.deepspeed_plugin = None
    with pytest.raises(UnsupportedArgument, match="pass the configuration as `deepspeed`"):
        args.deepspeed_plugin = object()


def make_subclass_args(library, folder, **kwargs):
    @dataclasses.dataclass
    class OwnArguments(library.TrainingArguments):
        dtype: Any = None
        other: Any = None
        model_init_kwargs: dict[str, Any] | None = None
        folder: Any = Path("here")
        function: Any = len
        pair: Any = (1, 2)
        list_of: list[Any] = dataclasses.field(default_factory=list)

    quantization = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16)
    nested = {"dtype": torch.float16, "deep": {"dtype": torch.int8}, "quantization_config": quantization}
    kwargs = {"dtype": torch.bfloat16, "other": torch.int8, "model_init_kwargs": nested, **kwargs}
    return make_args(library, folder, OwnArguments, **kwargs)


def test_to_dict_of_a_subclass_is_that_of_transformers(tmp_path):
    args = make_subclass_args(hftrainer, tmp_path)
    ours, theirs = args.to_dict(), make_subclass_args(transformers, tmp_path).to_dict()
    for name in ("dtype", "other", "model_init_kwargs", "folder", "function", "pair"):
        assert ours[name] == theirs[name]
    assert ours["dtype"] == "bfloat16"
    assert ours["model_init_kwargs"]["deep"] == {"dtype": "int8"}
    assert ours["other"] is torch.int8  # only what is called dtype gets a name, so that the rest can be given again
    assert args.model_init_kwargs["deep"]["dtype"] is torch.int8  # transformers writes the name into it
    assert args.dtype is torch.bfloat16


def test_to_json_string_converts_any_object(tmp_path):
    values = json.loads(make_subclass_args(hftrainer, tmp_path, list_of=[torch.float32, {1: {2}}]).to_json_string())
    assert values["list_of"] == ["float32", {"1": "{2}"}]
    assert (values["other"], values["folder"], values["pair"]) == ("int8", "here", [1, 2])
    assert values["function"] == "<built-in function len>"
    assert values["model_init_kwargs"]["quantization_config"]["load_in_4bit"] is True


@pytest.mark.parametrize("tracker", ["tensorboard", "csv", "mlflow"])
def test_trackers_write_any_argument(tmp_path, monkeypatch, tracker):
    monkeypatch.chdir(tmp_path)
    if tracker == "mlflow":
        monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_database(tmp_path / "mlflow.db"))
    args = make_subclass_args(hftrainer, tmp_path, report_to=tracker, list_of=[torch.float32, {1: {2}}])
    assert make_trainer(hftrainer, args).train().global_step == 2


def test_default_optim_is_that_of_transformers():
    assert hftrainer.TrainingArguments.default_optim == transformers.TrainingArguments.default_optim


@both_libraries
def test_subclass_may_define_init(tmp_path, library):
    class WithInit(library.TrainingArguments):
        def __init__(self, *args, teacher: str = "none", **kwargs):
            super().__init__(*args, **kwargs)
            self.teacher = teacher

    args = make_args(library, tmp_path, WithInit, teacher="bert")
    assert (args.teacher, args.max_steps) == ("bert", 2)
    with pytest.raises(TypeError, match="learning_rat"):
        WithInit(str(tmp_path), learning_rat=1.0)


def test_subclass_may_have_init_variables(tmp_path):
    @dataclasses.dataclass
    class WithVariable(hftrainer.TrainingArguments):
        scale: dataclasses.InitVar[float] = 1.0

        def __post_init__(self, scale):
            super().__post_init__()
            self.learning_rate *= scale

    assert WithVariable(str(tmp_path), learning_rate=0.5, scale=0.5).learning_rate == 0.25
    with pytest.raises(UnknownArgument, match="did you mean 'learning_rate'"):
        WithVariable(str(tmp_path), learning_rat=0.5)


def test_callbacks_get_the_processing_class_as_tokenizer(tmp_path):
    seen = {}

    class Old(hftrainer.TrainerCallback):
        def on_train_begin(self, args, state, control, tokenizer=None, **kwargs):
            seen["named"] = tokenizer

        def on_train_end(self, args, state, control, **kwargs):
            seen["looked up"] = kwargs["tokenizer"]

        def on_step_end(self, args, state, control, **kwargs):
            seen["others"] = [name for name in kwargs if name.startswith("tok")]

    trainer_kwargs = {"data_collator": hftrainer.default_data_collator, "callbacks": [Old()]}
    pads = tokenizer()
    make_trainer(hftrainer, make_args(hftrainer, tmp_path), processing_class=pads, **trainer_kwargs).train()
    assert seen == {"named": pads, "looked up": pads, "others": []}


@both_libraries
def test_control_and_state_have_the_methods_of_custom_loops(tmp_path, library):
    control = library.TrainerControl(*[True] * 5)
    control._new_training()
    assert (control.should_training_stop, control.should_epoch_stop) == (False, True)
    control._new_epoch()
    assert (control.should_epoch_stop, control.should_save) == (False, True)
    control._new_step()
    assert not (control.should_save or control.should_log or control.should_evaluate)
    state = library.TrainerState()
    state.init_training_references(make_trainer(library, make_args(library, tmp_path)), 7, 3, None)
    assert (state.max_steps, state.num_train_epochs, state.trial_params) == (7, 3, None)
    assert state.is_world_process_zero


@pytest.mark.parametrize("bits", [4, 8])
def test_quantized_models_need_trainable_adapters(tmp_path, bits):
    make_llama().save_pretrained(tmp_path / "model")
    config = transformers.BitsAndBytesConfig(**{f"load_in_{bits}bit": True})
    load = transformers.AutoModelForCausalLM.from_pretrained
    model = load(tmp_path / "model", quantization_config=config, device_map="cpu")
    for library in LIBRARIES:
        with pytest.raises(ValueError, match="quantized"):
            library.Trainer(model, make_args(library, tmp_path))
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    assert hftrainer.Trainer(adapted, make_args(hftrainer, tmp_path)).model is adapted
    adapted.hf_quantizer.__class__ = type("Frozen", (type(adapted.hf_quantizer),), {"is_trainable": False})
    for library in LIBRARIES:
        with pytest.raises(ValueError, match="quantiz"):
            library.Trainer(adapted, make_args(library, tmp_path))
