"""An ordinary Trainer script: it knows nothing of hftrainer. The tests run it with and without."""

import hashlib
import json
from dataclasses import dataclass, field

import datasets
import numpy as np
import tokenizers
import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DataCollatorWithPadding,
    EarlyStoppingCallback,
    HfArgumentParser,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)


@dataclass
class DataArguments:
    samples: int = field(default=60, metadata={"help": "How many samples to make."})


class CountSteps(TrainerCallback):
    steps = 0

    def on_step_end(self, args, state, control, **kwargs):
        CountSteps.steps += 1


def make_tokenizer():
    vocabulary = {"[PAD]": 0, "[UNK]": 1, **{f"w{i}": i for i in range(2, 50)}}
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    core.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="[PAD]", unk_token="[UNK]")


def main():
    torch.set_num_threads(1)
    data_args, training_args = HfArgumentParser((DataArguments, TrainingArguments)).parse_args_into_dataclasses()
    set_seed(training_args.seed)
    tokenizer = make_tokenizer()
    rows = {
        "text": [" ".join(f"w{2 + (i * j) % 47}" for j in range(3 + i % 6)) for i in range(data_args.samples)],
        "label": [i % 3 for i in range(data_args.samples)],
    }
    data = datasets.Dataset.from_dict(rows).map(lambda batch: tokenizer(batch["text"]), batched=True)
    split = data.train_test_split(test_size=0.25, seed=0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = BertConfig(vocab_size=50, max_position_embeddings=32, num_labels=3, **sizes)
    trainer = Trainer(
        model=BertForSequenceClassification(config),
        args=training_args,
        train_dataset=split["train"],
        eval_dataset=split["test"],
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=lambda p: {"accuracy": float((np.argmax(p.predictions, -1) == p.label_ids).mean())},
        callbacks=[EarlyStoppingCallback(early_stopping_patience=50), CountSteps],
    )
    result = trainer.train()
    trainer.save_model()
    trainer.save_state()
    metrics = trainer.evaluate()
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)
    weights = b"".join(value.numpy().tobytes() for _, value in sorted(trainer.model.state_dict().items()))
    measured = ("_runtime", "_per_second", "_time")
    report = {
        "trainer": type(trainer).__module__.split(".")[0],
        "steps": [result.global_step, CountSteps.steps],
        "loss": result.training_loss,
        "logs": [{k: v for k, v in line.items() if not k.endswith(measured)} for line in trainer.state.log_history],
        "best": trainer.state.best_metric,
        "weights": hashlib.sha256(weights).hexdigest(),
    }
    print("REPORT " + json.dumps(report))


if __name__ == "__main__":
    main()
