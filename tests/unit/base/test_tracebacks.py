"""An error in a script's code shows the frames of the script, and notes say where in the run it happened."""

import re
import sys
import traceback
from signal import SIG_DFL, SIGINT, raise_signal
from types import SimpleNamespace

import pytest
import torch
import transformers
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import hftrainer
from hftrainer.base import messages, tracebacks
from hftrainer.base.tracebacks import note_batch
from hftrainer.cli import run
from hftrainer.errors import InvalidArgument, InvalidSetup, MissingPackage
from hftrainer.monitoring.journal import read_events
from hftrainer.reporting import panels
from tests.support.small_models import Plain, language_data, make_bert, make_llama, make_plain, plain_data, text_data


class Fails(Plain):
    """Fails within a module of torch."""

    def forward(self, x, labels=None):
        return super().forward(x[:, :5], labels)


class Data(list):
    def __getitem__(self, index):
        raise LookupError("mine")


class Computed(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return {**plain_data(8)[index], "extra": 1}


def fail(*_, **__):
    raise LookupError("mine")


def fail_at(event):
    return {"callbacks": [type("At", (hftrainer.TrainerCallback,), {event: fail})()]}


READING = "while the samples [0, 1, 2, 3] were read and collated."
#: Name → what fails, the functions in the traceback, and where it happened.
CASES = {
    "model": (
        {"model": Fails()},
        ["forward", "forward", "forward"],
        "in training step 1, with the batch x: float32 (4, 8), labels: int64 (4,).",
    ),
    "collator": ({"data_collator": fail}, ["fail"], READING),
    "collator that reads another key": (
        {"data_collator": lambda samples: {"x": torch.stack([sample["y"] for sample in samples])}},
        ["<lambda>", "<listcomp>"][: 1 + (sys.version_info < (3, 12))],
        f"{READING[:-1]}; the first has x, labels.",
    ),
    "collator that reads an attribute": (
        {"train_dataset": Computed(), "data_collator": lambda samples: samples[0].y},
        ["<lambda>"],
        f"{READING[:-1]}; the first has x, labels (remove_unused_columns has removed extra).",
    ),
    "loss function": (
        {"compute_loss_func": lambda outputs, labels: outputs["loss"]},
        ["<lambda>"],
        "while compute_loss_func ran; the outputs of the model are logits. The model gets no labels then and returns",
    ),
    "dataset": ({"train_dataset": Data(plain_data())}, ["__getitem__"], "while sample 0 was read."),
    "metrics": (
        {"compute_metrics": fail},
        ["fail"],
        "while compute_metrics ran, with predictions: float32 (10, 3), label_ids: int64 (10,).",
    ),
    "nested tensors": (
        {
            "data_collator": lambda _: {"x": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])},
            "model": Fails(),
        },
        ["forward"],
        "in training step 1, with the batch x: a Tensor.",
    ),
    "callback": (fail_at("on_step_end"), ["fail"], "after training step 1."),
    "start": (fail_at("on_train_begin"), ["fail"], "before training step 1."),
    "optimizer": (fail_at("on_optimizer_step"), ["fail"], "in training step 1."),
    "list": ({"data_collator": lambda samples: samples}, [], "in training step 1."),
    "evaluation": (
        {"eval_dataset": [{"x": torch.zeros(3), "labels": 0}]},
        ["forward", "forward"],
        "in batch 1 of an evaluation, with the batch x: float32 (1, 3), labels: int64 (1,).",
    ),
}


def fail_to_train(folder, trainer_kwargs, **others):
    settings = {"max_steps": 2, "eval_strategy": "steps", "eval_steps": 1, "per_device_train_batch_size": 4}
    settings |= {"train_sampling_strategy": "sequential", "use_cpu": True, "disable_tqdm": True} | others
    args = hftrainer.TrainingArguments(str(folder), **settings)
    data = {"train_dataset": plain_data(), "eval_dataset": plain_data(10), "compute_metrics": lambda _: {"a": 1.0}}
    with pytest.raises((AttributeError, LookupError, RuntimeError, TypeError, InvalidArgument)) as caught:
        hftrainer.Trainer(**{"model": make_plain(), "args": args, **data, **trainer_kwargs}).train()
    return caught.value


@pytest.mark.parametrize(("trainer_kwargs", "shown", "note"), CASES.values(), ids=CASES)
def test_error_shows_frames_of_the_script_and_where_it_happened(tmp_path, trainer_kwargs, shown, note):
    error = fail_to_train(tmp_path, trainer_kwargs)
    frames = traceback.extract_tb(error.__traceback__)[1:]  # without this test's own
    assert [frame.name for frame in frames] == shown
    assert not any("lightning" in frame.filename for frame in frames)
    first, *notes, hidden = error.__notes__
    assert f"This happened {note}" in first
    assert hidden == "(The engine's frames are hidden: HFTRAINER_TRACEBACK=full shows them.)"
    assert sum("training step" in text for text in error.__notes__) == 1
    saved = [text for text in notes if text.startswith("Saved at the error: ")]
    assert [bool(text) for text in saved] == [True for _ in tmp_path.glob("checkpoint-*")]


