"""What observes a run and takes requests to it, made from the arguments when the run begins."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from hftrainer.arguments.choices import SaveStrategy, observed
from hftrainer.monitoring.flops import FlopCounter, peak_flops
from hftrainer.monitoring.journal import Journal
from hftrainer.monitoring.observer import Measurements, Observer
from hftrainer.monitoring.requests import Requests
from hftrainer.trainer_pt_utils import find_batch_size
from hftrainer.training.storage import run_folder

if TYPE_CHECKING:
    from hftrainer.training.components import Components
    from hftrainer.training.loop import TrainingLoop


def make_observer(components: Components, loop: TrainingLoop) -> Observer | None:
    """The observer of a run, a callback of the Trainer until the run ends; None without `observe`."""
    trainer, plan = components.trainer, components.engine.plan
    what = observed(getattr(trainer.args, "observe", False))
    if not what:
        return None
    loop.reader.time_collator()
    peak = peak_flops(trainer.args.device, plan.precision) if "mfu" in what else None
    writes = "journal" in what and trainer.is_world_process_zero()
    observer = Observer(
        what,
        Measurements(lambda: components.run.seconds, loop.reader.waits),
        lambda count: int(components.steps.sum_over_data(torch.tensor([count]))),
        None if peak is None else FlopCounter(peak),
        Journal(run_folder(trainer, loop.trial) if writes else None),
        {
            "world_size": trainer.args.world_size,
            "device": str(trainer.args.device),
            "resumed_from": loop.resume_folder,
        },
    )
    if observer.flops is not None:
        loop.loss = observer.flops.wrap_loss(loop.loss)
    trainer.add_callback(observer)
    return observer


def count_batch(trainer: Any, inputs: Any) -> tuple[int, int]:
    """Samples and input tokens of a micro-batch; tokens are whole numbers of shape `(batch, sequence)`."""
    name = getattr(trainer.model, "main_input_name", "input_ids")
    main = inputs.get(name) if hasattr(inputs, "get") else None
    if isinstance(main, torch.Tensor) and main.ndim == 2 and not main.is_floating_point():
        if trainer.args.flatten_batches and "position_ids" in inputs:  # samples in one row
            return int((inputs["position_ids"] == 0).sum()), main.numel()
        return len(main), main.numel()
    return find_batch_size(inputs) or 0, 0


def make_requests(components: Components, loop: TrainingLoop) -> Requests | None:
    """Takes requests to a run, on the main process."""
    trainer = components.trainer
    args = trainer.args
    if not trainer.is_world_process_zero():
        return None
    return Requests(
        run_folder(trainer, loop.trial),
        getattr(args, "save_minutes", None),
        getattr(args, "eval_minutes", None),
        0.0 if loop.progress is None else loop.progress.since_evaluation,
        can_evaluate=trainer.eval_dataset is not None,
        saves=args.save_strategy != SaveStrategy.NO,
    )
