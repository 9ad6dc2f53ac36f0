"""pylate: ColBERT models in the Trainer of sentence-transformers, trained with evaluations and saves, and resumed."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from pylate import evaluation, losses, models, utils
from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments

from tests.adapters.downstream import full_run
from tests.adapters.downstream.tiny_bert import save_bert
from tests.adapters.downstream.tiny_language import sentence

SETTINGS = {**full_run.SETTINGS, "per_device_train_batch_size": 4}
COLUMNS = ("query", "positive", "negative")


def triples(first: int, end: int) -> list[tuple[str, str, str]]:
    return [(sentence(index), sentence(index + 20, 5), sentence(index + 30, 4)) for index in range(first, end)]


def contrasted(first: int, end: int) -> Dataset:
    return Dataset.from_list([dict(zip(COLUMNS, row, strict=True)) for row in triples(first, end)])


def distilled(first: int, end: int) -> Dataset:
    """Queries with the scores that a teacher has given to documents, by number."""
    rows = [
        {"query_id": index, "document_ids": [index, index + 1, index + 2], "scores": [1.0, index % 3 / 4, 0.1]}
        for index in range(first, end)
    ]
    texts = utils.KDProcessing(
        queries=Dataset.from_list([{"query_id": index, "text": sentence(index)} for index in range(60)]),
        documents=Dataset.from_list([{"document_id": index, "text": sentence(index + 9, 5)} for index in range(60)]),
    )
    dataset = Dataset.from_list(rows)
    dataset.set_transform(texts.transform)
    return dataset


def live(
    folder: Path,
    loss: Callable[[Any], Any] = losses.Contrastive,
    data: Callable[[int, int], Dataset] = contrasted,
    evaluates: bool = False,
    **settings: Any,
) -> dict[str, Any]:
    words = save_bert(Path("words"))

    def build(name: str) -> SentenceTransformerTrainer:
        torch.manual_seed(1)
        model = models.ColBERT(words, embedding_size=8, query_length=12, document_length=12, device="cpu")
        held_out = dict(zip(("anchors", "positives", "negatives"), zip(*triples(40, 46), strict=True), strict=True))
        return SentenceTransformerTrainer(
            model=model,
            args=SentenceTransformerTrainingArguments(str(folder / name), **{**SETTINGS, **settings}),
            train_dataset=data(0, 40),
            eval_dataset=data(40, 46),
            loss=loss(model=model),
            evaluator=evaluation.ColBERTTripletEvaluator(**held_out) if evaluates else None,
            data_collator=utils.ColBERTCollator(model.tokenize),
        )

    return full_run.record(build, folder)


CASES: dict[str, Callable[[Path], dict[str, Any]]] = {
    "contrastive": live,
    "contrastive_best_at_end": partial(
        live, evaluates=True, load_best_model_at_end=True, metric_for_best_model="accuracy"
    ),
    "cached_gradients": partial(
        live, loss=partial(losses.CachedContrastive, mini_batch_size=2), gradient_accumulation_steps=1
    ),
    "distillation": partial(live, loss=losses.Distillation, data=distilled, remove_unused_columns=False),
}