@pytest.mark.parametrize("workers", [0, 1])
def test_sample_that_is_none_is_named(tmp_path, workers):
    error = fail_to_train(tmp_path, {"train_dataset": [*plain_data(3), None]}, dataloader_num_workers=workers)
    assert "A sample is None, as its dataset returned nothing: check" in str(error)
    ends = "; the first has x, labels." if workers else "; sample 3 is None."
    assert error.__notes__[0].endswith(f"the samples [0, 1, 2, 3] were read and collated{ends}")
    assert not re.search(r"/torch/|/hftrainer/", str(error))


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tracebacks stay complete before Python 3.11")
@pytest.mark.parametrize(
    ("name", "accepted"),
    [
        ("compute_loss", "(self, model, inputs, return_outputs=False, num_items_in_batch=None)"),
        ("training_step", "(self, model, inputs, num_items_in_batch=None)"),
        ("evaluate", "(self, eval_dataset=None, ignore_keys=None, metric_key_prefix='eval')"),
    ],
)
def test_override_with_wrong_parameters_is_named_with_the_right_ones(make_args, name, accepted):
    def override(self, wrong):
        raise AssertionError

    override.__qualname__ = f"Own.{name}"
    kind = type("Own", (hftrainer.Trainer,), {name: override})
    args = make_args(max_steps=1, eval_strategy="steps", eval_steps=1)
    with pytest.raises(TypeError, match=rf"^Own.{name}\(\) ") as caught:
        kind(make_plain(), args, train_dataset=plain_data(), eval_dataset=plain_data()).train()
    line = override.__code__.co_firstlineno
    note = f"A Trainer passes Own.{name} ({__file__}, line {line}) other arguments: define it with {accepted}."
    assert note in [text.replace("\n", " ") for text in caught.value.__notes__]
    # This test's call is the only frame.
    assert len(traceback.extract_tb(caught.value.__traceback__)) == 1


def test_full_traceback_on_request(tmp_path, monkeypatch):
    monkeypatch.setenv("HFTRAINER_TRACEBACK", "full")
    error = fail_to_train(tmp_path, {"data_collator": fail})
    assert len(traceback.extract_tb(error.__traceback__)) > 20
    assert not any("frames are hidden" in note for note in error.__notes__)


def test_ctrl_c_shows_the_script_alone(tmp_path):
    callback = type("Stop", (hftrainer.TrainerCallback,), {"on_step_end": lambda *_, **__: raise_signal(SIGINT)})
    with pytest.raises(KeyboardInterrupt) as caught:
        fail_to_train(tmp_path, {"callbacks": [callback]}, observe="journal")
    assert [frame.name for frame in traceback.extract_tb(caught.tb)][1:] == ["fail_to_train"]
    *events, end = read_events(str(tmp_path))
    # A warning would stay on the page of `watch` after a resume.
    assert end["reason"] == "Ctrl-C" and "warning" not in [each["event"] for each in events]


@pytest.mark.parametrize("version", [(3, 10), (3, 11)])
def test_checkpoint_note_after_ctrl_c_is_shown_once(monkeypatch, caplog, capsys, version):
    for module in (messages, tracebacks):
        monkeypatch.setattr(module, "sys", SimpleNamespace(**{**vars(sys), "version_info": version}))
    handlers = {}
    monkeypatch.setattr(messages.signal, "signal", handlers.__setitem__)
    error = KeyboardInterrupt()
    tracebacks.add_note(error, "[hftrainer] Last checkpoint: out.")
    run._print_script_traceback(KeyboardInterrupt, error, None)
    shown = capsys.readouterr().err.count("[hftrainer] Last checkpoint: out.\n"), caplog.messages
    assert shown == ((1, []) if version == (3, 11) else (0, ["Last checkpoint: out."]))
    assert handlers == {SIGINT: SIG_DFL}


