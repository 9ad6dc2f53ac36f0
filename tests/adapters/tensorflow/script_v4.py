"""A TFTrainer script as one wrote it for transformers 4.1 to 4.19; nothing in it knows of hftrainer."""

import json
import logging
import os
import sys
from dataclasses import dataclass, field

import numpy as np
import tensorflow as tf
from transformers import (
    EvalPrediction,
    HfArgumentParser,
    TFAutoModelForQuestionAnswering,
    TFAutoModelForSequenceClassification,
    TFAutoModelForTokenClassification,
    TFTrainer,
    TFTrainingArguments,
)


@dataclass
class ScriptArguments:
    model_dir: str = field(metadata={"help": "a folder with config.json and tf_model.h5"})
    task: str = field(default="text", metadata={"help": "text, ner or qa"})
    examples: int = field(default=20, metadata={"help": "training examples"})
    eval_examples: int = field(default=12, metadata={"help": "evaluation examples"})


def make_dataset(task: str, n: int, seed: int):
    rng = np.random.RandomState(seed)
    ids = rng.randint(5, 60, (n, 12)).astype("int32")
    mask = np.ones_like(ids)
    mask[:, 9:] = rng.randint(0, 2, (n, 1))
    features = {"input_ids": ids, "attention_mask": mask}
    if task == "text":
        labels = (ids.sum(1) % 3).astype("int64")
    elif task == "ner":
        labels = (ids % 3).astype("int64")
        labels[mask == 0] = -100
    else:
        labels = {"start_positions": (ids[:, 0] % 8).astype("int64"), "end_positions": (ids[:, 1] % 8).astype("int64")}
    if task == "text":  # by a generator, with an asserted cardinality, as the examples did

        def examples():
            for i in range(n):
                yield {name: values[i] for name, values in features.items()}, labels[i]

        dataset = tf.data.Dataset.from_generator(
            examples,
            ({"input_ids": tf.int32, "attention_mask": tf.int32}, tf.int64),
            ({"input_ids": tf.TensorShape([None]), "attention_mask": tf.TensorShape([None])}, tf.TensorShape([])),
        )
        return dataset.apply(tf.data.experimental.assert_cardinality(n))
    return tf.data.Dataset.from_tensor_slices((features, labels))


def main():
    script, args = HfArgumentParser((ScriptArguments, TFTrainingArguments)).parse_args_into_dataclasses()
    print("replicas", args.n_replicas)
    auto = {
        "text": TFAutoModelForSequenceClassification,
        "ner": TFAutoModelForTokenClassification,
        "qa": TFAutoModelForQuestionAnswering,
    }[script.task]
    with args.strategy.scope():
        model = auto.from_pretrained(script.model_dir)

    def compute_metrics(p: EvalPrediction):
        return {"acc": float((np.argmax(p.predictions, axis=-1) == p.label_ids).mean()), "rows": len(p.predictions)}

    seen = []

    class LoudTrainer(TFTrainer):
        def log(self, logs):
            super().log(logs)
            seen.append({k: float(v) for k, v in logs.items()})

    trainer = LoudTrainer(
        model=model,
        args=args,
        train_dataset=make_dataset(script.task, script.examples, 0),
        eval_dataset=make_dataset(script.task, script.eval_examples, 1),
        compute_metrics=None if script.task == "qa" else compute_metrics,
    )
    trainer.train()
    trainer.save_model()
    result = {"logs": seen, "evaluate": None}
    if script.task != "qa":
        result["evaluate"] = {k: float(v) for k, v in trainer.evaluate().items()}
        predictions, label_ids, metrics = trainer.predict(make_dataset(script.task, 7, 2))
        result["predictions"], result["label_ids"] = np.asarray(predictions).tolist(), np.asarray(label_ids).tolist()
        result["metrics"] = {k: float(v) for k, v in metrics.items()}
    with open(os.path.join(args.output_dir, "result.json"), "w") as file:
        json.dump(result, file, indent=1)


if __name__ == "__main__":
    logging.basicConfig(stream=sys.stdout, level=logging.WARNING)
    main()
