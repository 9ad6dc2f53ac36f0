"""The learning-rate schedule advances with the steps that the optimizer makes."""

import pytest
import torch

from tests.support.checkpoints import make_trainer


@pytest.mark.parametrize(("scale", "rates"), [(1.0, [0.75, 0.5, 0.25]), (2.0**60, [0.75] * 3)])
def test_step_skipped_by_the_loss_scaler_does_not_advance_the_schedule(tmp_path, scale, rates):
    settings = {"max_steps": 3, "logging_steps": 1, "learning_rate": 0.75, "save_strategy": "no"}
    trainer = make_trainer(tmp_path, fp16=True, **settings)
    trainer.accelerator.scaler = trainer._hftrainer.engine.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    trainer.train()
    assert [line["learning_rate"] for line in trainer.state.log_history[:-1]] == pytest.approx(rates)