@pytest.mark.parametrize("names", [["RANK", "LOCAL_RANK"], ["LOCAL_RANK", "NODE_RANK"]], ids=["torchrun", "devices"])
def test_only_the_main_process_shows_the_ctrl_c_traceback(monkeypatch, capsys, names):
    variables = {"WORLD_SIZE": "2", **dict.fromkeys(names, "1"), "NODE_RANK": "0"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    run._print_script_traceback(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("file", "place"), [("a.py", " in line 2 of a.py"), ("of_a_library.py", "")])
def test_ctrl_c_outside_of_training_is_a_line(capsys, file, place):
    with pytest.raises(KeyboardInterrupt) as caught:
        exec(compile("\nraise KeyboardInterrupt", file, "exec"))
    run._print_script_traceback(KeyboardInterrupt, caught.value, caught.tb, script="a.py")
    run._print_early_traceback(KeyboardInterrupt, caught.value, caught.tb)
    assert capsys.readouterr().err == f"\nInterrupted{place}.\n\nInterrupted before the script began.\n"


def test_loss_without_trainable_weights_is_refused(tmp_path):
    error = fail_to_train(tmp_path, {"compute_loss_func": lambda outputs, labels: outputs["logits"].mean().detach()})
    advice = "compute the loss from the model's outputs, without detach()"
    assert isinstance(error, InvalidSetup) and advice in str(error)


def make_callback(event, parameters):
    """A callback with a method of these parameters, which fails in itself too."""
    names = {}
    exec(f"def {event}(self, {parameters}): raise TypeError('mine')", names)
    return type("Callback", (hftrainer.TrainerCallback,), names)()


@pytest.mark.parametrize(
    ("event", "parameters", "is_wrong"),
    [
        ("on_step_end", "args, state", True),
        ("on_log", "args, state, control, losses, **kwargs", True),
        ("on_step_end", "args, state, control", False),
        ("on_log", "args, state, control, logs, **kwargs", False),
    ],
)
def test_callback_method_with_wrong_parameters_is_named(tmp_path, event, parameters, is_wrong):
    error = fail_to_train(tmp_path, {"callbacks": [make_callback(event, parameters)]})
    text = f"Callback.{event} is called with (args, state, control, **kwargs), but takes ({parameters})."
    assert [text == str(error), "mine" in str(error)] == [is_wrong, not is_wrong]


@pytest.mark.parametrize(
    "call",
    [
        lambda trainer: trainer.fit(),
        lambda trainer: trainer.add_callback(torch.nn.Linear(1, 1)),
        lambda trainer: trainer.push_to_hub(),
        lambda trainer: trainer.init_hf_repo(),
    ],
)
def test_refused_call_of_a_method_shows_the_line_of_the_script_alone(tmp_path, call):
    trainer = hftrainer.Trainer(make_plain(), hftrainer.TrainingArguments(str(tmp_path / "out"), use_cpu=True))
    with pytest.raises((ValueError, TypeError, RuntimeError)) as caught:
        call(trainer)
    assert [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)[1:]] == ["<lambda>"]


def test_refused_construction_shows_where_the_script_made_it(tmp_path):
    """The traceback has only the frames of the script, and no note on hidden frames of the engine."""
    with pytest.raises(ValueError, match="no_such") as of_arguments:
        hftrainer.TrainingArguments(str(tmp_path), optim="no_such")

    class Own(hftrainer.Trainer):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)

    with pytest.raises(ValueError, match="learning_rate=-1") as of_trainer:
        Own(model=make_plain(), args=hftrainer.TrainingArguments(str(tmp_path), use_cpu=True, learning_rate=-1))
    assert not hasattr(of_trainer.value, "__notes__")  # of hidden frames of an engine, as none ran
    parser = hftrainer.HfArgumentParser(hftrainer.TrainingArguments)
    with pytest.raises(ValueError, match="load_best_model_at_end needs") as of_values:
        parser.parse_args_into_dataclasses(["--load_best_model_at_end"])
    with pytest.raises(ValueError, match="did you mean '--optim'") as of_words:
        parser.parse_args_into_dataclasses(["--optin", "sgd"])
    (tmp_path / "x.json").write_text('{"optin": "sgd"}')
    with pytest.raises(ValueError, match="No dataclass has a field 'optin'") as of_file:
        parser.parse_json_file(tmp_path / "x.json")
    caught = (of_arguments, of_values, of_words, of_file, of_trainer)
    names = [[frame.name for frame in traceback.extract_tb(each.tb)][1:] for each in caught]
    assert names == [[], [], [], [], ["__init__"]]  # the script's own


@pytest.mark.parametrize(("error", "is_shown"), [(ModuleNotFoundError("no"), False), (ImportError("broken"), True)])
def test_missing_package_error_shows_its_cause(monkeypatch, error, is_shown):
    def fail_to_import(*_):
        raise error

    monkeypatch.setattr(panels.importlib, "import_module", fail_to_import)
    with pytest.raises(MissingPackage, match="pip install") as caught:
        panels.import_plotting("matplotlib.pyplot")
    assert ("broken" in "".join(traceback.format_exception(caught.value))) is is_shown


def made_of(make_model, data, **changes):
    samples = [{name: changes.get(name, lambda each: each)(value) for name, value in row.items()} for row in data()]
    return {"model": make_model(), "train_dataset": samples, "eval_dataset": samples, "compute_metrics": None}


