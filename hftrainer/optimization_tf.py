"""Optimizer and schedules of `TFTrainer`, with the names and arguments of transformers 4.

They do not need TensorFlow: `hftrainer_tensorflow.optimizers` builds a torch optimizer from their settings.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hftrainer.errors import UnknownKey

#: Parameters with these names have no weight decay.
NO_DECAY_NAMES = ("LayerNorm", "layer_norm", "bias")
#: The settings of gradient clipping in Keras optimizers.
CLIPPING = ("clipnorm", "clipvalue", "global_clipnorm")


@dataclass(eq=False)
class PolynomialDecay:
    """A schedule that decays from one learning rate to another, then stays constant.

    Args:
        initial_learning_rate: the rate at step 0.
        decay_steps: optimizer steps of the decay.
        end_learning_rate: the rate after the decay.
        power: 1 is linear.
    """

    initial_learning_rate: float
    decay_steps: int
    end_learning_rate: float = 0.0001
    power: float = 1.0
    name: str | None = None

    def __call__(self, step: int) -> float:
        """The learning rate after `step` optimizer steps."""
        progress = min(step, self.decay_steps) / self.decay_steps if self.decay_steps else 1.0
        factor: float = (1 - progress) ** self.power
        return (self.initial_learning_rate - self.end_learning_rate) * factor + self.end_learning_rate

    def get_config(self) -> dict[str, Any]:
        """The arguments."""
        return dict(vars(self))


@dataclass(eq=False)
class WarmUp:
    """A schedule that rises from 0 to a learning rate, then follows another schedule.

    Args:
        initial_learning_rate: the rate at the end of the warm-up.
        decay_schedule_fn: the schedule after the warm-up; its step 0 is the end of the warm-up.
        warmup_steps: optimizer steps of the warm-up.
        power: 1 is linear.
    """

    initial_learning_rate: float
    decay_schedule_fn: Callable[[int], Any]
    warmup_steps: int
    power: float = 1.0
    name: str | None = None

    def __call__(self, step: int) -> Any:
        """The learning rate after `step` optimizer steps."""
        if step < self.warmup_steps:
            return self.initial_learning_rate * (step / self.warmup_steps) ** self.power
        return self.decay_schedule_fn(step - self.warmup_steps)

    def get_config(self) -> dict[str, Any]:
        """The arguments."""
        return dict(vars(self))


class AdamWeightDecay:
    """Keras's Adam, with decoupled weight decay.

    Args:
        learning_rate: a rate, or a schedule: a function of the number of completed optimizer steps.
        beta_1: decay of the first moment.
        beta_2: decay of the second moment.
        epsilon: added to the square root of the second moment, before bias correction.
        amsgrad: whether to use the maximum of the second moment over all steps.
        weight_decay_rate: the decay, multiplied by the learning rate.
        include_in_weight_decay: regular expressions for names of torch parameters with weight decay in any case.
        exclude_from_weight_decay: regular expressions for names of parameters without weight decay.
        clipping: `clipnorm` (of each parameter), `clipvalue` or `global_clipnorm`; None does not clip.

    Raises:
        UnknownKey: for any other keyword argument.
    """

    def __init__(
        self,
        learning_rate: float | Callable[[int], Any] = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        amsgrad: bool = False,
        weight_decay_rate: float = 0.0,
        include_in_weight_decay: list[str] | None = None,
        exclude_from_weight_decay: list[str] | None = None,
        name: str = "AdamWeightDecay",
        **clipping: float | None,
    ) -> None:
        if unknown := sorted(clipping.keys() - set(CLIPPING)):
            raise UnknownKey(f"AdamWeightDecay has no argument {', '.join(unknown)}; use {', '.join(CLIPPING)}.")
        self.learning_rate, self.beta_1, self.beta_2, self.epsilon = learning_rate, beta_1, beta_2, epsilon
        self.amsgrad, self.weight_decay_rate, self.name = amsgrad, weight_decay_rate, name
        self._include_in_weight_decay = include_in_weight_decay
        self._exclude_from_weight_decay = exclude_from_weight_decay
        self._clipping = clipping

    def get_config(self) -> dict[str, Any]:
        """The arguments, without the names."""
        return {key: value for key, value in vars(self).items() if not key.startswith("_")} | self._clipping


def create_optimizer(
    init_lr: float,
    num_train_steps: int,
    num_warmup_steps: int,
    min_lr_ratio: float = 0.0,
    adam_beta1: float = 0.9,
    adam_beta2: float = 0.999,
    adam_epsilon: float = 1e-8,
    adam_clipnorm: float | None = None,
    adam_global_clipnorm: float | None = None,
    weight_decay_rate: float = 0.0,
    power: float = 1.0,
    include_in_weight_decay: list[str] | None = None,
) -> tuple[AdamWeightDecay, Callable[[int], Any]]:
    """An optimizer for `TFTrainer(optimizers=...)`, and its schedule: warm-up, then polynomial decay.

    Args:
        init_lr: the learning rate at the end of the linear warm-up.
        num_train_steps: optimizer steps of the run, including the warm-up.
        num_warmup_steps: optimizer steps of the warm-up.
        min_lr_ratio: the rate at the end, divided by `init_lr`.
        adam_beta1: decay of the first moment.
        adam_beta2: decay of the second moment.
        adam_epsilon: see `AdamWeightDecay`.
        adam_clipnorm: maximum norm of each parameter's gradient.
        adam_global_clipnorm: maximum norm of all gradients together.
        weight_decay_rate: weight decay of all parameters except biases and layer normalizations.
        power: power of the learning-rate decay.
        include_in_weight_decay: regular expressions for names of torch parameters with weight decay in any case.
    """
    schedule: Callable[[int], Any] = PolynomialDecay(
        init_lr, num_train_steps - num_warmup_steps, init_lr * min_lr_ratio, power
    )
    if num_warmup_steps:
        schedule = WarmUp(init_lr, schedule, num_warmup_steps)
    optimizer = AdamWeightDecay(
        schedule,
        adam_beta1,
        adam_beta2,
        adam_epsilon,
        weight_decay_rate=weight_decay_rate,
        include_in_weight_decay=include_in_weight_decay,
        exclude_from_weight_decay=list(NO_DECAY_NAMES),
        clipnorm=adam_clipnorm,
        global_clipnorm=adam_global_clipnorm,
    )
    return optimizer, schedule
