"""The engine: builds a `lightning.Trainer` from a plan, and runs fit, validation and prediction on it."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, ProgressBar
from lightning.pytorch.profilers import PassThroughProfiler

from hftrainer_lightning import seams
from hftrainer_lightning.events import EvaluationHost, TrainingHost
from hftrainer_lightning.module import HostedModule
from hftrainer_lightning.plan import LightningPlan
from hftrainer_lightning.strategies import build_strategy

#: Lightning validates every so many epochs by itself: never, since the Trainer's callbacks decide.
NEVER = sys.maxsize


def is_lightning_callback(candidate: Any) -> bool:
    """Whether `candidate` is a Lightning callback, as an instance or as a class."""
    return issubclass(candidate, Callback) if isinstance(candidate, type) else isinstance(candidate, Callback)


class LightningEngine:
    """Runs a model on Lightning.

    Args:
        plan: what the training arguments mean to Lightning.
        callbacks: the user's Lightning callbacks; the list may change between runs.

    Attributes:
        trainer: the `lightning.Trainer` of the last run, or None.
        module: the `LightningModule` of the last run, or None.
    """

    def __init__(self, plan: LightningPlan, callbacks: Sequence[Callback]) -> None:
        self.plan = plan
        self.callbacks = callbacks
        self.trainer: pl.Trainer | None = None
        self.module: HostedModule | None = None
        self.fitting = self.evaluating = False

    def fit(
        self,
        host: TrainingHost,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: Any,
        *,
        max_epochs: int,
        global_step: int,
        automatic_optimization: bool,
    ) -> None:
        """Drive a training run.

        Args:
            host: the run.
            model: the model to train.
            optimizer: its optimizer.
            scheduler: the optimizer's learning-rate scheduler.
            max_epochs: epochs after which training ends; `sys.maxsize` when only the host ends it.
            global_step: optimizer steps that are done.
            automatic_optimization: False when the host's training step runs backward itself.
        """
        with seams.quiet():
            self.trainer = trainer = self._build_trainer(
                max_epochs=-1 if max_epochs == sys.maxsize else max_epochs,
                # Under manual optimization the module itself accumulates, and Lightning refuses to.
                accumulate_grad_batches=self.plan.accumulate_grad_batches if automatic_optimization else 1,
            )
        self.module = module = HostedModule(model)
        module.attach(host, optimizer, scheduler, automatic_optimization=automatic_optimization)
        seams.install_window_accumulation(trainer, host.feed)
        if host.first_epoch or host.position:
            seams.restore_progress(
                trainer,
                epoch=host.first_epoch,
                batch=host.position,
                batches_per_epoch=len(host.feed),
                global_step=global_step,
            )
        self.fitting = True
        try:
            with seams.keyboard_interrupts_restored(), seams.quiet():
                # The empty validation set stands for the ones that `evaluate` brings.
                trainer.fit(module, train_dataloaders=host.feed, val_dataloaders=[])
        finally:
            self.fitting = False
            module.detach()
        _print_profile(trainer)

    def evaluate(self, evaluation: EvaluationHost, model: torch.nn.Module, *, predicting: bool = False) -> None:
        """Drive a pass over an evaluation or test set, alone or within `fit`.

        Args:
            evaluation: the pass.
            model: the model to evaluate.
            predicting: run Lightning's prediction loop; within `fit` there is only the validation loop.
        """
        batches = _Batches(evaluation.dataloader)
        if self.fitting:
            assert self.trainer is not None and self.module is not None
            seams.validate_in_fit(self.trainer, self.module, batches, evaluation)
            return
        outer = self.trainer, self.module, self.evaluating
        with seams.keyboard_interrupts_restored(), seams.quiet():
            if self.trainer is None or self.evaluating:  # metrics may evaluate something else meanwhile
                self.trainer = self._build_trainer(max_epochs=1)
            self.trainer.callbacks = list(self.callbacks)  # type: ignore[attr-defined]
            self.module = module = HostedModule(model)
            module.evaluate_with(evaluation)
            self.evaluating = True
            try:
                if predicting:
                    self.trainer.predict(module, dataloaders=batches, return_predictions=False)
                else:
                    self.trainer.validate(module, dataloaders=batches, verbose=False)
            finally:
                module.detach()
                self.evaluating = outer[2]
                if self.evaluating:
                    self.trainer, self.module = outer[:2]

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Run backward: through Lightning's strategy within `fit`, plainly outside."""
        if self.fitting:
            assert self.module is not None
            self.module.manual_backward(loss, **kwargs)
        else:
            loss.backward(**kwargs)

    def _build_trainer(self, max_epochs: int, accumulate_grad_batches: int = 1) -> pl.Trainer:
        keywords = self.plan.trainer_keywords() | {"accumulate_grad_batches": accumulate_grad_batches}
        del keywords["precision"]  # the strategy carries the precision plugin
        plugins = keywords.pop("plugins", None) or []
        keywords.setdefault("profiler", seams.NoProfiler())
        return seams.Trainer(
            **keywords,
            strategy=build_strategy(self.plan),
            max_epochs=max_epochs,
            check_val_every_n_epoch=NEVER,
            num_sanity_val_steps=0,
            callbacks=list(self.callbacks),
            # One process, also inside a SLURM job.
            plugins=[LightningEnvironment(), *(plugins if isinstance(plugins, list) else [plugins])],
            logger=False,
            enable_checkpointing=any(isinstance(callback, ModelCheckpoint) for callback in self.callbacks),
            enable_progress_bar=any(isinstance(callback, ProgressBar) for callback in self.callbacks),
            enable_model_summary=False,
            use_distributed_sampler=False,
            inference_mode=False,
        )


def _print_profile(trainer: pl.Trainer) -> None:
    """Print what a profiler found, unless it has written it to a file; Lightning would log it, and is kept quiet."""
    profiler = trainer.profiler  # type: ignore[attr-defined]
    if not isinstance(profiler, PassThroughProfiler) and not profiler.filename:
        print(profiler.summary())


class _Batches:
    """A loader that Lightning iterates as it is: it would rebuild a `DataLoader`, with other samplers.

    The iterator is made when the first batch is asked for. Lightning calls `iter()` once more, to check that it can,
    and a `DataLoader` draws from torch's generator each time.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        yield from self.loader

    def __len__(self) -> int:
        return len(self.loader)
