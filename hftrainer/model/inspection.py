"""Finds out how a model is called, finds the loss in its outputs, and walks over its modules at every step."""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from hftrainer.base.messages import log_once
from hftrainer.base.signatures import call_with_accepted
from hftrainer.base.tracebacks import add_note, describe_type
from hftrainer.compat import libraries
from hftrainer.errors import InvalidArgument, InvalidSetup

logger = logging.getLogger(__name__)

LOSS_REMEDY = (
    "let the model return (loss, ...) or {'loss': loss, ...}, pass compute_loss_func, or override compute_loss."
)


def find_labels(model_class: type) -> list[str]:
    """The label arguments of `forward`: names with 'label', and an answer's start and end positions."""
    parameters = inspect.signature(model_class.forward).parameters  # type: ignore[attr-defined]
    spans = ("start_positions", "end_positions") if "QuestionAnswering" in model_class.__name__ else ()
    return [name for name in parameters if "label" in name or name in spans]


def can_return_loss(model_class: type) -> bool:
    """Whether `forward` computes a loss without labels (`return_loss=True` by default), as in CLIP."""
    parameter = inspect.signature(model_class.forward).parameters.get("return_loss")  # type: ignore[attr-defined]
    return parameter is not None and parameter.default is True


def called_model(model: Any) -> Any:
    """The model whose `forward` names the inputs, inside adapters and modules that forward all arguments."""
    bare_model = libraries.unwrap_peft(model)
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    children = list(bare_model.children())
    parameters = inspect.signature(bare_model.forward).parameters.values()
    forwards_all = bool(parameters) and all(parameter.kind in variadic for parameter in parameters)
    return called_model(children[0]) if forwards_all and len(children) == 1 else bare_model


def accepts_loss_kwargs(model: nn.Module) -> bool:
    """Whether `forward` accepts `num_items_in_batch`, by an attribute or `**kwargs` (since v4.46)."""
    bare_model = called_model(model)
    if hasattr(bare_model, "accepts_loss_kwargs"):
        return bool(bare_model.accepts_loss_kwargs)
    parameters = inspect.signature(bare_model.forward).parameters.values()
    return any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)


def call_loss_func(function: Callable[..., Any], outputs: Any, labels: Any, items: Any) -> Any:
    """The loss of `compute_loss_func`. Errors about a missing output get a note with the model's outputs.

    Raises:
        InvalidArgument: if the loss is None.
    """
    advice = "The model gets no labels then and returns no loss: compute it from the logits and the labels."
    try:
        loss = call_with_accepted(function, outputs, labels, num_items_in_batch=items)
    except (KeyError, AttributeError) as error:
        names = ", ".join(map(str, outputs)) if isinstance(outputs, Mapping) else describe_type(outputs)
        add_note(error, f"This happened while compute_loss_func ran; the outputs of the model are {names}. {advice}")
        raise
    if loss is None:
        raise InvalidArgument(f"compute_loss_func returned None. {advice}")
    return loss


def extract_loss(outputs: Any, inputs: Mapping[str, Any]) -> Any:
    """The loss in the model's outputs.

    It is the entry 'loss' of a mapping, the first item of a tuple, or the first number of a tensor of shape `(n,)`.
    Such a tensor is rarely a loss. We warn, but train on its first number, as transformers does.

    Raises:
        InvalidArgument: if the outputs have no loss; the error names what the model returned.
    """
    # The common case first, since `isinstance(outputs, Mapping)` is slow.
    if isinstance(outputs, (dict, Mapping)):
        if "loss" in outputs:
            return outputs["loss"]
        returned = f"only {', '.join(map(str, outputs)) or 'an empty dict'}"
    elif isinstance(outputs, (tuple, list)) and outputs:
        return outputs[0]
    elif isinstance(outputs, torch.Tensor) and outputs.ndim == 1 and len(outputs):
        log_once(
            logger,
            "The model returned a 1-D tensor; its first number is used as the loss. If that is wrong, " + LOSS_REMEDY,
        )
        return outputs[0]
    else:
        returned = describe_type(outputs)
    raise InvalidArgument(
        f"The model returned no loss, {returned}, from the inputs {', '.join(map(str, inputs))}: "
        f"{'' if 'labels' in inputs else 'check that the model gets the labels; '}{LOSS_REMEDY}"
    )


