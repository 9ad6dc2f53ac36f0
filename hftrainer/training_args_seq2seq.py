"""`Seq2SeqTrainingArguments`: the arguments of `Seq2SeqTrainer`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hftrainer.arguments.fields.argument import arg, begin_subject
from hftrainer.training_args import TrainingArguments


@dataclass
class Seq2SeqTrainingArguments(TrainingArguments):
    """`TrainingArguments` with arguments for generation, for `Seq2SeqTrainer`."""

    begin_subject("Models that generate")

    sortish_sampler: bool = arg(
        False, "Group training samples of similar length, as `train_sampling_strategy='group_by_length'` does.", "4.15"
    )
    predict_with_generate: bool = arg(
        False, "Predict with `model.generate` in evaluation, for metrics like BLEU.", "4.15"
    )
    generation_max_length: int | None = arg(
        None, "Maximum number of tokens in a generated sequence; None uses the model's.", "4.15"
    )
    generation_num_beams: int | None = arg(None, "Number of beams; None uses the model's.", "4.15")
    generation_config: str | Path | Any | None = arg(
        None, "A `GenerationConfig`, or the path or model id of one; replaces the model's.", "4.30"
    )

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON-serializable values, with the generation config as a dict."""
        return {
            name: value.to_dict() if name == "generation_config" and hasattr(value, "to_dict") else value
            for name, value in super().to_dict().items()
        }
