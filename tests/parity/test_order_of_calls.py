"""`train`, `evaluate` and `predict` in any order, twice, and from within one another."""

import importlib

import pytest

from tests.support.parity import alike, assert_same, build, record
from tests.support.tiny import plain_data


@pytest.mark.parametrize("event", ["on_step_end", "on_epoch_end", "on_epoch_begin", "on_train_begin", "on_substep_end"])
def test_evaluate_and_predict_from_a_callback(tmp_path, event):
    def run(name):
        library = importlib.import_module(name)
        folder = tmp_path / name
        trainer, recorder = build(name, "plain", folder, gradient_accumulation_steps=2, max_steps=4)

        def handler(self, args, state, control, trainer=trainer, **kwargs):
            trainer.evaluate(plain_data()[:5], metric_key_prefix="inner")
            trainer.predict(plain_data()[:3])

        trainer.add_callback(type("Evaluates", (library.TrainerCallback,), {event: handler}))
        trainer.train()
        return record(trainer, recorder, folder)

    alike(run)


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("model", ["plain", "bert", "llama"])
@pytest.mark.parametrize("order", ["evaluate-first", "train-first"])
def test_evaluate_and_predict(tmp_path, model, order, bf16):
    results = []
    for name in ("hftrainer", "transformers"):
        folder = tmp_path / name
        settings = {"max_steps": 3, "bf16": bf16}
        trainer, recorder = build(name, model, folder, trainer={"compute_metrics": sizes}, **settings)
        if order == "evaluate-first":
            trainer.evaluate()
        trainer.train()
        metrics = trainer.evaluate()
        output = trainer.predict(trainer.eval_dataset, metric_key_prefix="try")
        extra = {
            "metrics": list(metrics),
            "test": sorted(output.metrics),
            "sizes": output.metrics["try_sizes"],
            "mode": trainer.model.training,
        }
        results.append((record(trainer, recorder, folder, **extra), output))
    assert_same(results[0][0], results[1][0])
    ours, theirs = results[0][1], results[1][1]
    assert (ours.predictions == theirs.predictions).all()
    assert (ours.label_ids == theirs.label_ids).all()


def sizes(prediction):
    return {"sizes": [list(prediction.predictions.shape), list(prediction.label_ids.shape)]}


def test_train_twice(tmp_path):
    def run(name):
        folder = tmp_path / name
        trainer, recorder = build(name, "plain", folder, max_steps=4)
        trainer.train()
        trainer.args.max_steps = 7
        trainer.train()
        return record(trainer, recorder, folder)

    alike(run)


def test_metrics_that_evaluate_something_else(tmp_path):
    def run(name):
        trainer, recorder = build(name, "plain", tmp_path / name)

        def metrics(prediction, trainer=trainer):
            trainer.compute_metrics = None
            inner = trainer.predict(plain_data()[:5]).predictions.sum()
            return {"inner": float(inner), "big": 10**400, "x/dataloader_idx_0": 1.0}

        trainer.compute_metrics = metrics
        trainer.evaluate()
        return record(trainer, recorder, tmp_path / name)

    alike(run)
