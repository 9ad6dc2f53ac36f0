"""SpanMarker's Trainer: models that find names, trained with evaluations and saves, saved, and resumed."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from span_marker import SpanMarkerModel, Trainer
from transformers import TrainingArguments

from tests.adapters.downstream import full_run
from tests.adapters.downstream.tiny_bert import save_bert
from tests.adapters.downstream.tiny_language import sentence

LABELS = ["O", "B-animal", "I-animal", "B-colour"]
#: What `evaluate.load("seqeval")` finds in the working folder; the Hub has one that says the same of these numbers.
METRIC = """
import datasets
import evaluate
from seqeval.metrics import accuracy_score, f1_score, precision_score, recall_score

class Seqeval(evaluate.Metric):
    def _info(self):
        words = datasets.Sequence(datasets.Value("string"))
        both = datasets.Features({"predictions": words, "references": words})
        return evaluate.MetricInfo(description="", citation="", inputs_description="", features=both)

    def _compute(self, predictions, references, **_):
        found = {"precision": precision_score, "recall": recall_score, "f1": f1_score, "accuracy": accuracy_score}
        return {f"overall_{name}": score(references, predictions) for name, score in found.items()}
"""
NAMES = {"cat": 1, "dog": 1, "bird": 1, "fish": 2, "red": 3, "blue": 3}


def marked(first: int, end: int, documents: bool = False) -> Dataset:
    """Sentences with a label a word; with `documents`, four of them in a row belong together."""
    rows = []
    for index in range(first, end):
        words = [*sentence(index).split(), "cat", "fish" if index % 2 else "red"]
        place = {"document_id": index // 4, "sentence_id": index % 4} if documents else {}
        rows.append({"tokens": words, "ner_tags": [NAMES.get(word, 0) for word in words], **place})
    return Dataset.from_list(rows)


def live(folder: Path, documents: bool = False, by_init: bool = False, **settings: Any) -> dict[str, Any]:
    words = save_bert(Path("words"))
    Path("seqeval").mkdir()
    Path("seqeval", "seqeval.py").write_text(METRIC)

    def model() -> SpanMarkerModel:
        torch.manual_seed(1)
        return SpanMarkerModel.from_pretrained(
            words, labels=LABELS, model_max_length=24, marker_max_length=16, entity_max_length=3
        )

    def build(name: str) -> Trainer:
        return Trainer(
            **({"model_init": model} if by_init else {"model": model()}),
            args=TrainingArguments(str(folder / name), **{**full_run.SETTINGS, **settings}),
            train_dataset=marked(0, 40, documents),
            eval_dataset=marked(40, 46, documents),
        )

    return full_run.record(build, folder)


CASES: dict[str, Callable[[Path], dict[str, Any]]] = {
    "words": live,
    "best_at_end": partial(live, load_best_model_at_end=True, metric_for_best_model="overall_f1"),
    "documents": partial(live, documents=True),
    "model_init": partial(live, by_init=True),
}
