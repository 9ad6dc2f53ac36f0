"""The optimizer and its settings."""

from __future__ import annotations

from dataclasses import dataclass

from hftrainer.arguments._field import arg
from hftrainer.arguments.choices import OptimizerNames


@dataclass(kw_only=True)
class OptimizerArguments:
    """The optimizer, its settings, and changes to loss and gradients before each step."""

    learning_rate: float = arg(5e-5, "Peak learning rate, in weight units per optimizer step.")
    optim: OptimizerNames | str = arg("adamw_torch_fused", "Name of the optimizer (v4.0: always AdamW).")
    optim_args: str | None = arg(None, "Further settings of the optimizer, as 'name=value,name=value'.")
    optim_target_modules: None | str | list[str] = arg(None, "Modules treated by GaLore or APOLLO, by name or regex.")
    weight_decay: float = arg(0.0, "Decoupled weight decay; not applied to biases and normalization layers.")
    adam_beta1: float = arg(0.9, "Decay of Adam's first moment, per optimizer step.")
    adam_beta2: float = arg(0.999, "Decay of Adam's second moment, per optimizer step.")
    adam_epsilon: float = arg(1e-8, "Adam's epsilon.")
    max_grad_norm: float = arg(
        1.0, "Clip the gradient's 2-norm over all parameters to this; 0 or None disables clipping."
    )
    average_tokens_across_devices: bool = arg(
        True, "Count `num_items_in_batch` over all processes (False before v5.0)."
    )
    label_smoothing_factor: float = arg(0.0, "Fraction of probability mass taken from the label, in [0, 1).")
    neftune_noise_alpha: float | None = arg(None, "Scale of NEFTune's noise on the embeddings.")
