"""What the engine needs of its host: the points of a training run and of an evaluation, as Lightning reaches them."""

from __future__ import annotations

from typing import Any, Protocol

import torch


class FeedLike(Protocol):
    """The training data as Lightning iterates it."""

    window: Any

    def __iter__(self) -> Any: ...
    def __len__(self) -> int: ...


class TrainingHost(Protocol):
    """A training run, told by Lightning's hooks where it stands.

    Order, with the hook of the generated module that calls each:

    begin                  on_train_start
    begin_epoch            on_train_epoch_start
    begin_micro_batch      on_train_batch_start
    loss / training_step   training_step (automatic / manual optimization)
    end_micro_batch        on_after_backward
    before_optimizer_step  configure_gradient_clipping
    after_optimizer_step   optimizer_step
    end_substep, end_step  on_train_batch_end
    end_epoch              on_train_epoch_end
    """

    feed: Any  # a FeedLike; a protocol's attribute would have to match to the letter
    first_epoch: int
    position: int

    @property
    def should_stop(self) -> bool: ...
    def begin(self) -> None: ...
    def begin_epoch(self, epoch: int) -> None: ...
    def begin_micro_batch(self) -> None: ...
    def loss(self, model: torch.nn.Module, inputs: Any) -> torch.Tensor: ...
    def training_step(self, model: torch.nn.Module, inputs: Any) -> torch.Tensor: ...
    def end_micro_batch(self, loss: torch.Tensor, inputs: Any) -> None: ...
    def before_optimizer_step(self, model: torch.nn.Module) -> None: ...
    def after_optimizer_step(self) -> None: ...
    def end_substep(self) -> None: ...
    def end_step(self, model: torch.nn.Module) -> None: ...
    def end_epoch(self) -> None: ...


class EvaluationHost(Protocol):
    """A pass over an evaluation or test set."""

    def __iter__(self) -> Any: ...
    def __len__(self) -> int: ...
    def step(self, inputs: Any, last: bool) -> Any: ...
    def finish(self) -> dict[str, Any]: ...
