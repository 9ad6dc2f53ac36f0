"""Trainers of setfit: each trained with evaluations and saves, evaluated, saved, and followed by one on what was saved.

setfit's `train()` resumes no checkpoint. AbsaTrainer needs spaCy and a language model that only its site has.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from setfit import DistillationTrainer, SetFitModel, Trainer, TrainingArguments
from transformers import TrainerCallback

from tests.adapters.downstream import records
from tests.adapters.downstream.tiny_bert import save_bert
from tests.adapters.downstream.tiny_language import sentence

SETTINGS = {"batch_size": 4, "max_steps": 6, "body_learning_rate": 1e-3, "logging_steps": 2, "logging_first_step": True}
SETTINGS |= {"eval_strategy": "steps", "eval_steps": 3, "eval_max_steps": 2, "save_strategy": "steps", "save_steps": 3}
SETTINGS |= {"report_to": "none", "show_progress_bar": False}
EVENTS = ("on_train_begin", "on_step_end", "on_log", "on_evaluate", "on_save", "on_train_end")


class Witness(TrainerCallback):
    def __init__(self) -> None:
        self.seen: list[list[str]] = []


def _noting(event: str) -> Callable[..., None]:
    def note(self: Witness, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        own = {name: type(kwargs[name]).__name__ for name in ("model", "st_model") if name in kwargs}
        self.seen.append([event, state.global_step, type(args).__name__, own, sorted(kwargs)])

    return note


for _event in EVENTS:
    setattr(Witness, _event, _noting(_event))


def rows(first: int, end: int) -> Dataset:
    return Dataset.from_list([{"text": sentence(index), "label": index % 3} for index in range(first, end)])


def accuracy(predicted: Any, wanted: Any) -> dict[str, float]:
    return {"accuracy": float(np.mean(np.asarray(predicted) == np.asarray(wanted)))}


def save_body(folder: Path) -> str:
    words = Transformer(save_bert(folder.with_name("words")))
    SentenceTransformer(modules=[words, Pooling(words.get_embedding_dimension())], device="cpu").save(str(folder))
    return str(folder)


def head_of(model: SetFitModel) -> dict[str, str]:
    if hasattr(model.model_head, "state_dict"):
        return records.weights(model.model_head)
    return {"coef": records.digest(model.model_head.coef_), "intercept": records.digest(model.model_head.intercept_)}


def life(trainer: Any, folder: Path) -> dict[str, Any]:
    """Train, evaluate and save; the log and the weights are those of the Trainer for the model's body."""
    witness = Witness()
    trainer.add_callback(witness)
    trainer.train()
    metrics = trainer.evaluate()
    model = trainer.student_model if isinstance(trainer, DistillationTrainer) else trainer.model
    model.save_pretrained(str(folder / "final"))
    cards = records.cards(folder)
    return records.of(trainer.st_trainer, folder, head=head_of(model), metrics=metrics, seen=witness.seen, cards=cards)


def classify(folder: Path, differentiable: bool = False, **settings: Any) -> dict[str, Any]:
    start = save_body(Path("body"))
    head = {"use_differentiable_head": True, "head_params": {"out_features": 3}} if differentiable else {}

    def build(name: str, model: str) -> Trainer:
        return Trainer(
            model=SetFitModel.from_pretrained(model, device="cpu", **head),
            args=TrainingArguments(str(folder / name), **{**SETTINGS, **settings}),
            train_dataset=rows(0, 12),
            eval_dataset=rows(12, 18),
            metric=accuracy,
        )

    first = life(build("run", start), folder)
    return {**first, "second": life(build("second", str(folder / "final")), folder)}


def distil(folder: Path) -> dict[str, Any]:
    body = save_body(Path("body"))
    teacher, student = (SetFitModel.from_pretrained(body, device="cpu") for _ in range(2))
    Trainer(
        model=teacher,
        args=TrainingArguments(str(folder / "teacher"), **SETTINGS),
        train_dataset=rows(0, 12),
        eval_dataset=rows(12, 18),
        metric=accuracy,
    ).train()
    trainer = DistillationTrainer(
        teacher_model=teacher,
        student_model=student,
        args=TrainingArguments(str(folder / "run"), **{**SETTINGS, "eval_strategy": "no", "eval_steps": None}),
        train_dataset=rows(0, 12),
        eval_dataset=rows(12, 18),
        metric=accuracy,
    )
    return life(trainer, folder)


CASES: dict[str, Callable[[Path], dict[str, Any]]] = {
    "classifier": classify,
    "best_at_end": partial(classify, load_best_model_at_end=True, body_learning_rate=1e-2),
    "differentiable_head": partial(classify, differentiable=True, num_epochs=1),
    "by_epochs": partial(
        classify, max_steps=-1, num_epochs=2, num_iterations=1, eval_strategy="epoch", save_strategy="epoch"
    ),
    "distillation": distil,
}
