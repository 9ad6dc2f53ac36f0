"""Losses of a Trainer that is not there, and loss functions that return a mean."""

import contextlib
import functools
from types import SimpleNamespace

from torch import nn

from hftrainer.releases import followed
from hftrainer.training.run import Attempt, Run
from hftrainer.training.steps.loss import LossComputer


def mean_loss(outputs, labels, **ignored):
    return nn.functional.cross_entropy(outputs["logits"], labels)


#: Reported in huggingface/transformers#36331: such a loss is the mean of its micro-batch.
MEANS = {
    "function": lambda outputs, labels: mean_loss(outputs, labels),
    "function of keywords": mean_loss,
    "partial": functools.partial(mean_loss),
    "object": type("Loss", (), {"__call__": lambda self, outputs, labels: mean_loss(outputs, labels)})(),
}


def make_losses(release="5.20", *, micro_batches=4, averages_tokens=False, world_size=1, **attributes):
    """A computer of losses for a Trainer that has only the attributes which it reads."""
    ranks = SimpleNamespace(
        data_world_size=world_size, gather_numbers=lambda each, one_per_tp_group: each.repeat(world_size)
    )
    defaults = {
        **dict.fromkeys(("model", "optimizer", "compute_loss_func", "loss_is_scaled_for_ga", "label_smoother")),
        "args": SimpleNamespace(device="cpu", torch_empty_cache_steps=None),
        "accelerator": SimpleNamespace(processes=ranks, unwrap_model=lambda model: model),
        "state": SimpleNamespace(global_step=0),
        **dict.fromkeys(("model_accepts_loss_kwargs", "_loss_shifts_labels"), False),
        "compute_loss": lambda model, inputs, num_items_in_batch=None: model(inputs),
        "compute_loss_context_manager": contextlib.nullcontext,
        "_prepare_inputs": dict,
    }
    trainer = SimpleNamespace(**defaults | attributes)
    run = Run(current_gradient_accumulation_steps=micro_batches, attempt=Attempt(has_checked_model=True))
    parts = {"policy": followed.from_text(release), "averages_tokens": averages_tokens, "past_index": -1}
    return LossComputer(SimpleNamespace(trainer=trainer, run=run, **parts))


class Returns(nn.Module):
    def __init__(self, outputs):
        super().__init__()
        self.forward = lambda *_, **__: outputs
