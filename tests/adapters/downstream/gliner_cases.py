"""GLiNER's Trainer: models that find names of any kind, trained with evaluations and saves, saved, and resumed."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gliner import GLiNER, GLiNERConfig
from gliner.training import Trainer, TrainingArguments

from tests.adapters.downstream import full_run
from tests.adapters.downstream.tiny_bert import save_bert
from tests.adapters.downstream.tiny_language import WORDS, sentence

ANIMALS = ("cat", "dog", "bird", "fish")


def marked(first: int, end: int, draws: bool = False) -> list[dict[str, Any]]:
    """Sentences, in which animals and colours are marked; with `draws` GLiNER draws the kinds that it asks for."""
    colours = ("red", "blue")
    kinds_given = {} if draws else {"ner_labels": ["animal", "colour", "place"]}
    rows = []
    for index in range(first, end):
        words = [*sentence(index).split(), ANIMALS[index % 4], colours[index % 2], WORDS[index % len(WORDS)]]
        kinds = {**dict.fromkeys(ANIMALS, "animal"), **dict.fromkeys(colours, "colour")}
        names = [[place, place, kinds[word]] for place, word in enumerate(words) if word in kinds]
        rows.append({"tokenized_text": words, "ner": names, **kinds_given})
    return rows


def live(folder: Path, span_mode: str = "markerV0", draws: bool = False, **settings: Any) -> dict[str, Any]:
    words = save_bert(Path("words"))

    def build(name: str) -> Trainer:
        torch.manual_seed(1)
        sizes = {"hidden_size": 16, "dropout": 0.0, "max_width": 3, "max_len": 24, "num_rnn_layers": 1}
        config = GLiNERConfig(model_name=words, span_mode=span_mode, **sizes)
        model = GLiNER.from_config(config, backbone_from_pretrained=False)
        return Trainer(
            model=model,
            args=TrainingArguments(
                str(folder / name), **{**full_run.SETTINGS, "remove_unused_columns": False, **settings}
            ),
            train_dataset=marked(0, 40, draws),
            eval_dataset=marked(40, 46, draws),
            data_collator=model._create_data_collator(),  # as GLiNER.train_model
            processing_class=model.data_processor.transformer_tokenizer,
        )

    return full_run.record(build, folder, alike=not draws)


CASES: dict[str, Callable[[Path], dict[str, Any]]] = {
    "spans": live,
    "tokens": partial(live, span_mode="token_level"),
    "kinds_drawn": partial(live, draws=True),
    "best_at_end": partial(live, load_best_model_at_end=True),
    "own_rates_and_warmup": partial(
        live, others_lr=1e-3, others_weight_decay=0.1, warmup_steps=0, warmup_ratio=0.5, focal_loss_alpha=0.75
    ),
}