_PACKAGES = ("lightning.", "pytorch_lightning.")
#: Method of a LightningModule → its replacement.
_LIGHTNING_REPLACEMENTS = {
    "training_step": "a forward that accepts the keys of a sample and returns {'loss': ..., 'logits': ...}, or "
    "Trainer(compute_loss_func=...)",
    "validation_step": "Trainer(eval_dataset=..., compute_metrics=...), which also accepts torchmetrics",
    "test_step": "trainer.evaluate(dataset, metric_key_prefix='test')",
    "predict_step": "trainer.predict(dataset)",
    "configure_optimizers": "the arguments optim, learning_rate and lr_scheduler_type, or Trainer(optimizers=...)",
    "configure_callbacks": "Trainer(callbacks=[...])",
    "train_dataloader": "Trainer(train_dataset=...)",
    "val_dataloader": "Trainer(eval_dataset=...)",
}


def check_lightning_module(model: Any, *, calls_forward: bool) -> None:
    """Warn about a LightningModule's methods that a Trainer does not call, with their replacements.

    Args:
        model: the model.
        calls_forward: whether the Trainer computes the loss with the model's `forward`, not in an override.

    Raises:
        InvalidSetup: if the module does not define `forward`, the only method that a Trainer calls.
    """
    kind = type(model)
    bases = [
        base for base in kind.__mro__ if base.__name__ == "LightningModule" and base.__module__.startswith(_PACKAGES)
    ]
    if not bases or not calls_forward:
        return
    base = bases[0]
    overrides = [name for name in dir(base) if getattr(kind, name) is not getattr(base, name)]
    replacements = {name: _LIGHTNING_REPLACEMENTS[name] for name in _LIGHTNING_REPLACEMENTS if name in overrides}
    replacements |= {
        name: "a Lightning callback in Trainer(callbacks=[...])" for name in overrides if name.startswith("on_")
    }
    if not replacements:
        return
    listed = "".join(f"\n- {name}: {replacement}" for name, replacement in replacements.items())
    sentence = f"{kind.__name__} is a LightningModule, but a Trainer calls only its forward, with the keys of a batch. "
    if "forward" not in overrides:
        raise InvalidSetup(
            f"{sentence}It defines no forward: add one, or pass its inner model, such as Trainer(module.model). "
            f"Where its methods go:{listed}"
        )
    logger.warning("%sWhere its methods go:%s", sentence, listed)


def check_quantization(model: Any) -> str | None:
    """Why transformers rejects a quantized model for training; None if it does not."""
    if not getattr(model, "is_quantized", False) or getattr(model, "_hf_peft_config_loaded", False):
        return None
    quantizer = getattr(model, "hf_quantizer", None)
    if hasattr(model, "_orig_mod"):
        return "The model is quantized and compiled: pass the model that torch.compile() was called with."
    if not libraries.is_peft(model) and not getattr(quantizer, "is_qat_trainable", False):
        return (
            "The model's weights are quantized to integers, which cannot be trained: train adapters on top, with "
            "peft.get_peft_model(model, LoraConfig(...)), or load the model without quantization_config."
        )
    if not getattr(quantizer, "is_trainable", False):
        method = getattr(getattr(quantizer, "quantization_config", None), "quant_method", type(quantizer).__name__)
        return (
            f"The model is quantized with {getattr(method, 'value', method)}, which does not support training: load it "
            "without quantization, or with another quantization_config, such as BitsAndBytesConfig."
        )
    return None


def shifts_labels(model: nn.Module) -> bool:
    """Whether the model's loss predicts label `i + 1` at position `i`, never the first."""
    bare_model = libraries.unwrap_peft(model)
    is_encoder_decoder = getattr(getattr(bare_model, "config", None), "is_encoder_decoder", False)
    if not hasattr(bare_model, "loss_type") or "transformers" not in sys.modules or is_encoder_decoder:
        return False
    from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

    return LOSS_MAPPING.get(str(bare_model.loss_type)) is ForCausalLMLoss


def smoothing_shifts_labels(model: nn.Module) -> bool:
    """Whether label smoothing compares position `i` with label `i + 1`, as for causal models.

    transformers checks only the name of the class, and smooths against the wrong labels for subclasses of causal
    models, for vision-language models, and for modules that wrap a model.
    """
    bare_model = libraries.unwrap_peft(model)
    if not libraries.is_transformers_model(bare_model):
        children = map(libraries.unwrap_peft, bare_model.children())
        models = [child for child in children if libraries.is_transformers_model(child)]
        return len(models) == 1 and smoothing_shifts_labels(models[0])
    is_causal = any(base.__name__ in libraries.causal_lm_names() for base in type(bare_model).__mro__)
    return is_causal or shifts_labels(bare_model)


