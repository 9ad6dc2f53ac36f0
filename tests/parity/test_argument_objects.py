"""Arguments that hold objects, subclasses with an `__init__`, old callbacks, and models that cannot be trained."""

import dataclasses
import importlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import hftrainer
from hftrainer.errors import InvalidArgument, UnknownArgument
from tests.support.tiny import make_llama, make_plain, plain_data
from tests.support.tracking import mlflow_database

LIBRARIES = ("hftrainer", "transformers")
SETTINGS = {"max_steps": 2, "save_strategy": "no", "report_to": "none", "use_cpu": True, "disable_tqdm": True}
OWN = ("dtype", "other", "model_init_kwargs", "folder", "function", "pair")


def make_class(library):
    @dataclass
    class OwnArguments(library.TrainingArguments):
        dtype: Any = None
        other: Any = None
        model_init_kwargs: dict[str, Any] | None = None
        folder: Any = Path("here")
        function: Any = len
        pair: Any = (1, 2)
        list_of: list[Any] = field(default_factory=list)

    return OwnArguments


def make_own(name, folder, **given):
    quantization = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16)
    nested = {"dtype": torch.float16, "deep": {"dtype": torch.int8}, "quantization_config": quantization}
    given = {**SETTINGS, "dtype": torch.bfloat16, "other": torch.int8, "model_init_kwargs": nested, **given}
    return make_class(importlib.import_module(name))(str(folder), **given)


def test_to_dict(tmp_path):
    ours, theirs = (make_own(name, tmp_path).to_dict() for name in LIBRARIES)
    assert {name: ours[name] for name in OWN} == {name: theirs[name] for name in OWN}
    assert ours["dtype"] == "bfloat16"
    assert ours["model_init_kwargs"]["deep"] == {"dtype": "int8"}
    assert ours["other"] is torch.int8  # only what is called dtype gets a name, so that the rest can be given again


def test_to_dict_leaves_the_arguments_alone(tmp_path):
    args = make_own("hftrainer", tmp_path)
    args.to_dict()
    assert args.model_init_kwargs["deep"]["dtype"] is torch.int8  # transformers writes the name into it
    assert args.dtype is torch.bfloat16


def test_to_json_string(tmp_path):
    args = make_own("hftrainer", tmp_path, list_of=[torch.float32, {1: {2}}])
    values = json.loads(args.to_json_string())
    assert values["list_of"] == ["float32", {"1": "{2}"}]
    assert (values["other"], values["folder"], values["pair"]) == ("int8", "here", [1, 2])
    assert values["function"] == "<built-in function len>"
    assert values["model_init_kwargs"]["quantization_config"]["load_in_4bit"] is True
    plain = hftrainer.TrainingArguments(**SETTINGS)
    assert json.loads(plain.to_json_string()) == plain.to_dict()


@pytest.mark.parametrize("tracker", ["tensorboard", "csv", "mlflow"])
def test_trackers_write_any_argument(tmp_path, monkeypatch, tracker):
    monkeypatch.chdir(tmp_path)
    if tracker == "mlflow":
        monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_database(tmp_path / "mlflow.db"))
    args = make_own("hftrainer", tmp_path, report_to=tracker, list_of=[torch.float32, {1: {2}}])
    assert hftrainer.Trainer(make_plain(), args, train_dataset=plain_data()).train().global_step == 2


def test_subclass_with_json_of_its_own(tmp_path):
    """As TRL's configurations are written."""
    for name in LIBRARIES:
        base = importlib.import_module(name).TrainingArguments

        @dataclass
        class WithJson(base):
            _VALID_DICT_FIELDS = [*base._VALID_DICT_FIELDS, "model_init_kwargs"]

            model_init_kwargs: dict[str, Any] | str | None = None

        args = WithJson(str(tmp_path), model_init_kwargs='{"revision": "main", "layers": "3"}', **SETTINGS)
        assert args.model_init_kwargs == {"revision": "main", "layers": 3}


# ---- Subclasses with an __init__


def make_with_init(library):
    class WithInit(library.TrainingArguments):
        def __init__(self, *args, teacher: str = "none", **kwargs):
            super().__init__(*args, **kwargs)
            self.teacher = teacher

    return WithInit


@pytest.mark.parametrize("name", LIBRARIES)
def test_subclass_with_an_init_of_its_own(tmp_path, name):
    kind = make_with_init(importlib.import_module(name))
    args = kind(str(tmp_path), teacher="bert", **SETTINGS)
    assert (args.teacher, args.max_steps) == ("bert", 2)
    with pytest.raises(TypeError, match="learning_rat"):
        kind(str(tmp_path), learning_rat=1.0)


