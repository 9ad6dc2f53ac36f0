"""FlagEmbedding's runners: embedders and rerankers trained with saves, evaluated, saved, and resumed."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from FlagEmbedding.abc.finetune.embedder import (
    AbsEmbedderDataArguments,
    AbsEmbedderModelArguments,
    AbsEmbedderTrainingArguments,
)
from FlagEmbedding.abc.finetune.reranker import (
    AbsRerankerDataArguments,
    AbsRerankerModelArguments,
    AbsRerankerTrainingArguments,
)
from FlagEmbedding.finetune.embedder.encoder_only.base import EncoderOnlyEmbedderRunner
from FlagEmbedding.finetune.embedder.encoder_only.m3 import (
    EncoderOnlyEmbedderM3ModelArguments,
    EncoderOnlyEmbedderM3Runner,
    EncoderOnlyEmbedderM3TrainingArguments,
)
from FlagEmbedding.finetune.reranker.encoder_only.base import EncoderOnlyRerankerRunner
from transformers import AutoModel, AutoModelForSequenceClassification

from tests.adapters.downstream import full_run
from tests.adapters.downstream.tiny_bert import save_bert, tokenizer
from tests.adapters.downstream.tiny_language import sentence

#: Kind of runner → its class, the classes of its arguments, and the kind of model it begins with.
KINDS: dict[str, tuple[type, type, type, type, type]] = {
    "embedder": (
        EncoderOnlyEmbedderRunner,
        AbsEmbedderModelArguments,
        AbsEmbedderDataArguments,
        AbsEmbedderTrainingArguments,
        AutoModel,
    ),
    "m3": (
        EncoderOnlyEmbedderM3Runner,
        EncoderOnlyEmbedderM3ModelArguments,
        AbsEmbedderDataArguments,
        EncoderOnlyEmbedderM3TrainingArguments,
        AutoModel,
    ),
    "reranker": (
        EncoderOnlyRerankerRunner,
        AbsRerankerModelArguments,
        AbsRerankerDataArguments,
        AbsRerankerTrainingArguments,
        AutoModelForSequenceClassification,
    ),
}


def save_rows(path: Path, first: int, end: int) -> str:
    rows = (
        {"query": sentence(index), "pos": [sentence(index + 20, 5)], "neg": [sentence(index + n, 4) for n in (30, 31)]}
        for index in range(first, end)
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def live(folder: Path, kind: str, data: dict[str, Any] | None = None, **settings: Any) -> dict[str, Any]:
    runner_class, model_arguments, data_arguments, arguments, model = KINDS[kind]
    words = save_bert(Path("words"), model, **({"num_labels": 1} if kind == "reranker" else {}))
    marked = tokenizer()
    marked.eos_token = marked.sep_token  # M3 asks for it
    marked.save_pretrained(words)
    rows = save_rows(Path("rows.jsonl"), 0, 40)

    def build(name: str) -> Any:
        runner = runner_class(
            model_arguments(words, cache_dir="cache"),
            data_arguments(train_data=[rows], cache_path="cache", train_group_size=3, **(data or {})),
            arguments(
                str(folder / name), **{**full_run.SETTINGS, "eval_strategy": "no", "eval_steps": None, **settings}
            ),
        )
        runner.trainer.eval_dataset = runner.train_dataset  # the runners give none
        return runner.trainer

    return full_run.record(build, folder, resumes=False)


CASES: dict[str, Callable[[Path], dict[str, Any]]] = {
    "embedder": partial(live, kind="embedder"),
    "embedder_one_set_a_batch": partial(
        live, kind="embedder", data={"same_dataset_within_batch": True}, dataloader_drop_last=True
    ),
    "embedder_m3": partial(live, kind="m3", unified_finetuning=True, use_self_distill=True),
    "reranker": partial(live, kind="reranker"),
}
