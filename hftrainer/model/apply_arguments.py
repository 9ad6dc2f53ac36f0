"""Applies the changes that training arguments request for a model."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import warnings
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from hftrainer.compat import libraries
from hftrainer.errors import InvalidArgument, MissingMethod, MissingPackage, cause_if_installed, suggest
from hftrainer.hf_argparser import string_to_bool
from hftrainer.training_args import TrainingArguments

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def apply_model_arguments(
    model: nn.Module, args: TrainingArguments, read_once: Mapping[str, Any], trainer: Any
) -> Iterator[None]:
    """Apply the changes that the arguments request.

    Noise on embeddings is removed at the end of the block, as in transformers.

    Args:
        model: the user's model.
        args: the current arguments.
        read_once: argument values from when the Trainer was made; those for torch.compile still apply.
        trainer: the Trainer. `neftune_noise_alpha` is the scale of NEFTune's noise, `_activate_neftune` adds the
            noise, and `neftune_hook_handle` removes it at the end; a subclass may replace any of them.
    """
    if args.use_liger_kernel:
        apply_liger_kernel(model, args.liger_kernel_config)  # type: ignore[arg-type]
    if args.activation_checkpointing:
        enable_activation_checkpointing(model, args.activation_checkpointing_kwargs)  # type: ignore[arg-type]
    compile_model(model, SimpleNamespace(**read_once))
    if trainer.neftune_noise_alpha is None:
        yield
        return
    trainer._activate_neftune(model)
    noise_handle = trainer.neftune_hook_handle
    try:
        yield
    finally:
        noise_handle.remove()
        # The script may have set another handle, or None.
        if trainer.neftune_hook_handle is not None:
            trainer._deactivate_neftune(model)


def add_noise_to_embeddings(model: Any, alpha: float) -> Any:
    """Add NEFTune's uniform noise to the embeddings during training (arXiv 2310.05914).

    Args:
        model: a model whose `get_input_embeddings()` has outputs of shape `(batch, length, hidden)`.
        alpha: the bound of the noise, before division by the square root of `length * hidden`.

    Returns:
        A handle; its `remove()` removes the noise.
    """
    bare_model = libraries.unwrap_peft(model)
    if not hasattr(bare_model, "get_input_embeddings"):
        raise MissingMethod(
            f"neftune_noise_alpha={alpha} adds noise to the model's input embeddings, but {type(bare_model).__name__} "
            "has no get_input_embeddings(): add this method, or remove the argument."
        )

    def add_noise(module: nn.Module, _: Any, output: torch.Tensor) -> torch.Tensor:
        if not module.training:
            return output
        bound = alpha / torch.sqrt(torch.tensor(output.size(1) * output.size(2)))
        return output + torch.zeros_like(output).uniform_(-float(bound), float(bound))

    return bare_model.get_input_embeddings().register_forward_hook(add_noise)


def enable_activation_checkpointing(model: Any, kwargs: dict[str, Any] | None) -> None:
    """Let the model recompute activations in the backward pass, by the newest method that it has.

    Args:
        model: the model.
        kwargs: keyword arguments of `torch.utils.checkpoint`; since v5.23 also 'every_n_layers' (which layers) and
            'offload' (where saved tensors are kept).
    """
    options = dict(kwargs or {})
    layers = {name: options.pop(name) for name in ("every_n_layers", "offload") if name in options}
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=options or None, **layers)
    elif hasattr(model, "gradient_checkpointing_enable"):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options or None, **layers)
    else:
        raise MissingMethod(
            f"gradient_checkpointing=True (also named activation_checkpointing) needs a model with "
            f"gradient_checkpointing_enable(), which {type(model).__name__} lacks: add it, with torch.utils.checkpoint."
        )


def compile_model(model: nn.Module, args: Any) -> None:
    """Compile the model in place, at most once, so that its weights keep their names.

    Environment variables of `accelerate launch` fill in unset arguments, and can enable compilation.

    Args:
        model: the model.
        args: an object with `torch_compile`, `torch_compile_backend` and `torch_compile_mode`.

    Raises:
        InvalidArgument: for a backend that torch does not have.
    """
    backend = _compile_backend(args)
    if backend is None or model._compiled_call_impl is not None:
        return
    if backend not in (known := torch.compiler.list_backends(exclude_tags=())):
        advice = f": use one of {', '.join(torch.compiler.list_backends())}."
        raise InvalidArgument(
            f"torch_compile_backend={backend!r} is not a backend of torch{suggest(backend, known, advice)}"
        )
    dynamic = _dynamo_setting("USE_DYNAMIC")
    model.compile(
        backend=backend,
        mode=args.torch_compile_mode or _dynamo_setting("MODE") or None,
        fullgraph=string_to_bool(_dynamo_setting("USE_FULLGRAPH") or "no"),
        dynamic=string_to_bool(dynamic) if dynamic else None,
    )


def _compile_backend(args: Any) -> str | None:
    backend = ((args.torch_compile_backend or "inductor") if args.torch_compile else _dynamo_setting("BACKEND")).lower()
    return None if backend in ("", "no") else backend


def _dynamo_setting(setting: str) -> str:
    """A setting for torch.compile that `accelerate launch` passes in the environment; '' if unset."""
    return os.environ.get(f"ACCELERATE_DYNAMO_{setting}", "")


def apply_liger_kernel(model: Any, config: dict[str, Any] | None) -> None:
    """Replace parts of a transformers model in place with Liger's Triton kernels.

    Raises:
        MissingPackage: when liger-kernel is not installed.
    """
    try:
        liger = importlib.import_module("liger_kernel.transformers")
    except ImportError as error:
        raise MissingPackage(
            f"use_liger_kernel=True needs liger-kernel ({error}): pip install liger-kernel, on a machine with a GPU."
        ) from cause_if_installed(error)
    bare_model = libraries.unwrap_peft(model)
    if not libraries.is_transformers_model(bare_model):
        name = type(bare_model).__name__
        logger.warning("use_liger_kernel: %s is not a transformers model and is not changed.", name)
        return
    liger._apply_liger_kernel_to_instance(model=bare_model, **(config or {}))


def set_tf32(args: TrainingArguments) -> None:
    """Allow or forbid TF32 matrix products, whose inputs have 10 mantissa bits, on NVIDIA GPUs.

    Follows `tf32`. If that is None, compiled models use TF32 where the GPU supports it, except with `fp16`. Other
    models keep the setting of torch.

    Raises:
        InvalidArgument: when `tf32` is True and the GPU does not support it.
    """
    is_allowed = args.tf32
    if is_allowed is None and _compile_backend(args) is not None and not args.fp16:
        is_allowed = True
    # Return early, since asking for the GPU's capability would initialize it.
    if is_allowed is None:
        return
    is_supported = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 8
    if args.tf32 and not is_supported:
        raise InvalidArgument("tf32=True needs an NVIDIA GPU of the Ampere generation or newer: remove it.")
    if is_supported:
        with warnings.catch_warnings():
            # torch 2.9 warns that both settings have newer names.
            warnings.simplefilter("ignore")
            torch.backends.cuda.matmul.allow_tf32 = is_allowed
            torch.backends.cudnn.allow_tf32 = is_allowed
