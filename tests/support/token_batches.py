"""A language model, and samples of different lengths."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import transformers

from hftrainer import Trainer, TrainingArguments

SHAPE = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64}


def llama(kind: str = "Llama") -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SHAPE, **HEADS, pad_token_id=0)
    return getattr(transformers, f"{kind}ForCausalLM")(config)


def samples(count: int = 24, labelled: bool = True) -> list[dict[str, Any]]:
    drawn = np.random.default_rng(1)
    rows = [drawn.integers(1, 64, drawn.integers(3, 30)).tolist() for _ in range(count)]
    return [{"input_ids": row, **({"labels": row} if labelled else {})} for row in rows]


def pad(rows: list[Any]) -> dict[str, torch.Tensor]:
    width = max(len(row["input_ids"]) for row in rows)
    ids = [row["input_ids"] + [0] * (width - len(row["input_ids"])) for row in rows]
    labels = [row["input_ids"] + [-100] * (width - len(row["input_ids"])) for row in rows]
    mask = [[1] * len(row["input_ids"]) + [0] * (width - len(row["input_ids"])) for row in rows]
    return {"input_ids": torch.tensor(ids), "labels": torch.tensor(labels), "attention_mask": torch.tensor(mask)}


def make_token_trainer(
    folder: Any, model: Any = None, data: Any = None, collator: Any = pad, **settings: Any
) -> Trainer:
    defaults = {"report_to": "none", "use_cpu": True, "disable_tqdm": True, "logging_strategy": "no"}
    args = TrainingArguments(str(folder), **{**defaults, "save_strategy": "no", **settings})  # type: ignore[arg-type]
    return Trainer(model or llama(), args, train_dataset=data or samples(), data_collator=collator)