def test_init_variables(tmp_path):
    @dataclass
    class WithVariable(hftrainer.TrainingArguments):
        scale: dataclasses.InitVar[float] = 1.0

        def __post_init__(self, scale):
            super().__post_init__()
            self.learning_rate *= scale

    assert WithVariable(str(tmp_path), learning_rate=0.5, scale=0.5).learning_rate == 0.25
    with pytest.raises(UnknownArgument, match="did you mean 'learning_rate'"):
        WithVariable(str(tmp_path), learning_rat=0.5)


# ---- Old callbacks, and old values


def test_callbacks_that_name_the_tokenizer(tmp_path):
    seen = {}

    class Old(hftrainer.TrainerCallback):
        def on_train_begin(self, args, state, control, tokenizer=None, **kwargs):
            seen["named"] = tokenizer

        def on_train_end(self, args, state, control, **kwargs):
            seen["looked up"] = kwargs["tokenizer"]

        def on_step_end(self, args, state, control, **kwargs):
            seen["others"] = [name for name in kwargs if name.startswith("tok")]

    collator = transformers.PreTrainedTokenizerFast(tokenizer_object=make_tokenizer())
    trainer = hftrainer.Trainer(
        make_plain(),
        hftrainer.TrainingArguments(str(tmp_path), **SETTINGS),
        train_dataset=plain_data(),
        data_collator=hftrainer.default_data_collator,
        processing_class=collator,
        callbacks=[Old()],
    )
    trainer.train()
    assert seen == {"named": collator, "looked up": collator, "others": []}


def make_tokenizer():
    from tokenizers import Tokenizer, models

    return Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))


def test_clipping_to_none(tmp_path):
    """Until v4.57 None clips nothing, as 0 does; v5 fails at the first step."""
    weights = []
    for value in (None, 0.0):
        args = hftrainer.TrainingArguments(str(tmp_path), **SETTINGS, max_grad_norm=value, learning_rate=0.5)
        trainer = hftrainer.Trainer(make_plain(), args, train_dataset=plain_data())
        trainer.train()
        weights.append([tensor.sum().item() for tensor in trainer.model.state_dict().values()])
    assert weights[0] == weights[1]


@pytest.mark.parametrize("name", LIBRARIES)
def test_control_and_state_for_loops_of_scripts(tmp_path, name):
    library = importlib.import_module(name)
    control = library.TrainerControl(*[True] * 5)
    control._new_training()
    assert not control.should_training_stop
    assert control.should_epoch_stop
    control._new_epoch()
    assert not control.should_epoch_stop
    assert control.should_save
    control._new_step()
    assert not (control.should_save or control.should_log or control.should_evaluate)
    state = library.TrainerState()
    trainer = library.Trainer(make_plain(), library.TrainingArguments(str(tmp_path), **SETTINGS))
    state.init_training_references(trainer, 7, 3, None)
    assert (state.max_steps, state.num_train_epochs, state.trial_params) == (7, 3, None)
    assert state.is_world_process_zero


def test_pinned_memory_is_for_accelerators(tmp_path):
    for name in LIBRARIES:
        library = importlib.import_module(name)
        assert library.TrainingArguments(str(tmp_path), use_cpu=True).dataloader_pin_memory is False
        assert library.TrainingArguments(str(tmp_path)).dataloader_pin_memory is True


# ---- Quantized models


@pytest.mark.parametrize("bits", [4, 8])
def test_quantized_models(tmp_path, bits):
    make_llama().save_pretrained(tmp_path / "model")
    config = transformers.BitsAndBytesConfig(**{f"load_in_{bits}bit": True})
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", quantization_config=config, device_map="cpu"
    )
    for name in LIBRARIES:
        library = importlib.import_module(name)
        args = library.TrainingArguments(str(tmp_path), **SETTINGS)
        with pytest.raises(ValueError, match="quantized"):
            library.Trainer(model, args)
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    assert hftrainer.Trainer(adapted, args=hftrainer.TrainingArguments(str(tmp_path), **SETTINGS)).model is adapted
    adapted.hf_quantizer.__class__ = type("Frozen", (type(adapted.hf_quantizer),), {"is_trainable": False})
    for name in LIBRARIES:
        library = importlib.import_module(name)
        with pytest.raises(ValueError, match="quantiz"):
            library.Trainer(adapted, library.TrainingArguments(str(tmp_path), **SETTINGS))


@pytest.mark.parametrize("value", [0, -1, 1.0, "none"])
def test_empty_cache_steps(tmp_path, value):
    with pytest.raises(InvalidArgument, match=r"torch_empty_cache_steps=.*at least 1, or None"):
        hftrainer.TrainingArguments(str(tmp_path), torch_empty_cache_steps=value)


def test_debug_options_are_members(tmp_path):
    from hftrainer.debug_utils import DebugOption

    args = hftrainer.TrainingArguments(str(tmp_path), debug="underflow_overflow tpu_metrics_debug")
    assert all(isinstance(option, DebugOption) for option in args.debug)
    assert args.to_dict()["debug"] == ["underflow_overflow", "tpu_metrics_debug"]
