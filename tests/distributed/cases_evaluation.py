"""Evaluates many small sets and writes what it found: run by one process, and by two under torchrun.

python evaluate_sets.py FOLDER
"""

import os
import pickle
import sys
from pathlib import Path

import torch
from torch.utils.data import IterableDataset, get_worker_info
from torchmetrics import MetricCollection, SumMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassConfusionMatrix

from hftrainer import Seq2SeqTrainer, Seq2SeqTrainingArguments, TorchMetrics, Trainer, TrainingArguments
from tests.parity.test_seq2seq import make_decoder, pad_left, uneven_data
from tests.support.tiny import (
    Stream,
    make_detector,
    make_llama,
    make_plain,
    make_t5,
    pad,
    plain_data,
    t5_data,
    varied_language_data,
)

SIZES = range(1, 18)
BATCH = 2


def arguments(folder, kind=TrainingArguments, **settings):
    defaults = {"per_device_eval_batch_size": BATCH, "report_to": "none", "disable_tqdm": True, "use_cpu": True}
    return kind(folder, **{**defaults, **settings})


def result(trainer, data, **settings):
    """Metrics and predictions, without the times."""
    metrics = trainer.evaluate(data, **settings)
    output = trainer.predict(data, **settings)
    kept = {name: value for name, value in metrics.items() if not name.endswith(("_second", "_runtime", "_time"))}
    return {"metrics": kept, "predictions": output.predictions, "labels": output.label_ids}


def all_of_it(prediction):
    """A metric that sees every row: order and padding count."""
    logits = prediction.predictions[0] if isinstance(prediction.predictions, tuple) else prediction.predictions
    weights = 1 + torch.arange(logits.size, dtype=torch.float64).reshape(logits.shape).numpy()
    return {
        "weighted": float((logits * weights).sum()),
        "rows": len(prediction.label_ids),
        "parts": len(prediction.elements),
    }


class Prediction:
    """Counts what reaches a function called batch by batch."""

    def __call__(self, prediction, compute_result):
        self.rows = getattr(self, "rows", 0) + len(prediction.label_ids)
        self.total = getattr(self, "total", 0.0) + float(prediction.predictions.double().sum())
        if not compute_result:
            return {}
        found = {"rows": self.rows, "total": self.total}
        self.rows, self.total = 0, 0.0
        return found


class Halves(IterableDataset):
    """A stream that its workers share."""

    def __init__(self, count):
        self.count = count

    def __iter__(self):
        worker = get_worker_info()
        return iter(plain_data(self.count)[worker.id :: worker.num_workers])


class Gathers(Trainer):
    """Gathers by hand within the step."""

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        self.gathered.append(self.accelerator.gather_for_metrics(inputs["x"]))
        return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)


class Objects(Trainer):
    """Predicts a list with one item a sample, which is no tensor."""

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        loss, logits, labels = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        return loss, [{"best": int(row.argmax()), "scores": row.tolist()} for row in logits], labels


