"""Runs through `install()` are those of the installed release of transformers, exactly.

The lane of each release runs this file in an environment of its own.
"""

import copy
import shutil
from pathlib import Path

import pytest
import torch
from transformers import BertForSequenceClassification

from tests.compat.installed import compare, installed, train_both
from tests.support.matrix import check_run, over_the_matrix
from tests.support.parity import assert_same, build, record, train
from tests.support.releases import TRANSFORMERS
from tests.support.tiny import make_bert, make_plain, plain_data


@over_the_matrix
def test_same_run(tmp_path, model, accumulation, length, precision, evaluation):
    case = {"model": model, "accumulation": accumulation, "length": length}
    check_run(compare, tmp_path, **case, precision=precision, evaluation=evaluation)


STEPS = {"eval_strategy": "steps", "eval_steps": 3, "save_strategy": "steps", "save_steps": 3}
ACCUMULATING = {"gradient_accumulation_steps": 4}  # 10 micro-batches: the last window has 2


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        # Of 20 steps the last is not a multiple of 3.
        pytest.param("plain", {**STEPS, "load_best_model_at_end": True}, id="best-model"),
        pytest.param("plain", {**STEPS, "load_best_model_at_end": True, "save_total_limit": 1}, id="best-limit-1"),
        pytest.param("plain", {"eval_strategy": "epoch", "save_strategy": "epoch"}, id="by-epoch"),
        pytest.param("plain", {"max_grad_norm": 0.0}, id="not-clipped"),
        pytest.param("plain", {**STEPS, "eval_on_start": True}, id="eval-on-start"),
        pytest.param("plain", {"num_train_epochs": 1.35, **ACCUMULATING}, id="part-of-an-epoch"),
        pytest.param("plain", {"max_steps": 9, **ACCUMULATING}, id="max-steps"),
        pytest.param("bert", {**STEPS, "label_smoothing_factor": 0.1}, id="smoothing"),
        pytest.param("llama", {**STEPS, "label_smoothing_factor": 0.1, **ACCUMULATING}, id="smoothing-accumulating"),
        pytest.param("llama", {**STEPS, "include_num_input_tokens_seen": True}, id="tokens-seen"),
        pytest.param("llama", {"neftune_noise_alpha": 5.0, "gradient_checkpointing": True}, id="neftune"),
        pytest.param("llama", {"optim": "adamw_torch", "lr_scheduler_type": "cosine"}, id="adamw-cosine"),
        pytest.param(
            "plain",
            {**STEPS, "lr_scheduler_type": "reduce_lr_on_plateau", "metric_for_best_model": "loss"},
            id="plateau",
        ),
    ],
)
def test_features(tmp_path, model, settings):
    compare(tmp_path, model, **settings)


@pytest.mark.parametrize(
    ("accumulation", "step"),
    [
        pytest.param(1, 4, id="mid-epoch"),
        pytest.param(1, 10, id="epoch-end"),
        pytest.param(3, 2, id="accumulating"),
        pytest.param(5, 3, id="full-windows"),
    ],
)
def test_resumed(tmp_path, accumulation, step):
    """Both go on from the checkpoint of the installed release."""
    if accumulation == 3 and TRANSFORMERS < (4, 52):
        pytest.skip("the ledger: a resumed run with a ragged last window (transformers before 4.52)")
    settings = {**STEPS, "save_steps": step, "gradient_accumulation_steps": accumulation, "logging_steps": 1}
    train("transformers", "llama", tmp_path / "whole", **settings)
    for who in ("ours", "theirs"):
        shutil.copytree(tmp_path / "whole" / f"checkpoint-{step}", tmp_path / who / f"checkpoint-{step}")
    compare(tmp_path, "llama", resume=True, **settings)


def test_a_resumed_run_with_another_batch_size(tmp_path):
    settings = {"save_strategy": "steps", "save_steps": 4, "max_steps": 7}
    train("transformers", "plain", tmp_path / "whole", **settings)
    for who in ("ours", "theirs"):
        shutil.copytree(tmp_path / "whole" / "checkpoint-4", tmp_path / who / "checkpoint-4")
    compare(tmp_path, "plain", resume=True, per_device_train_batch_size=6, ignore_data_skip=True, **settings)


def test_evaluate_and_predict_before_and_after(tmp_path):
    """The epoch in the log, the loss of language models, and what predictions consist of."""

    def run(folder):
        trainer, recorder = build("transformers", "llama", folder, max_steps=3)
        trainer.evaluate()
        trainer.train()
        output = trainer.predict(trainer.eval_dataset)
        return record(trainer, recorder, folder, names=sorted(output.metrics)), output

    theirs, their_output = run(tmp_path / "theirs")
    with installed():
        ours, our_output = run(tmp_path / "ours")
    assert_same(ours, theirs)
    assert (our_output.predictions == their_output.predictions).all()


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("model", ["plain", "llama"])
def test_items_that_a_loss_function_gets(tmp_path, model, accumulation):
    """Their number and type, in training and evaluation."""
    seen = []

    def loss(outputs, labels, num_items_in_batch=None):
        items = num_items_in_batch
        seen.append((str(getattr(items, "dtype", type(items))), None if items is None else float(items)))
        losses = torch.nn.functional.cross_entropy(outputs["logits"].flatten(0, -2), labels.flatten(), reduction="sum")
        return losses / (labels.numel() if items is None else items)

    settings = {**STEPS, "gradient_accumulation_steps": accumulation, "max_steps": 5}
    theirs = train("transformers", model, tmp_path / "theirs", trainer={"compute_loss_func": loss}, **settings)
    given, seen = seen, []
    with installed():
        ours = train("transformers", model, tmp_path / "ours", trainer={"compute_loss_func": loss}, **settings)
    assert seen == given
    assert_same(ours, theirs)


