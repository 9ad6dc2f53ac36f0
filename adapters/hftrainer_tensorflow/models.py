"""The torch model that a `TFTrainer` trains, and its loss."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hftrainer.errors import InvalidArgument, UnsupportedArgument
from hftrainer_tensorflow.pipelines import number_of_rows


def is_keras(model: Any) -> bool:
    """Whether `model` is a Keras model, of any release and backend."""
    return any(kind.__module__.split(".")[0] in ("keras", "tf_keras") for kind in type(model).__mro__)


def torch_model(model: Any) -> nn.Module:
    """The model to train.

    Raises:
        UnsupportedArgument: for models without a torch equivalent.
    """
    if isinstance(model, nn.Module):
        return model
    name = type(model).__name__
    # Models of transformers 4.
    if name.startswith("TF") and hasattr(model, "config") and hasattr(model, "get_weights"):
        return _equivalent_torch_model(model)
    if is_keras(model):
        raise UnsupportedArgument(
            f"model: {name} is a Keras model that TensorFlow or JAX computes, but TFTrainer trains with torch. Set "
            "KERAS_BACKEND=torch before keras (3 or newer) is imported, or pass a torch model."
        )
    raise UnsupportedArgument(
        f"model: {name} is neither a torch module, nor a TensorFlow model of transformers 4, nor a Keras 3 model on "
        "torch: TFTrainer has no torch model to train instead."
    )


def _equivalent_torch_model(model: Any) -> nn.Module:
    """The torch model of the same architecture, with the weights of a TensorFlow model."""
    transformers = importlib.import_module("transformers")
    name = type(model).__name__
    torch_class: type[nn.Module] | None = getattr(transformers, name.removeprefix("TF"), None)
    if torch_class is None:
        raise UnsupportedArgument(
            f"model: transformers has no {name.removeprefix('TF')}, the torch model of the same architecture, which "
            f"would be trained instead of {name}. Pass the torch model that you want to train."
        )
    equivalent = torch_class(model.config)
    transformers.load_tf2_model_in_pytorch_model(equivalent, model, allow_missing_keys=True)
    return equivalent


def copy_weights_back(trained_model: nn.Module, script_model: Any) -> None:
    """Copy the trained weights into the script's TensorFlow model."""
    if script_model is not trained_model:
        state = {name: value.detach().cpu() for name, value in trained_model.state_dict().items()}
        importlib.import_module("transformers").load_pytorch_weights_in_tf2_model(
            script_model, state, allow_missing_keys=True
        )


def parameter_names(model: Any) -> dict[int, str]:
    """Parameter id → its name. For Keras models it is the path of the variable, such as 'dense/bias'."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    if is_keras(model):
        names |= {id(variable.value): variable.path for variable in model.variables}
    return names


def compute_loss_and_outputs(model: Any, features: Any, labels: Any, training: bool) -> tuple[torch.Tensor, Any]:
    """The loss summed over its terms, and the model's outputs.

    Raises:
        InvalidArgument: for a Keras model that is not compiled with a loss.
    """
    if is_keras(model):
        return _compute_keras_loss_and_outputs(model, features, labels, training)
    outputs = model(**features, **(labels if isinstance(labels, Mapping) else {"labels": labels}))
    outputs = tuple(outputs.values()) if isinstance(outputs, Mapping) else outputs
    return outputs[0] * _terms(model, labels), outputs[1:]


def _compute_keras_loss_and_outputs(model: Any, features: Any, labels: Any, training: bool) -> tuple[torch.Tensor, Any]:
    if getattr(model, "loss", None) is None:
        raise InvalidArgument(
            f"model: {type(model).__name__} has no loss. Call model.compile(loss=...) before creating TFTrainer, or "
            "override TFTrainer.run_model."
        )
    outputs = model(features, training=training)
    loss = model.compute_loss(x=features, y=labels, y_pred=outputs, training=training)
    return loss * number_of_rows(labels), (outputs,)


def _terms(model: nn.Module, labels: Any) -> int:
    """Number of terms that the model's loss averages."""
    if isinstance(labels, Mapping):
        return number_of_rows(labels)
    if type(model).__name__.endswith(("ForCausalLM", "LMHeadModel")):
        labels = labels[..., 1:]
    return int((labels != -100).sum())


def check_loss(loss: Any) -> torch.Tensor:
    """The sum of the losses that `run_model` returns.

    Raises:
        UnsupportedArgument: for a tensor of another library.
    """
    if not isinstance(loss, torch.Tensor):
        library = type(loss).__module__.split(".")[0]
        raise UnsupportedArgument(
            f"run_model returns a loss of {library} ({type(loss).__name__}): the model is torch's, so torch must "
            "compute the loss (torch.nn.functional), or keras.ops with KERAS_BACKEND=torch."
        )
    return loss.sum()