def gpt2():
    return transformers.AutoModelForCausalLM.from_config(
        transformers.GPT2Config(vocab_size=50, n_positions=8, n_embd=8, n_layer=1, n_head=2)
    )


TOKENS = "0 to 49: use the model's tokenizer, or resize_token_embeddings."
CLASSES = "0 to 2: count them from 0, and load the model with num_labels to match."
INDICES = {
    "class": (made_of(make_bert, text_data, label=lambda _: 7), f"labels is 7, but the model accepts {CLASSES}"),
    "no transformers model": (made_of(make_plain, plain_data, labels=lambda _: torch.tensor(7)), f"accepts {CLASSES}"),
    "token": (made_of(make_bert, text_data, input_ids=lambda ids: ids * 0 + 60), f"input_ids is 60, .* {TOKENS}"),
    "next token": (made_of(make_llama, language_data, labels=lambda ids: ids * 0 + 60), "labels is 60, .* 0 to 49"),
    "position": (made_of(gpt2, language_data), "positions are 0 to 11, but the model accepts 0 to 7: shorten the s"),
    "length": (
        made_of(make_bert, text_data, input_ids=lambda ids: ids.repeat(4), attention_mask=lambda mask: mask.repeat(4)),
        "Samples of 48 tokens exceed max_position_embeddings=32: tokenize with truncation=True, max_length=32.",
    ),
}


@pytest.mark.parametrize(("trainer_kwargs", "note"), INDICES.values(), ids=INDICES)
def test_index_beyond_the_model_is_named(tmp_path, trainer_kwargs, note):
    for settings in ({}, {"eval_on_start": True}):
        notes = fail_to_train(tmp_path, trainer_kwargs, **settings).__notes__
        assert re.search(note, notes[1]), notes


def refuse(message):
    raise RuntimeError(message)


#: Part of the hint → a call that fails.
REFUSED = {
    "with use_cpu=True, the error names it": lambda: refuse("device-side assert triggered"),
    "Set the tokenizer's pad_": lambda: refuse("Cannot handle batch sizes > 1 if no padding token is defined."),
    "The loss gets no labels: add them": lambda: functional.cross_entropy(torch.ones(1, 3), None),
    "labels is 5, but the model accepts 0 to 2": lambda: functional.nll_loss(torch.ones(1, 3), torch.tensor([5])),
    "got 5 features but takes 8: correct x (4, 5) or the layer.": lambda: functional.linear(
        torch.ones(4, 5), torch.ones(16, 8)
    ),
    "got 7 rows of logits and 8 labels: compare y (8,).": lambda: functional.cross_entropy(
        torch.ones(7, 3), torch.ones(8).long()
    ),
    "the 3 channels: permute x (4, 5).": lambda: functional.conv2d(torch.ones(1, 5, 5, 3), torch.ones(4, 3, 3, 3)),
    "Sizes 5 and 9 differ: compare x (4, 5).": lambda: torch.ones(4, 5) + torch.ones(4, 9),
    "The input has integers, the weights are float32: convert": lambda: torch.nn.Linear(3, 3)(torch.ones(2, 3).byte()),
    "has integers, the weights are float32: convert it with .float()": lambda: torch.nn.Conv2d(1, 1, 1)(
        torch.ones(1, 1, 3, 3).long()
    ),
    "convert them with .long()": lambda: functional.embedding(torch.ones(2), torch.ones(3, 2)),
    "If gradient_checkpointing_kwargs has": lambda: checkpoint(
        torch.sin, torch.ones(1), use_reentrant=True, reentran=1
    ),
    "one class index per sample": lambda: functional.cross_entropy(torch.ones(8, 3), torch.ones(8, 2).long()),
    "with num_labels": lambda: functional.binary_cross_entropy_with_logits(torch.ones(8, 3), torch.ones(8, 2)),
}


@pytest.mark.parametrize("hint", REFUSED)
def test_known_error_gets_a_hint(hint):
    with pytest.raises((IndexError, RuntimeError, TypeError, ValueError)) as caught:
        REFUSED[hint]()
    note_batch(caught.value, "training step 1", {"x": torch.ones(4, 5), "y": torch.ones(8)}, None)
    assert hint in caught.value.__notes__[1]


def test_error_about_no_index_gets_no_hint():
    """Also for a batch that is no mapping, or longer than a model's positions, which some models allow."""
    model = SimpleNamespace(config=transformers.LlamaConfig(max_position_embeddings=4))
    for inputs in ([1], {"input_ids": torch.ones(2, 8)}, {"input_ids": torch.tensor(1)}, {"input_ids": None}):
        for error in (IndexError("list index out of range"), RuntimeError("shape '[2, 8]' is invalid")):
            note_batch(error, "training step 1", inputs, model)
            assert len(error.__notes__) == 1
