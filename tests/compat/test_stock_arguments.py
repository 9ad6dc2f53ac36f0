"""Our Trainer, with the TrainingArguments of the installed transformers: a script has changed one import alone."""

import dataclasses
import pickle
import warnings

import pytest
import torch
import transformers

import hftrainer
from tests.support.parity import comparable
from tests.support.releases import TRANSFORMERS
from tests.support.tiny import make_bert, text_data

BEFORE_5 = TRANSFORMERS < (5,)
SETTINGS = [
    {},
    {"group_by_length": True} if BEFORE_5 else {"train_sampling_strategy": "group_by_length"},
    {"warmup_ratio": 0.5} if BEFORE_5 else {"warmup_steps": 0.5},
    {"include_num_input_tokens_seen": True},
    {"gradient_checkpointing": True},
]


def data_of_many_lengths() -> list[dict]:
    data = text_data(20)
    for i, sample in enumerate(data):
        for name in ("input_ids", "attention_mask"):
            sample[name] = sample[name][: 3 + i % 9]
    return data


def pad(samples: list[dict]) -> dict[str, torch.Tensor]:
    names = ("input_ids", "attention_mask")
    batch = {
        name: torch.nn.utils.rnn.pad_sequence([each[name] for each in samples], batch_first=True) for name in names
    }
    return {**batch, "labels": torch.tensor([each["label"] for each in samples])}


def trained(library, folder, **settings):
    args = library.TrainingArguments(
        str(folder),
        **{"max_steps": 4, "per_device_train_batch_size": 4, "logging_steps": 1, "optim": "adamw_torch", **settings},
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    trainer = hftrainer.Trainer(make_bert(), args, data_collator=pad, train_dataset=data_of_many_lengths())
    trainer.train()
    return trainer


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: next(iter(settings), "plain"))
def test_they_train_as_ours_do(tmp_path, settings):
    theirs = trained(transformers, tmp_path / "theirs", **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # old names of arguments
        ours = trained(hftrainer, tmp_path / "ours", **settings)
    for trainer in (theirs, ours):
        assert (trainer.state.log_history[-1].get("num_input_tokens_seen", 0) > 0) == (
            "include_num_input_tokens_seen" in settings
        )
        assert trainer.model.is_gradient_checkpointing == ("gradient_checkpointing" in settings)
    assert comparable(theirs.state.log_history) == comparable(ours.state.log_history)
    for name, tensor in ours.model.state_dict().items():
        assert torch.equal(tensor, theirs.model.state_dict()[name]), name


def test_they_stay_what_they_are(tmp_path):
    """What an older release lacks is on the object, and no field of it."""
    args = transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    before = args.to_dict()
    trainer = hftrainer.Trainer(make_bert(), args)
    assert trainer.args is args
    assert args.to_dict() == before
    assert all(hasattr(args, field.name) for field in dataclasses.fields(hftrainer.TrainingArguments) if not old(field))
    assert pickle.loads(pickle.dumps(args)).to_dict() == before


def old(field) -> bool:
    return field.name in hftrainer.arguments.legacy.LegacyArguments.__dataclass_fields__
