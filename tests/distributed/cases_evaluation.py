"""Evaluations of many small sets, by one process or by ranks."""

import torch
from torch.utils.data import IterableDataset, get_worker_info
from torchmetrics import MetricCollection, SumMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassConfusionMatrix

from hftrainer import Seq2SeqTrainer, Seq2SeqTrainingArguments, TorchMetrics, Trainer
from tests.support import small_models
from tests.support.rank_messages import error_of
from tests.support.small_models import Stream, make_llama, plain_data

#: Batches have 2 samples: up to two rounds of two ranks, whole or not, and one of more.
SIZES = (*range(1, 9), 13)
#: With these, one rank has nothing; both have as much; the second round is partial; there is a further round.
SOME = (1, 4, 7, 13)


def make(make_model=small_models.make_plain, kind=Trainer, settings=None, **trainer_kwargs):
    quiet = {"report_to": "none", "disable_tqdm": True, "use_cpu": True}
    args = Seq2SeqTrainingArguments("out", per_device_eval_batch_size=2, **quiet, **(settings or {}))
    return kind(make_model(), args, **trainer_kwargs)


def all_of_it(prediction):
    """A metric that sees every row: order and padding count."""
    logits = prediction.predictions[0] if isinstance(prediction.predictions, tuple) else prediction.predictions
    weights = 1 + torch.arange(logits.size, dtype=torch.float64).reshape(logits.shape).numpy()
    weighted = float((logits * weights).sum())
    return {"weighted": weighted, "rows": len(prediction.label_ids), "parts": len(prediction.elements)}


class Prediction:
    rows, total = 0, 0.0

    def __call__(self, prediction, compute_result):
        self.rows += len(prediction.label_ids)
        self.total += float(prediction.predictions.double().sum())
        if not compute_result:
            return {}
        found = {"rows": self.rows, "total": self.total}
        self.rows, self.total = 0, 0.0
        return found


class Halves(IterableDataset):
    def __init__(self, count):
        self.count = count

    def __iter__(self):
        worker = get_worker_info()
        return iter(plain_data(self.count)[worker.id :: worker.num_workers])


class Gathers(Trainer):
    gathered = ()

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        self.gathered = (*self.gathered, self.accelerator.gather_for_metrics(inputs["x"]))
        return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)


class Objects(Trainer):
    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        loss, logits, labels = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        return loss, [{"best": int(row.argmax()), "scores": row.tolist()} for row in logits], labels


class Boxes(Trainer):
    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        loss, logits, labels = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        return loss, logits, [{"box": row} for row in labels]


def torchmetrics():
    metrics = {"acc": MulticlassAccuracy(3, average="micro"), "auroc": MulticlassAUROC(3), "best": SumMetric()}
    metrics["matrix"] = MulticlassConfusionMatrix(3)
    return TorchMetrics(
        MetricCollection(metrics),
        adapter=lambda p: {"preds": p.predictions, "target": p.label_ids, "value": p.predictions.argmax(-1)},
    )


def make_decoder():
    model = make_llama()
    model.config.pad_token_id = model.generation_config.pad_token_id = 0
    model.generation_config.max_new_tokens = 22  # more than max_length
    return model


def sum_and_losses(prediction):
    return {"sum": float(prediction.predictions.sum()), "losses": [float(loss) for loss in prediction.losses]}


VARIED = {"make_model": make_llama, "data_collator": small_models.pad, "compute_metrics": all_of_it}
GENERATES = {"predict_with_generate": True}
#: Name → settings of the Trainer, a function that makes data of a size, and the sizes if not `SIZES`.
CASES = {
    "plain": ({"settings": {"include_for_metrics": ["loss"]}, "compute_metrics": sum_and_losses}, plain_data),
    "stream": ({}, Stream),
    "varied lengths": (VARIED, small_models.varied_language_data),
    "nested": ({"make_model": small_models.make_detector}, small_models.detection_data, SOME),
    "torchmetrics": ({"compute_metrics": torchmetrics()}, plain_data, SOME),
    "without a cache": (
        {"compute_metrics": TorchMetrics(MulticlassAccuracy(3, average="micro", compute_with_cache=False))},
        plain_data,
        (1, 2, 3),
    ),
    "one number a batch": (
        {"compute_metrics": TorchMetrics(SumMetric(), adapter=lambda p: {"value": p.predictions.new_ones(())})},
        plain_data,
        SOME,
    ),
    "batch by batch": ({"settings": {"batch_eval_metrics": True}, "compute_metrics": Prediction()}, plain_data, SOME),
    "workers": ({"settings": {"dataloader_num_workers": 1}}, plain_data, (1, 4, 7)),
    "stream by a worker": ({"settings": {"dataloader_num_workers": 1}}, Stream, (1, 4, 7)),
    "stream by two workers": ({"settings": {"dataloader_num_workers": 2}}, Halves, (5, 11)),
    "generation": (
        {
            "make_model": small_models.make_t5,
            "kind": Seq2SeqTrainer,
            "settings": {**GENERATES, "generation_max_length": 7},
        }
        | {"compute_metrics": lambda p: {"sum": int(p.predictions.sum())}},
        small_models.t5_data,
        (1, 4, 5),
    ),
    "generation of uneven lengths": (
        {
            "make_model": make_decoder,
            "kind": Seq2SeqTrainer,
            "settings": GENERATES,
            "data_collator": small_models.pad_left,
        },
        lambda count: [{**row, "labels": row["input_ids"]} for row in small_models.varied_language_data(count)],
        SOME,
    ),
}


def result(trainer, data):
    metrics = trainer.evaluate(data)
    output = trainer.predict(data)
    kept = {name: value for name, value in metrics.items() if not name.endswith(("_second", "_runtime", "_time"))}
    return {"metrics": kept, "predictions": output.predictions, "labels": output.label_ids}


def predict_objects():
    objects = make(kind=Objects, settings={"eval_use_gather_object": True, "eval_do_concat_batches": False})
    for size in SOME:
        yield size, [item for batch in objects.predict(plain_data(size)).predictions for item in batch]


def evaluate_loss():
    apart = make(make_llama, settings={"eval_do_concat_batches": False}, data_collator=small_models.pad)
    for size in SOME:
        yield size, apart.evaluate(small_models.varied_language_data(size))["eval_loss"]


def gather_in_the_step():
    for size in SIZES:
        gathers = make(kind=Gathers)
        gathers.evaluate(Stream(size))
        yield size, torch.cat(gathers.gathered).numpy()


def gather_for_metrics():
    trainer = make()
    for size in SIZES:
        loader = trainer.get_eval_dataloader(plain_data(size))
        yield size, torch.cat([trainer.accelerator.gather_for_metrics(batch["x"]) for batch in loader]).numpy()


OTHERS = {each.__name__: each for each in (predict_objects, evaluate_loss, gather_in_the_step, gather_for_metrics)}


def evaluate_all():
    found = {name: dict(evaluate()) for name, evaluate in OTHERS.items()}
    for name, (options, make_data, *sizes) in CASES.items():
        trainer = make(**options)
        found[name] = {size: result(trainer, make_data(size)) for size in (sizes[0] if sizes else SIZES)}
    return found


def predict_boxes():
    return error_of(TypeError, make(kind=Boxes, settings={"eval_do_concat_batches": False}).predict, plain_data(10))
