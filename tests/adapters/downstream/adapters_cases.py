"""Trainers of AdapterHub's `adapters`: each trained with evaluations and saves, saved, and resumed."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from adapters.composition import Fuse
from datasets import Dataset
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    DataCollatorForSeq2Seq,
    DataCollatorWithPadding,
    Seq2SeqTrainingArguments,
    TrainingArguments,
)

import adapters
from adapters import AdapterTrainer, AutoAdapterModel, Seq2SeqAdapterTrainer
from tests.adapters.downstream import full_run
from tests.adapters.downstream.tiny_bert import MARKS, config, tokenizer
from tests.adapters.downstream.tiny_language import WORDS, sentence


def labelled(first: int, end: int) -> Dataset:
    words = tokenizer()
    return Dataset.from_list([{**words(sentence(index)), "labels": index % 3} for index in range(first, end)])


def translated(first: int, end: int) -> Dataset:
    words = tokenizer()
    return Dataset.from_list(
        [{**words(sentence(index)), "labels": words(sentence(index + 1, 4)).input_ids} for index in range(first, end)]
    )


def classifier(kind: str) -> Any:
    torch.manual_seed(1)
    model = AutoAdapterModel.from_config(config())
    model.add_adapter("task", config=kind)
    model.add_classification_head("task", num_labels=3)
    model.train_adapter("task")
    return model


def fused() -> Any:
    torch.manual_seed(1)
    model = AutoAdapterModel.from_config(config())
    for name in ("first", "second"):
        model.add_adapter(name, config="seq_bn")
    both = Fuse("first", "second")
    model.add_adapter_fusion(both)
    model.add_classification_head("task", num_labels=3)
    model.active_head = "task"
    model.train_adapter_fusion(both)
    return model


def translator() -> Any:
    torch.manual_seed(1)
    marks = {f"{name}_token_id": number for number, name in enumerate(("pad", "unk", "bos", "eos"))}
    sizes = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    sizes |= {"encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "d_model": 16, "max_position_embeddings": 32}
    ends = dict.fromkeys(("decoder_start_token_id", "forced_eos_token_id"), marks["eos_token_id"])
    config = BartConfig(vocab_size=len(MARKS) + len(WORDS), dropout=0.0, **sizes, **ends, **marks)
    model = BartForConditionalGeneration(config)
    adapters.init(model)
    model.add_adapter("task", config="seq_bn")
    model.train_adapter("task")
    return model


def live(folder: Path, make: Callable[[], Any], **settings: Any) -> dict[str, Any]:
    """The record of an AdapterTrainer's life; `make()` gives the model, `settings` go before those of all cases."""

    def build(name: str) -> AdapterTrainer:
        args = TrainingArguments(str(folder / name), **{**full_run.SETTINGS, **settings})
        return AdapterTrainer(
            make(),
            args,
            train_dataset=labelled(0, 40),
            eval_dataset=labelled(40, 46),
            data_collator=DataCollatorWithPadding(tokenizer()),
        )

    return full_run.record(build, folder)


def generate(folder: Path) -> dict[str, Any]:
    """The record of a Seq2SeqAdapterTrainer's life, with what it writes for the evaluation set."""
    made = []

    def build(name: str) -> Seq2SeqAdapterTrainer:
        args = Seq2SeqTrainingArguments(
            str(folder / name), predict_with_generate=True, generation_max_length=8, **full_run.SETTINGS
        )
        model = translator()
        made.append(
            Seq2SeqAdapterTrainer(
                model,
                args,
                train_dataset=translated(0, 40),
                eval_dataset=translated(40, 46),
                data_collator=DataCollatorForSeq2Seq(tokenizer(), model),
                compute_metrics=lambda found: {"words": float((found.predictions > 0).sum())},
            )
        )
        return made[-1]

    record = full_run.record(build, folder)
    return {**record, "predictions": made[0].predict(translated(40, 46)).predictions.tolist()}


CASES: dict[str, Callable[[Path], dict[str, Any]]] = {
    "bottleneck": partial(live, make=partial(classifier, "seq_bn")),
    "bottleneck_best_at_end": partial(live, make=partial(classifier, "seq_bn"), load_best_model_at_end=True),
    "lora": partial(live, make=partial(classifier, "lora")),
    "prefix_tuning": partial(live, make=partial(classifier, "prefix_tuning")),
    "fusion": partial(live, make=fused),
    "generation": generate,
}
