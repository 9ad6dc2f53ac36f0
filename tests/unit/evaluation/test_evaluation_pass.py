"""An evaluation leaves out calls without effect, but respects replaced methods, reused buffers and array losses."""

import numpy as np
import pytest
import torch

import hftrainer
from hftrainer.evaluation.collecting import OutputCollector
from tests.support.parity import make_recorder


@pytest.mark.parametrize("replaced", ["accelerator.gather", "gather_function", "both"])
def test_replaced_gathering_is_called_for_each_batch(make_trainer, replaced):
    trainer, gathered = make_trainer(compute_metrics=lambda p: {}), []
    of_accelerator = "gather_for_metrics" if replaced == "gather_function" else "gather"
    original = getattr(trainer.accelerator, of_accelerator)

    def record(rows):
        gathered.append(rows)
        return original(rows)

    if replaced != "gather_function":
        trainer.accelerator.gather = record
    if replaced != "accelerator.gather":
        trainer.gather_function = record
    trainer.evaluate()
    assert len(gathered) == 3 * 5  # losses, predictions and labels of five batches


def test_gathering_replaced_during_the_pass_is_used(make_trainer):
    trainer, seen = make_trainer(compute_metrics=lambda p: {"rows": len(p.predictions)}), []
    original = trainer.prediction_step

    def step(*args, **kwargs):
        seen.append(1)
        if len(seen) == 3:
            trainer.gather_function = lambda rows: rows[:1]
        return original(*args, **kwargs)

    trainer.prediction_step = step
    assert trainer.evaluate()["eval_rows"] == 4 + 4 + 1 + 1 + 1  # one row of each batch from the third on


@pytest.mark.parametrize("batch_size", [1, 4])
def test_loss_in_a_buffer_that_is_reused_is_copied(make_trainer, batch_size):
    """As CUDA graphs do; the losses of four batches are kept before they are moved to the CPU."""

    class Reuses(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.loss = torch.zeros(())

        def forward(self, x, labels):
            return {"loss": self.loss.add_(1), "logits": x + 0}

    data = [{"x": torch.ones(2), "labels": 0} for _ in range(4 * batch_size)]
    trainer = make_trainer(
        Reuses(), eval_dataset=data, per_device_eval_batch_size=batch_size, eval_accumulation_steps=4
    )
    assert trainer.evaluate()["eval_loss"] == (1 + 2 + 3 + 4) / 4


@pytest.mark.parametrize(("loss", "mean"), [(np.float64(2), 2), (torch.tensor([1.0, 3.0]), 69 / 35)])
def test_prediction_step_may_return_an_array_as_loss(make_trainer, loss, mean):
    """As in transformers it is repeated: four batches of four have 1, 3, ... eight times, and the last 1, 3, 1."""
    trainer = make_trainer()
    trainer.prediction_step = lambda *args, **kwargs: (loss, None, None)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(mean)


@pytest.mark.parametrize(("accumulation", "moved_after"), [(None, [1, 2, 3, 4, 5]), (2, [2, 4, 5]), (9, [5])])
def test_rows_are_moved_to_the_cpu_after_each_accumulation(make_trainer, monkeypatch, accumulation, moved_after):
    recorder, moves = make_recorder(hftrainer), []
    move_to_cpu = OutputCollector.move_to_cpu

    def record(collector):
        moves.append(sum(event == "on_prediction_step" for event, *_ in recorder.events))
        move_to_cpu(collector)

    monkeypatch.setattr(OutputCollector, "move_to_cpu", record)
    # The fifth batch, of three rows, is the last one.
    make_trainer(eval_accumulation_steps=accumulation, callbacks=[recorder]).evaluate()
    assert list(dict.fromkeys(moves)) == moved_after
