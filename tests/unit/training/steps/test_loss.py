"""The loss of a micro-batch is divided by the micro-batches of a step, or by the items that are counted for it."""

import contextlib
import functools
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hftrainer.releases import followed
from hftrainer.trainer_pt_utils import LabelSmoother
from hftrainer.training.run import AttemptRecord, Run
from hftrainer.training.steps import counters, loss_division
from hftrainer.training.steps.loss import LossComputer, split_losses


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
    run = Run(window_size=micro_batches, record=AttemptRecord(has_checked_model=True))
    parts = {"policy": followed.from_text(release), "averages_tokens": averages_tokens, "past_index": -1}
    return LossComputer(SimpleNamespace(trainer=trainer, run=run, **parts))


class Returns(nn.Module):
    def __init__(self, outputs):
        super().__init__()
        self.forward = lambda *_, **__: outputs


LOSS = Returns(torch.tensor(12.0))


#: Reported in huggingface/transformers#36331: such a loss is the mean of its micro-batch.
MEANS = {
    "function": lambda outputs, labels: None,
    "function of keywords": (ignores := lambda outputs, labels, **kwargs: None),
    "partial": functools.partial(ignores),
    "object": type("Loss", (), {"__call__": lambda self, outputs, labels: None})(),
}
ACCEPTS = {"model_accepts_loss_kwargs": True}
#: Attributes of the Trainer → whether items divide the loss, not micro-batches: if they are counted, and if not.
DIVIDED_BY_ITEMS = {
    "plain model": ({}, False, False),
    "model that takes items": (ACCEPTS, True, False),
    "override without items": (ACCEPTS | {"compute_loss": lambda model, _: model()}, False, False),
    **{f"{name} that ignores items": ({"compute_loss_func": each}, False, False) for name, each in MEANS.items()},
    "function that takes items": ({"compute_loss_func": lambda outputs, labels, num_items_in_batch: None}, True, True),
    "the user says that it is scaled": ({"loss_is_scaled_for_ga": True}, True, True),
    "the user says that it is not": (ACCEPTS | {"loss_is_scaled_for_ga": False}, False, False),
}


@pytest.mark.parametrize("micro_batches", [1, 2, 4])
@pytest.mark.parametrize("case", DIVIDED_BY_ITEMS)
def test_loss_is_divided_by_micro_batches_or_items(case, micro_batches):
    attributes, if_counted, if_uncounted = DIVIDED_BY_ITEMS[case]
    losses = make_losses(micro_batches=micro_batches, **attributes)
    for items, by_items in ((torch.tensor(10.0), if_counted), (None, if_uncounted)):
        assert losses.micro_batch_loss(LOSS, {}, items).item() == 12 / (1 if by_items else micro_batches)


def test_dict_of_losses_is_summed_and_logged_in_parts():
    """The loss for backward is 'loss', or else the sum. The parts are logged, divided as the loss."""
    assert split_losses(5) == (5, {})
    assert split_losses({"a": 1, "b": 2}) == (3, {"a": 1, "b": 2})
    losses, parts = make_losses(), {"a": torch.tensor(12.0), "b": torch.tensor(36.0), "none": None}
    assert losses.micro_batch_loss(Returns({**parts, "loss": torch.tensor(48.0)}), {}, None).item() == 48 / 4
    assert losses.run.record.logged_metrics.pop(torch.tensor(0.0), 1)[1] == {"a": 12 / 4, "b": 36 / 4}


@pytest.mark.parametrize(("release", "divisor"), [("5.20", 8), ("5.14", 3)])
def test_label_smoothing_divides_by_the_items(release, divisor):
    """The sum over the labels that count, by the items of the step; until v5.14 by those of the micro-batch."""
    logits, labels = torch.tensor([[[2.0, 1.0, 0.0]] * 4]), torch.tensor([[0, 1, 2, -100]])
    losses = make_losses(release, label_smoother=LabelSmoother(0.3), model_accepts_loss_kwargs=True)
    loss, _ = losses.loss_and_outputs(Returns({"loss": None, "logits": logits}), {"labels": labels}, 8)
    entropy = nn.functional.cross_entropy(logits[0], labels[0], reduction="sum", label_smoothing=0.3)
    torch.testing.assert_close(loss, entropy / divisor)


LABELS = [{"labels": torch.tensor([[1, -100, 3]])}, {"labels": torch.tensor([[1, 2, 3], [-100, -100, -100]])}]


def count(release="5.20", batches=LABELS, **settings):
    parts = make_losses(release, **{"model_accepts_loss_kwargs": True, **settings}).parts
    parts.counters = counters.Counters(parts)
    return loss_division.count_items(parts, batches, torch.device("cpu"))


def test_items_are_the_labels_that_count():
    items = count()
    assert items == 5 and items.dtype == torch.float32  # labels that are not -100
    # A causal model does not predict the first label of a row.
    assert count(_loss_shifts_labels=True) == 3
    assert count(averages_tokens=True, world_size=3) == 15  # each rank has 5


def test_items_are_not_counted_where_unused():
    assert count(model_accepts_loss_kwargs=False) is None
    assert count("4.50", model_accepts_loss_kwargs=False) == 5
    assert count(model_accepts_loss_kwargs=False, compute_loss_func=len) == 5
    assert count(batches=[]) is count(batches=[{"x": 1}]) is count(batches=[{"labels": [{"boxes": 1}]}]) is None