def test_an_infinite_loss_in_an_evaluation(tmp_path):
    data = copy.deepcopy(plain_data())
    data[3]["x"][0] = float("nan")
    theirs, ours = (
        result.logs for result in reversed(train_both(tmp_path, "plain", trainer={"eval_dataset": data}, **STEPS))
    )
    assert ours == theirs
    assert ("nan" in [line.get("eval_loss") for line in ours]) == (TRANSFORMERS < (5, 23))


def test_evaluation_grouped_by_length(tmp_path):
    """Which random numbers it draws, and so what training draws after it."""
    from tests.support.tiny import text_data

    data = [{**sample, "input_ids": sample["input_ids"][: 4 + i % 7]} for i, sample in enumerate(text_data())]
    for sample in data:
        sample["attention_mask"] = torch.ones_like(sample["input_ids"])

    def collate(samples):
        padded = torch.nn.utils.rnn.pad_sequence([sample["input_ids"] for sample in samples], batch_first=True)
        masks = torch.nn.utils.rnn.pad_sequence([sample["attention_mask"] for sample in samples], batch_first=True)
        return {"input_ids": padded, "attention_mask": masks, "labels": torch.tensor([s["label"] for s in samples])}

    by_length = {"group_by_length": True} if TRANSFORMERS < (5,) else {"train_sampling_strategy": "group_by_length"}
    sets = {"train_dataset": data, "eval_dataset": data[:19], "data_collator": collate}
    compare(tmp_path, "bert", trainer=sets, **STEPS, **by_length)


class Scale(torch.nn.Module):
    """A normalization of the script's own: no class that is known, and a name that is."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(16))

    def forward(self, x):
        return x * self.weight


def make_scaled():
    model = make_plain()
    model.layers[1] = torch.nn.Sequential()
    model.layers[1].add_module("norm", Scale())
    model.floating_point_ops = lambda inputs: 7 * len(inputs["x"])
    return model


def test_weight_decay_and_operations_of_a_model_of_ones_own(tmp_path):
    def run(folder):
        trainer, recorder = build("transformers", "plain", folder, trainer={"model": make_scaled()}, **STEPS)
        trainer.train()
        return record(trainer, recorder, folder, decays=trainer.get_decay_parameter_names(trainer.model))

    theirs = run(tmp_path / "theirs")
    with installed():
        ours = run(tmp_path / "ours")
    assert_same(ours, theirs)
    assert ("layers.1.norm.weight" in ours.extra["decays"]) == (TRANSFORMERS < (4, 53))


def test_special_tokens_and_printed_lines(tmp_path, capsys):
    """What the processing class changes in the model's config, and in which form log lines are printed."""
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    core = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[PAD]": 0, "[UNK]": 1, "[END]": 2}, unk_token="[UNK]"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="[PAD]", eos_token="[END]")

    def run(folder):
        model = make_bert()
        model.config.bos_token_id, model.config.eos_token_id = 7, 8
        capsys.readouterr()
        trainer, _ = build("transformers", "bert", folder, trainer={"model": model, "processing_class": tokenizer})
        trainer.train()
        lines = [line for line in capsys.readouterr().out.splitlines() if "'loss'" in line]
        return model.config.to_dict(), lines

    theirs = run(tmp_path / "theirs")
    with installed():
        ours = run(tmp_path / "ours")
    assert ours == theirs
    assert ours[1]


@pytest.mark.skipif(TRANSFORMERS < (4, 49), reason="set_initial_training_values is there since v4.49")
@pytest.mark.parametrize("settings", [{}, {"max_steps": 5, "gradient_accumulation_steps": 3}])
def test_the_lengths_of_a_run(tmp_path, settings):
    """With the signature of the release, and the values that it returns."""
    seen = []

    def lengths(library):
        class Lengths(library.Trainer):
            def set_initial_training_values(self, args, dataloader, *more):
                values = super().set_initial_training_values(args, dataloader, *more)
                seen.append((more, tuple(values), [type(value) for value in values]))
                return tuple(values)

        return Lengths

    assert_same(*train_both(tmp_path, "plain", trainer_class=lengths, **settings))
    ours, theirs = seen
    assert ours == theirs
    assert bool(ours[0]) == (TRANSFORMERS < (5, 3))


def test_a_package_that_the_script_holds_is_swapped_too():
    """`import transformers` may give another module than `sys.modules` has later: it executes itself again."""
    import sys

    import transformers

    with installed():
        assert {transformers.Trainer, sys.modules["transformers"].Trainer} == {transformers.trainer.Trainer}
        assert transformers.Trainer.__module__ == "hftrainer.trainer"
    assert {transformers.Trainer, sys.modules["transformers"].Trainer} == {transformers.trainer.Trainer}
    assert transformers.Trainer.__module__ == "transformers.trainer"


class OwnDefault(BertForSequenceClassification):
    """Saves .bin files where it is not told to write safetensors, as SpanMarker's models do."""

    def save_pretrained(self, save_directory, safe_serialization=False, **kwargs):
        super().save_pretrained(save_directory, safe_serialization=safe_serialization, **kwargs)
        Path(save_directory, "told").write_text(str(safe_serialization))


def test_a_model_with_another_format_by_default(tmp_path):
    settings = {"save_strategy": "epoch", "trainer": {"model_init": lambda: OwnDefault(make_bert().config)}}
    assert_same(*train_both(tmp_path, "bert", **settings))
    told = [(tmp_path / who / "checkpoint-10" / "told").read_text() for who in ("ours", "theirs")]
    assert told[0] == told[1] == str(TRANSFORMERS < (5, 0))