def align_special_tokens(model: Any, processing_class: Any, *, all_tokens: bool = False) -> None:
    """Copy the tokenizer's special tokens, where defined, into the model's configs (since v4.56).

    Lists of end tokens in a config are extended, not replaced.

    Args:
        model: the model.
        processing_class: the tokenizer, or a processor that has one.
        all_tokens: also copy tokens that the tokenizer does not define, as None (until v5.17).
    """
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    generation_config = getattr(model, "generation_config", None)
    if all_tokens:
        updated_tokens = _replace_special_tokens(model.config, generation_config, tokenizer)
    else:
        updated_tokens = _add_special_tokens(model.config.get_text_config(), generation_config, tokenizer)
    if updated_tokens:
        logger.warning("Copied these special tokens from the tokenizer to the model's configs: %s", updated_tokens)


def _replace_special_tokens(config: Any, generation_config: Any, tokenizer: Any) -> dict[str, Any]:
    updated_tokens = {}
    for name in ("eos_token_id", "bos_token_id", "pad_token_id"):
        token = getattr(tokenizer, name)
        generation_token = None if generation_config is None else getattr(generation_config, name)
        if name == "eos_token_id" and isinstance(generation_token, int):
            generation_token = generation_config.eos_token_id = [generation_token]
        if getattr(config, name, None) == token and (generation_config is None or token in _as_list(generation_token)):
            continue
        updated_tokens[name] = token
        setattr(config, name, token)
        if generation_config is not None:
            end_tokens = [other for other in (token, *_as_list(generation_token)) if other is not None]
            setattr(generation_config, name, end_tokens if name == "eos_token_id" else token)
    return updated_tokens


def _add_special_tokens(config: Any, generation_config: Any, tokenizer: Any) -> dict[str, Any]:
    updated_tokens = {}
    for name in ("eos_token_id", "bos_token_id", "pad_token_id"):
        token = getattr(tokenizer, name, None)
        configs = [candidate for candidate in (config, generation_config) if candidate is not None]
        if token is None or all(token in _as_list(getattr(owner, name, None)) for owner in configs):
            continue
        updated_tokens[name] = token
        for owner in configs:
            current_tokens = getattr(owner, name, None)
            extends = name == "eos_token_id" and (owner is generation_config or isinstance(current_tokens, list))
            other_tokens = [other for other in _as_list(current_tokens) if other is not None and other != token]
            setattr(owner, name, [token, *other_tokens] if extends else token)
    return updated_tokens


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _modules(model: nn.Module) -> list[nn.Module]:
    """The modules that `model.modules()` yields, in the same order; shared modules repeatedly.

    At every step, torch would build a name for each module. In models with many small modules this takes longer than
    the computation.
    """
    found: list[nn.Module] = []
    remaining: list[nn.Module | None] = [model]
    while remaining:
        module = remaining.pop()
        if module is not None:
            found.append(module)
            if module._modules:
                remaining.extend(reversed(module._modules.values()))
    return found


def is_training(model: nn.Module) -> bool:
    """Whether the model and all modules in it are in training mode."""
    # A list takes half as long as a generator, and each micro-batch calls this.
    return False not in [module.training for module in _modules(model)]


@functools.cache
def _overrides_parameters(kind: type[nn.Module]) -> bool:
    """Whether a model's class overrides the methods that list its parameters or modules."""
    methods = ("parameters", "named_parameters", "named_modules")
    return any(getattr(kind, name) is not getattr(nn.Module, name) for name in methods)


def parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that `model.parameters()` yields, in the same order."""
    kind: Any = type(model)
    if _overrides_parameters(kind):
        return list(model.parameters())
    lists = [module._parameters.values() for module in _modules(model) if module._parameters]
    return list({id(parameter): parameter for found in lists for parameter in found if parameter is not None}.values())


def clear_gradients(model: nn.Module) -> None:
    """Clear the gradients, as `model.zero_grad()` does."""
    kind: Any = type(model)
    if "zero_grad" in vars(model) or kind.zero_grad is not nn.Module.zero_grad or _overrides_parameters(kind):
        model.zero_grad()
        return
    for module in _modules(model):
        for parameter in module._parameters.values():
            if parameter is not None:
                parameter.grad = None
