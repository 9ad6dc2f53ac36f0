"""Batches with a budget of tokens, and batches without padding."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers

from hftrainer import Trainer, TrainingArguments
from hftrainer.data.samplers import EvenBatchSampler, ShardSpec, innermost
from hftrainer.data.token_batches import BucketCollator, FlatCollator, PackedBatchSampler, TokenBatchSampler
from hftrainer.errors import InvalidArgument, UnsupportedArgument
from hftrainer.model_card.card import TrainingSummary
from hftrainer.training.steps.counters import count_batch
from tests.support.token_batches import HEADS, SHAPE, llama, make_token_trainer, pad, samples

LENGTHS = np.clip(np.random.default_rng(0).lognormal(5, 0.8, 5000), 4, 2048).astype(int)


@pytest.mark.parametrize("kind", [TokenBatchSampler, PackedBatchSampler])
def test_batches_keep_the_budget_and_ranks_get_equally_many(kind: Any) -> None:
    sampler = kind(LENGTHS, 4096, 0)
    batches = list(sampler)
    assert sorted(index for batch in batches for index in batch) == list(range(len(LENGTHS)))
    longest = [len(batch) * LENGTHS[batch].max() for batch in batches]
    if kind is TokenBatchSampler:
        assert max(longest) <= 4096
        assert 1 - LENGTHS.sum() / sum(longest) <= 0.05
    assert max(LENGTHS[batch].sum() for batch in batches) <= 4096
    for processes in (2, 3):
        ranks = [EvenBatchSampler(sampler, ShardSpec(rank, processes)) for rank in range(processes)]
        assert {len(list(rank)) for rank in ranks} == {len(ranks[0])}
    sampler.set_epoch(1)
    other = list(sampler)
    assert len(other) == len(batches) == len(sampler)
    assert other != batches


def test_bucket_has_one_shape_when_completed_or_dropped() -> None:
    for options in ({"complete": True}, {"drop_last": True}):
        sampler = TokenBatchSampler(LENGTHS, 4096, 0, **options)
        bounds = np.asarray(sampler.boundaries)
        shapes = {(len(batch), int(np.searchsorted(bounds, LENGTHS[batch].max()))) for batch in sampler}
        assert len(list(sampler)) == len(sampler)
        assert len(shapes) <= len(bounds)


@pytest.mark.parametrize("kind", ["Llama", "Qwen2"])
@pytest.mark.parametrize("labelled", [True, False])
def test_flattened_gradients_match_padded_ones(tmp_path: Any, kind: str, labelled: bool) -> None:
    results = []
    for flat in (False, True):
        trainer = make_token_trainer(
            tmp_path, llama(kind), samples(8, labelled), max_steps=1, learning_rate=0.0, flatten_batches=flat,
            max_grad_norm=0.0, per_device_train_batch_size=8,
        )  # fmt: skip
        gradients: dict[str, torch.Tensor] = {}
        for name, weight in trainer.model.named_parameters():
            weight.register_hook(lambda gradient, name=name, into=gradients: into.update({name: gradient.clone()}))
        results.append((trainer.train().training_loss, gradients))
    (loss, padded), (flat_loss, flattened) = results
    assert abs(loss - flat_loss) < 1e-6
    assert len(padded) == len(list(llama(kind).parameters())) == len(flattened)
    for name, gradient in padded.items():
        assert gradient.abs().max() > 0
        torch.testing.assert_close(flattened[name], gradient, rtol=0, atol=1e-6)


@pytest.mark.parametrize("flat", [False, True])
def test_resume_within_an_epoch_is_exact(tmp_path: Any, flat: bool) -> None:
    settings = {"tokens_per_batch": 64, "flatten_batches": flat, "num_train_epochs": 2}
    whole = make_token_trainer(tmp_path / "whole", **settings, save_strategy="steps", save_steps=3)
    whole.train()
    resumed = make_token_trainer(tmp_path / "resumed", **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    assert resumed.state.global_step == whole.state.global_step > 6
    for ours, theirs in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_log_and_card_give_the_batch_size_in_tokens(tmp_path: Any, caplog: Any) -> None:
    caplog.set_level("INFO", logger="hftrainer")
    trainer = make_token_trainer(tmp_path, tokens_per_batch=64, gradient_accumulation_steps=3, max_steps=1)
    trainer.train()
    assert re.search(r"Most tokens in a batch of a device\W+64\b", caplog.text)
    assert "Batch size of a device" not in caplog.text
    told = TrainingSummary.from_trainer(trainer).hyperparameters
    assert (told["tokens_per_batch"], told["total_tokens_per_batch"]) == (64, 192)
    assert not {"train_batch_size", "total_train_batch_size"} & told.keys()


def test_model_that_mixes_flattened_samples_is_refused(tmp_path: Any) -> None:
    class Mixing(transformers.LlamaForCausalLM):
        def forward(self, *args: Any, attention_mask: Any = None, input_ids: Any = None, **others: Any) -> Any:
            mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
            return super().forward(*args, input_ids=input_ids, attention_mask=mask, **others)

    model = Mixing(transformers.LlamaConfig(**SHAPE, **HEADS))
    with pytest.raises(UnsupportedArgument, match="Mixing"):
        make_token_trainer(tmp_path, model, flatten_batches=True, max_steps=1).train()


def test_conflicting_arguments_are_refused(tmp_path: Any) -> None:
    with pytest.raises(InvalidArgument, match="sample 1 has 9 tokens"):
        TokenBatchSampler([3, 9], 8, 0)
    with pytest.raises(ValueError, match="train_sampling_strategy"):
        make_token_trainer(tmp_path, tokens_per_batch=64, train_sampling_strategy="group_by_length").train()
    with pytest.raises(ValueError, match="elastic"):
        make_token_trainer(tmp_path, tokens_per_batch=64, elastic=True).train()
    with pytest.raises(UnsupportedArgument, match="pad_to_multiple_of"):
        make_token_trainer(
            tmp_path, tokens_per_batch=64, torch_compile=True, torch_compile_backend="eager", max_steps=1
        ).train()


class Padding:
    pad_to_multiple_of: int | None = None

    def __call__(self, rows: list[Any]) -> dict[str, torch.Tensor]:
        batch = pad(rows)
        more = -batch["input_ids"].shape[1] % (self.pad_to_multiple_of or 1)
        fill = {"input_ids": 0, "labels": -100, "attention_mask": 0}
        return {name: torch.nn.functional.pad(value, (0, more), value=fill[name]) for name, value in batch.items()}


@pytest.mark.slow
def test_torch_compile_compiles_once_for_each_bucket(tmp_path: Any) -> None:
    torch._dynamo.reset()
    shapes = set()

    class Recording(Trainer):
        def training_step(self, model: Any, inputs: Any, *others: Any) -> Any:
            shapes.add(tuple(inputs["input_ids"].shape))
            return super().training_step(model, inputs, *others)

    args = TrainingArguments(
        str(tmp_path), tokens_per_batch=64, torch_compile=True, torch_compile_backend="eager", report_to="none",
        use_cpu=True, save_strategy="no", num_train_epochs=2,
    )  # fmt: skip
    trainer = Recording(llama(), args, train_dataset=samples(60), data_collator=Padding())
    torch._dynamo.utils.counters.clear()
    trainer.train()
    buckets = innermost(trainer.get_train_dataloader().batch_sampler).boundaries
    assert 1 < len(shapes) <= len(buckets)
    assert 0 < torch._dynamo.utils.counters["stats"]["unique_graphs"] <= len(buckets)


def test_flattening_leaves_out_padding_of_the_samples():
    collator = FlatCollator(transformers.DataCollatorWithFlattening())
    padded = [
        {"input_ids": [0, 0, 5, 6], "attention_mask": [0, 0, 1, 1]},
        {"input_ids": [7, 8, 0, 0], "attention_mask": [1, 1, 0, 0], "labels": [7, 8, -100, -100]},
    ]
    plain = [{"input_ids": [5, 6]}, {"input_ids": [7, 8]}]
    for name, value in collator([padded[0], {"input_ids": [7, 8]}]).items():
        assert torch.equal(value, collator(plain)[name])
    assert collator([padded[1]])["input_ids"].tolist() == [[7, 8]]


def test_long_samples_are_packed_one_by_one():
    assert len(PackedBatchSampler([2048] * 1000, 3000, seed=0)) == 1000


def test_length_column_that_is_too_low_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="9 tokens, more than any in the column of lengths"):
        BucketCollator(Padding(), [4, 8], "input_ids")([{"input_ids": [1] * 9}])


@pytest.mark.parametrize("settings", [{"target_modules": ["embed_tokens"]}, {"modules_to_save": ["embed_tokens"]}])
def test_embedding_adapters_train_on_flattened_batches(tmp_path: Any, settings: Any) -> None:
    config = peft.LoraConfig(**{"target_modules": ["q_proj"], **settings})
    trainer = make_token_trainer(
        tmp_path, peft.get_peft_model(llama(), config), flatten_batches=True, max_steps=2, learning_rate=0.1
    )
    before = [weight.clone() for weight in trainer.model.parameters() if weight.requires_grad]
    trainer.train()
    after = [weight for weight in trainer.model.parameters() if weight.requires_grad]
    assert trainer.state.global_step == 2 and not all(map(torch.equal, before, after))


def test_samples_of_a_flattened_row_are_counted(tmp_path: Any) -> None:
    row = {"input_ids": torch.ones(1, 5, dtype=torch.long), "position_ids": torch.tensor([[0, 1, 2, 0, 1]])}
    assert count_batch(make_token_trainer(tmp_path, flatten_batches=True), row) == (2, 5)
    assert count_batch(make_token_trainer(tmp_path), row) == (1, 5)


class Own(Trainer):
    """Makes its loader as `how` says."""

    how = "plain"

    def get_train_dataloader(self) -> Any:
        sampling: dict[str, Any] = {"batch_size": 2}
        if self.how == "batches of batches":
            sampling["sampler"] = self._get_train_sampler()
        elif self.how != "plain":
            sampling = {"batch_sampler": self._get_train_sampler()}
        loader: Any = torch.utils.data.DataLoader(samples(), collate_fn=pad, **sampling)
        return self.accelerator.prepare(loader) if self.how == "prepared" else loader


@pytest.mark.parametrize("how", ["plain", "batches of batches", "batches", "prepared"])
def test_overridden_train_dataloader_with_token_batches(tmp_path: Any, caplog: Any, how: str) -> None:
    args = TrainingArguments(str(tmp_path), tokens_per_batch=64, report_to="none", use_cpu=True, max_steps=2)
    trainer = Own(llama(), args, train_dataset=samples(), data_collator=pad)
    trainer.how = how
    if how == "batches of batches":
        with pytest.raises(InvalidArgument, match=r"yields batches, with tokens_per_batch.* as batch_sampler"):
            trainer.train()
        return
    trainer.train()
    has_no_effect = "tokens_per_batch has no effect: Own.get_train_dataloader" in caplog.text
    assert has_no_effect == (how == "plain")
