"""Precision plugins, which limit autocast to the model's forward pass."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.plugins.precision import MixedPrecision, Precision

from hftrainer.base.nested import nested_apply
from hftrainer.parallel.plan import TRUE_TYPES, LightningPlan
from hftrainer_lightning.private_api.callback_hooks import NULL_CONTEXT, call_hooks


class PlainPrecision(Precision):
    """A precision plugin that steps like a plain loop: first the backward pass, then the optimizer.

    Lightning nests two contexts around each step, and passes backward to the optimizer as a closure: the optimizer's
    step hooks would then see no gradients, and optimizers that ignore closures would not train.
    """

    #: The loss scaler, with float16.
    scaler: torch.amp.GradScaler | None = None
    #: Whether the last step was skipped because the scaled gradients were not finite.
    has_skipped_step = False

    def train_step_context(self) -> Any:
        """A context that does nothing."""
        return NULL_CONTEXT

    val_step_context = predict_step_context = train_step_context

    def pre_backward(self, tensor: torch.Tensor, module: Any) -> torch.Tensor:
        """Scale the loss, and notify callbacks and profilers."""
        loss = tensor if self.scaler is None else self.scaler.scale(tensor)
        call_hooks(module.trainer, "on_before_backward", loss)
        return loss

    def post_backward(self, tensor: torch.Tensor, module: Any) -> torch.Tensor:
        """Notify callbacks and profilers."""
        call_hooks(module.trainer, "on_after_backward")
        return tensor

    def optimizer_step(  # type: ignore[override]
        self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Run the step, unless the optimizer is fused into backward, which has already stepped.

        `TrainingLoop` clips the gradients before it. The epoch loop calls it without a closure.
        """
        if hasattr(optimizer, "fused_backward"):
            return None
        optimizer_class: Any = type(optimizer)
        if self.scaler is None:
            return optimizer.step(*_closure_arguments(optimizer_class), **kwargs)
        scale = self.scaler.get_scale()
        result = self.scaler.step(optimizer, *_closure_arguments(optimizer_class), **kwargs)
        self.scaler.update()
        self.has_skipped_step = self.scaler.get_scale() < scale
        return result

    def unscale_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the scale of the loss, before they are clipped."""
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)


@functools.lru_cache(maxsize=16)
def _closure_arguments(optimizer_class: Any) -> tuple[None, ...]:
    """Arguments for `step`: None where the optimizer's class requires a closure, as accelerate passes it."""
    _, *parameters = inspect.signature(optimizer_class.step).parameters.values()
    required = [item for item in parameters if item.default is item.empty and item.kind is item.POSITIONAL_OR_KEYWORD]
    return (None,) * len(required)


class _ForwardPrecision(PlainPrecision):
    """Wraps only the `forward` of the user's model, until `teardown`.

    Lightning's own plugins wrap the whole training step, so a loss computed outside the model (`compute_loss`,
    `compute_loss_func`) would be computed in their precision too, unlike the Trainer's.
    """

    _wrapped_model: tuple[torch.nn.Module, Any] | None = None

    def convert_module(self, module: torch.nn.Module) -> torch.nn.Module:
        """Wrap the `forward` of the user's model."""
        model: Any = module.model
        original = model.forward
        self._wrapped_model = model, model.__dict__.get("forward")

        @functools.wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self.call_forward(original, args, kwargs)

        model.forward = forward
        return module

    def call_forward(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call the model's own `forward`."""
        return forward(*args, **kwargs)

    def teardown(self) -> None:
        """Restore the model's own `forward`."""
        model, original = self._wrapped_model or (None, None)
        self._wrapped_model = None
        if model is None:
            return
        if original is None:
            del model.forward
        else:
            model.forward = original


class ForwardAutocast(_ForwardPrecision, MixedPrecision):
    """Autocast around the model's `forward` only, with float32 outputs, as in accelerate."""

    def call_forward(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call the model's own `forward` under autocast."""
        with self.autocast(torch.bfloat16 if self.precision == "bf16-mixed" else torch.float16):
            outputs = forward(*args, **kwargs)
        return nested_apply(_to_float32, outputs)

    def autocast(self, dtype: torch.dtype) -> contextlib.AbstractContextManager[Any]:
        """The autocast context for the forward pass."""
        return torch.autocast(self.device, dtype=dtype)


class TruePrecision(_ForwardPrecision):
    """'bf16-true' and '64-true': one dtype for all weights, and by default for tensors created in `forward`.

    The Trainer converts the batches.

    Args:
        precision: Lightning's name of the precision.
    """

    def __init__(self, precision: Any) -> None:
        self.precision = precision
        self.dtype = TRUE_TYPES[precision]

    def convert_module(self, module: torch.nn.Module) -> torch.nn.Module:
        """Convert the weights, and wrap the `forward` of the user's model."""
        module.model.to(self.dtype)
        return super().convert_module(module)

    def call_forward(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call the model's own `forward`."""
        default_dtype = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        try:
            return forward(*args, **kwargs)
        finally:
            torch.set_default_dtype(default_dtype)


def _to_float32(output: Any) -> Any:
    is_half = isinstance(output, torch.Tensor) and output.dtype in (torch.bfloat16, torch.float16)
    return output.float() if is_half else output


def make_precision_plugin(plan: LightningPlan, scaler: torch.amp.GradScaler | None) -> Precision:
    """The precision plugin for the plan. The Trainer owns the scaler, so it survives the run."""
    if plan.precision == "32-true":
        return PlainPrecision()
    if plan.precision == "bf16-mixed" or plan.precision == "16-mixed":
        return ForwardAutocast(plan.precision, torch.device(plan.device).type, scaler)
    return TruePrecision(plan.precision)