def cases(folder):
    """Name → function of a size that returns a result."""
    plain = Trainer(
        make_plain(),
        arguments(folder, include_for_metrics=["loss"]),
        compute_metrics=lambda p: {"sum": float(p.predictions.sum()), "losses": [float(x) for x in p.losses]},
    )
    yield "plain", lambda size: result(plain, plain_data(size))
    yield "stream", lambda size: result(plain, Stream(size))
    varied = Trainer(make_llama(), arguments(folder), data_collator=pad, compute_metrics=all_of_it)
    yield "varied lengths", lambda size: result(varied, varied_language_data(size))
    apart = Trainer(make_llama(), arguments(folder, eval_do_concat_batches=False), data_collator=pad)
    yield "loss only", lambda size: {"metrics": apart.evaluate(varied_language_data(size))["eval_loss"]}
    nested = Trainer(make_detector(), arguments(folder))
    boxes = [{**row, "box_labels": row["x"][:4]} for row in plain_data(17)]
    yield "nested", lambda size: result(nested, boxes[:size])
    metrics = MetricCollection(
        {
            "acc": MulticlassAccuracy(3, average="micro"),
            "auroc": MulticlassAUROC(3),
            "matrix": MulticlassConfusionMatrix(3),
            "best": SumMetric(),
        }
    )

    def streamed(**settings):
        computing = TorchMetrics(
            metrics,
            adapter=lambda p: {"preds": p.predictions, "target": p.label_ids, "value": p.predictions.argmax(-1)},
            **settings,
        )
        return Trainer(make_plain(), arguments(folder), compute_metrics=computing)

    plain_metrics, drawn_metrics = streamed(), streamed(plot=True)
    yield "torchmetrics", lambda size: result(plain_metrics, plain_data(size))
    yield "torchmetrics, drawn", lambda size: result(drawn_metrics, plain_data(size)) if size in (1, 4, 7) else None
    uncached = TorchMetrics(MulticlassAccuracy(3, average="micro", compute_with_cache=False), plot=True)
    drawn = Trainer(make_plain(), arguments(folder), compute_metrics=uncached)
    yield "drawn without a cache", lambda size: result(drawn, plain_data(size)) if size < 4 else None
    counting = Trainer(
        make_plain(),
        arguments(folder),
        compute_metrics=TorchMetrics(SumMetric(), adapter=lambda p: {"value": p.predictions.new_ones(())}),
    )
    yield "one number a batch", lambda size: result(counting, plain_data(size))
    batched = Trainer(make_plain(), arguments(folder, batch_eval_metrics=True), compute_metrics=Prediction())
    yield "batch by batch", lambda size: result(batched, plain_data(size))
    objects = Objects(make_plain(), arguments(folder, eval_use_gather_object=True, eval_do_concat_batches=False))

    def predict_objects(size):
        batches = objects.predict(plain_data(size)).predictions
        return {"flat": [item for batch in batches for item in batch]}

    yield "objects", predict_objects
    workers = Trainer(make_plain(), arguments(folder, dataloader_num_workers=1))
    yield "workers", lambda size: result(workers, plain_data(size)) if size in (1, 4, 7) else None
    yield "stream by a worker", lambda size: result(workers, Stream(size)) if size in (1, 4, 7) else None
    several = Trainer(make_plain(), arguments(folder, dataloader_num_workers=2))
    yield "stream by two workers", lambda size: result(several, Halves(size)) if size in (5, 11) else None
    gathers = Gathers(make_plain(), arguments(folder))

    def gather_in_step(size):
        gathers.gathered = []
        gathers.evaluate(Stream(size))
        return {"rows": torch.cat(gathers.gathered).numpy()}

    yield "gather in the step", gather_in_step
    generating = Seq2SeqTrainer(
        make_t5(),
        arguments(folder, Seq2SeqTrainingArguments, predict_with_generate=True, generation_max_length=7),
        compute_metrics=lambda p: {"sum": int(p.predictions.sum())},
    )
    yield "generation", lambda size: result(generating, t5_data(size)) if size < 6 else None

    uneven = Seq2SeqTrainer(
        make_decoder(), arguments(folder, Seq2SeqTrainingArguments, predict_with_generate=True), data_collator=pad_left
    )
    prompts = [{**row, "labels": row["input_ids"]} for row in uneven_data(17)]
    yield "generation of uneven lengths", lambda size: result(uneven, prompts[:size], max_new_tokens=22)

    def by_hand(size):
        loader = plain.get_eval_dataloader(plain_data(size))
        gathered = [plain.accelerator.gather_for_metrics(batch["x"]) for batch in loader]
        return {"rows": torch.cat(gathered).numpy()}

    yield "gather_for_metrics", by_hand


def main(folder):
    torch.set_num_threads(1)
    rank = os.environ.get("RANK", "alone")
    found = {name: {size: run(size) for size in SIZES} for name, run in cases(str(folder / "out"))}
    (folder / f"{rank}.pkl").write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
