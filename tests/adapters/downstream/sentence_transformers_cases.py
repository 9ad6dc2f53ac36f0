"""Trainers of sentence-transformers: each trained with evaluations and saves, evaluated, saved, and resumed."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import sentence_transformers
from datasets import Dataset, DatasetDict
from sentence_transformers import CrossEncoder, SentenceTransformer, SparseEncoder
from sentence_transformers.cross_encoder import losses as pair_losses
from sentence_transformers.cross_encoder.evaluation import CrossEncoderCorrelationEvaluator
from sentence_transformers.sentence_transformer import losses
from sentence_transformers.sentence_transformer.evaluation import EmbeddingSimilarityEvaluator
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from sentence_transformers.sparse_encoder import losses as sparse_losses
from sentence_transformers.sparse_encoder.evaluation import SparseEmbeddingSimilarityEvaluator
from sentence_transformers.sparse_encoder.modules import SpladePooling
from transformers import AutoModelForMaskedLM, AutoModelForSequenceClassification

from tests.adapters.downstream import full_run
from tests.adapters.downstream.tiny_bert import save_bert
from tests.adapters.downstream.tiny_language import sentence

SETTINGS = {**full_run.SETTINGS, "per_device_train_batch_size": 4}


def scored(index: int) -> dict[str, Any]:
    return {"first": sentence(index), "second": sentence(index + 3, 4), "score": index % 5 / 4}


def paired(index: int) -> dict[str, Any]:
    """Questions with answers, some of which come again: those must not be in one batch."""
    return {"anchor": sentence(index), "positive": sentence(index % 10 + 20, 5)}


def triple(index: int) -> dict[str, Any]:
    return {**paired(index), "negative": sentence(index + 30, 4)}


def classified(index: int) -> dict[str, Any]:
    return {"text": sentence(index), "label": index % 4}


def listed(index: int) -> dict[str, Any]:
    answers = [sentence(index + place, 4) for place in range(3 + index % 2)]
    return {"query": sentence(index), "docs": answers, "labels": [float(place == 0) for place in range(len(answers))]}


def rows(data: Callable[[int], dict[str, Any]], first: int, end: int) -> Dataset:
    return Dataset.from_list([data(index) for index in range(first, end)])


def embedder(dropout: float) -> SentenceTransformer:
    words = Transformer(save_bert(Path("model"), dropout=dropout))
    return SentenceTransformer(modules=[words, Pooling(words.get_embedding_dimension())])


def sparse_embedder(dropout: float) -> SparseEncoder:
    words = Transformer(save_bert(Path("model"), AutoModelForMaskedLM, dropout), transformer_task="fill-mask")
    return SparseEncoder(modules=[words, SpladePooling()])


def judge(dropout: float) -> CrossEncoder:
    return CrossEncoder(save_bert(Path("model"), AutoModelForSequenceClassification, dropout, num_labels=1))


#: Kind of model → how it is made, the class before Trainer and TrainingArguments in their names, and its evaluator.
KINDS: dict[str, tuple[Callable[[float], Any], type, type]] = {
    "dense": (embedder, SentenceTransformer, EmbeddingSimilarityEvaluator),
    "sparse": (sparse_embedder, SparseEncoder, SparseEmbeddingSimilarityEvaluator),
    "pairs": (judge, CrossEncoder, CrossEncoderCorrelationEvaluator),
}


def evaluator_of(kind: type) -> Any:
    held_out = [scored(index) for index in range(40, 52)]
    columns = [[row[name] for row in held_out] for name in ("first", "second", "score")]
    if kind is CrossEncoderCorrelationEvaluator:
        return kind(list(zip(*columns[:2], strict=True)), columns[2], name="held-out")
    return kind(*columns, name="held-out")


def live(
    folder: Path,
    kind: str,
    loss: Callable[[Any], Any],
    data: Any,
    *,
    evaluates: bool = False,
    dropout: float = 0.0,
    **settings: Any,
) -> dict[str, Any]:
    """The record of a Trainer's life; `data` makes a row of its number, or has such functions by dataset.

    With dropout the model draws random numbers, and is not resumed: there both libraries differ on purpose.
    """
    make, model_class, evaluator = KINDS[kind]
    names = (f"{model_class.__name__}{part}" for part in ("Trainer", "TrainingArguments"))
    trainer_class, arguments = (getattr(sentence_transformers, name) for name in names)
    sets = data if isinstance(data, dict) else {"only": data}
    train = DatasetDict({name: rows(row, 0, 40) for name, row in sets.items()})
    held_out = DatasetDict({name: rows(row, 40, 52) for name, row in sets.items()})
    start = make(dropout)
    start.save(str(folder / "start"))

    def build(name: str) -> Any:
        model = model_class(str(folder / "start"))
        return trainer_class(
            model=model,
            args=arguments(str(folder / name), **{**SETTINGS, **settings}),
            train_dataset=train if isinstance(data, dict) else train["only"],
            eval_dataset=held_out if isinstance(data, dict) else held_out["only"],
            loss=loss(model),
            evaluator=evaluator_of(evaluator) if evaluates else None,
        )

    return full_run.record(build, folder, resumes=not dropout)


def splade(model: SparseEncoder) -> Any:
    """Logs its parts, and a callback of the library raises the weight of two of them."""
    inner = sparse_losses.SparseMultipleNegativesRankingLoss(model)
    return sparse_losses.SpladeLoss(model, inner, document_regularizer_weight=0.03, query_regularizer_weight=0.05)


def each_its_own(model: SentenceTransformer) -> dict[str, Any]:
    return {"scored": losses.CoSENTLoss(model), "pairs": losses.MultipleNegativesRankingLoss(model)}


BEST = {"load_best_model_at_end": True, "metric_for_best_model": "eval_held-out_spearman_cosine"}
TWO_SETS = {"scored": scored, "pairs": paired}
dense, sparse, pairs = (partial(live, kind=kind) for kind in KINDS)
CASES: dict[str, Callable[[Path], dict[str, Any]]] = {
    "dense_scored_best_at_end": partial(
        dense, loss=losses.CoSENTLoss, data=scored, evaluates=True, learning_rate=0.05, **BEST
    ),
    "dense_dropout": partial(dense, loss=losses.CosineSimilarityLoss, data=scored, dropout=0.1),
    "dense_no_duplicates": partial(
        dense, loss=losses.MultipleNegativesRankingLoss, data=paired, batch_sampler="no_duplicates"
    ),
    "dense_cached_gradients": partial(
        dense,
        loss=partial(losses.CachedMultipleNegativesRankingLoss, mini_batch_size=2),
        data=triple,
        gradient_accumulation_steps=1,
    ),
    "dense_matryoshka": partial(
        dense,
        loss=lambda model: losses.MatryoshkaLoss(model, losses.MultipleNegativesRankingLoss(model), [16, 8]),
        data=triple,
        prompts={"anchor": "what ", "positive": "here "},
    ),
    "dense_by_label": partial(dense, loss=losses.BatchAllTripletLoss, data=classified, batch_sampler="group_by_label"),
    "dense_learning_rates": partial(
        dense, loss=losses.CoSENTLoss, data=scored, learning_rate_mapping={r".*embeddings.*": 1e-1}
    ),
    "dense_two_sets_in_turn": partial(
        dense, loss=each_its_own, data=TWO_SETS, multi_dataset_batch_sampler="round_robin"
    ),
    "dense_two_sets_by_size": partial(dense, loss=each_its_own, data=TWO_SETS, evaluates=True),
    "sparse_splade": partial(sparse, loss=splade, data=triple),
    "sparse_evaluator": partial(
        sparse,
        loss=lambda model: sparse_losses.SpladeLoss(
            model, sparse_losses.SparseCoSENTLoss(model), document_regularizer_weight=0.01
        ),
        data=scored,
        evaluates=True,
    ),
    "pairs_scored": partial(pairs, loss=pair_losses.BinaryCrossEntropyLoss, data=scored, evaluates=True),
    "pairs_dropout": partial(pairs, loss=pair_losses.MSELoss, data=scored, dropout=0.1),
    "pairs_lists": partial(pairs, loss=pair_losses.LambdaLoss, data=listed),
}
