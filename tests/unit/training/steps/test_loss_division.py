"""What divides a loss: the micro-batches of a step or the items that are counted for it, in each release."""

from types import SimpleNamespace

import pytest
import torch

from hftrainer.parallel.process_state import DistributedType
from hftrainer.training.steps import counters, loss_division
from tests.support.losses import MEANS, Returns, make_losses

LOSS = Returns(torch.tensor(12.0))
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


# In a step of 3 micro-batches with gradient_accumulation_steps=4.
@pytest.mark.parametrize(
    ("release", "accepts", "divisor"), [("4.52", True, 1), ("4.53", True, 4), ("4.54", False, 4), ("4.55", True, 3)]
)
def test_short_last_step_is_divided_as_in_the_release(release, accepts, divisor):
    args = SimpleNamespace(device="cpu", torch_empty_cache_steps=None, gradient_accumulation_steps=4)
    losses = make_losses(release, micro_batches=3, args=args, model_accepts_loss_kwargs=accepts)
    assert losses.micro_batch_loss(LOSS, {}, None).item() == 12 / divisor


@pytest.mark.parametrize(
    ("case", "factor"), [("plain model", 1), *((f"{kind} that takes items", 3) for kind in ("model", "function"))]
)
def test_mean_over_ranks_is_undone_if_the_items_of_all_divide(case, factor):
    parts = make_losses(averages_tokens=True, world_size=3, **DIVIDED_BY_ITEMS[case][0]).parts
    assert [loss_division.undo_mean_over_ranks(parts, 2.0, items) for items in (5, None)] == [2.0 * factor, 2.0]


@pytest.mark.parametrize(("steps", "kind", "divisor"), [(1, "NO", 1), (4, "NO", 4), (4, "DEEPSPEED", 1)])
def test_backward_divides_by_the_steps_of_accelerate(steps, kind, divisor):
    """DeepSpeed's engine divides itself."""
    accelerator = SimpleNamespace(gradient_accumulation_steps=steps, distributed_type=DistributedType[kind])
    assert loss_division.divide_in_backward(accelerator, 12.0) == 12.0 / divisor


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
