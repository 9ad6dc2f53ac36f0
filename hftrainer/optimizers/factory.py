"""The table of optimizers by name, and the parameter groups for weight decay."""

from __future__ import annotations

import contextlib
import importlib
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from hftrainer.arguments.choices import OptimizerNames
from hftrainer.arguments.fields.argument import changed_arguments
from hftrainer.base.config_files import parse_bool
from hftrainer.compat import libraries, transformers_names
from hftrainer.errors import InvalidArgument, MissingPackage, cause_if_installed
from hftrainer.optimizers import low_rank
from hftrainer.optimizers.adamw_hf import AdamW
from hftrainer.training_args import TrainingArguments

logger = logging.getLogger(__name__)

_ADAM_ARGUMENTS = ("adam_beta1", "adam_beta2", "adam_epsilon")
#: Module of an optimizer → how to install it.
INSTALL = {
    "apex.optimizers": "build https://github.com/NVIDIA/apex; optim='adamw_torch_fused' is as fast",
    "apollo_torch": "pip install apollo-torch",
    "bitsandbytes.optim": "pip install bitsandbytes",
    "galore_torch": "pip install galore-torch",
    "grokadamw": "pip install grokadamw",
    "lomo_optim": "pip install lomo-optim",
    "optimi": "pip install torch-optimi",
    "schedulefree": "pip install 'schedulefree>=1.4'",
    "torch_npu.optim": "pip install torch-npu, on a machine with an Ascend NPU",
    "torch_xla.amp.syncfree": "pip install 'hftrainer[tpu]'",
    "torchao.optim": "pip install 'torchao>=0.11'",
    "torchdistx.optimizers": "build https://github.com/pytorch/torchdistx, which is archived",
}


def parameter_groups(
    model: nn.Module, decayed_names: list[str], weight_decay: float, selected_groups: list[dict[str, Any]] | None = None
) -> list[dict[str, Any]]:
    """Groups of trainable parameters: with weight decay, without it, and the `selected_groups` groups.

    If only some layers of a model are sharded over processes, each group is split by device mesh, since a fused step
    does not accept tensors of different meshes.
    """
    names = set(decayed_names)
    trainable = [(name in names, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    selected_ids = {id(parameter) for group in selected_groups or () for parameter in group["params"]}
    others = [(decays, parameter) for decays, parameter in trainable if id(parameter) not in selected_ids]
    groups: list[dict[str, Any]] = [
        {"params": [parameter for decays, parameter in others if decays], "weight_decay": weight_decay},
        {"params": [parameter for decays, parameter in others if not decays], "weight_decay": 0.0},
    ]
    if selected_groups is not None:
        named_groups = [{**groups[0], "name": "decay"}, {**groups[1], "name": "no decay"}, *selected_groups]
        # Under FSDP, torch cannot load several empty groups.
        groups = [group for group in named_groups if group["params"]]
    meshes = list(dict.fromkeys(_mesh_of(parameter) for _, parameter in trainable))
    return groups if len(meshes) < 2 else _split_by_mesh(groups, meshes)


def _split_by_mesh(groups: list[dict[str, Any]], meshes: list[Any]) -> list[dict[str, Any]]:
    groups_by_mesh = [
        {**group, "params": [parameter for parameter in group["params"] if _mesh_of(parameter) == mesh]}
        for group in groups
        for mesh in meshes
    ]
    return [group for group in groups_by_mesh if group["params"]]


def _mesh_of(parameter: nn.Parameter) -> Any:
    """The device mesh over which a parameter is sharded; None without sharding."""
    return getattr(parameter, "device_mesh", None)


@dataclass
class OptimizerInputs:
    """The inputs of an optimizer builder.

    Attributes:
        name: the optimizer's name.
        args: the training arguments.
        model: the model, for optimizers that select parameters from it.
        options: the options in `optim_args`, by name.
        read_options: names of the options that were read, so that others can be rejected.
        uses_adam: whether the arguments' betas and epsilon were read.
    """

    name: str
    args: TrainingArguments
    model: nn.Module | None
    options: dict[str, str]
    read_options: set[str] = field(default_factory=set)
    uses_adam: bool = False

    @property
    def lr(self) -> dict[str, Any]:
        """The learning rate."""
        return {"lr": self.args.learning_rate}

    @property
    def adam(self) -> dict[str, Any]:
        """The learning rate, betas and epsilon."""
        self.uses_adam = True
        betas = (self.args.adam_beta1, self.args.adam_beta2)
        return {**self.lr, "betas": betas, "eps": self.args.adam_epsilon}

    def read(self, **converters: Any) -> dict[str, Any]:
        """The options in `optim_args` and the options with a default, converted to their types.

        Args:
            converters: option → a function that converts its text, or a tuple of this function and a default.

        Raises:
            InvalidArgument: if the function cannot convert the text.
        """
        self.read_options.update(converters)
        values: dict[str, Any] = {}
        for name, kind in converters.items():
            convert, *default = kind if isinstance(kind, tuple) else (kind,)
            if (text := self.options.get(name)) is not None:
                with contextlib.suppress(ValueError):
                    values[name] = parse_bool(text) if convert is bool else convert(text)
                if values.get(name) is None:
                    expected = "flag" if convert is bool else convert.__name__
                    raise InvalidArgument(f"optim_args: {name}={text!r} is not a valid {expected}.")
            elif default:
                (values[name],) = default
        return values


OptimizerSpec = tuple[Any, dict[str, Any]]
OptimizerBuilder = Callable[[OptimizerInputs], OptimizerSpec]


def _load_class(name: str, module: str, attribute: str) -> Any:
    """A class of another library.

    Raises:
        MissingPackage: if the library is not installed; the message has the command to install it.
    """
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise MissingPackage(
            f"optim={name!r} needs {module}.{attribute} ({error}): {INSTALL[module]}"
        ) from cause_if_installed(error)


def _make_builder(module: str, attribute: str, *, has_betas: bool = True, **converters: Any) -> OptimizerBuilder:
    """A function that returns an optimizer class and its keyword arguments.

    Args:
        module: the module of the class, in torch or another library.
        attribute: the name of the class.
        has_betas: whether the class accepts Adam's betas and epsilon in addition to the learning rate.
        converters: the options in `optim_args`, as for `OptimizerInputs.read`.
    """

    def make(inputs: OptimizerInputs) -> OptimizerSpec:
        kwargs = inputs.adam if has_betas else inputs.lr
        return _load_class(inputs.name, module, attribute), {**kwargs, **inputs.read(**converters)}

    return make


def dtype(name: str) -> torch.dtype | None:
    """The torch dtype with this name, or None."""
    value = getattr(torch, name, None)
    return value if isinstance(value, torch.dtype) else None


def _adamw_torch_fused(inputs: OptimizerInputs) -> OptimizerSpec:
    # Torch has no fused kernel for XLA, which fuses the complete step.
    kwargs = {} if inputs.args.device.type == "xla" else {"fused": True}
    return torch.optim.AdamW, {**inputs.adam, **kwargs}


def _adamw_hf(inputs: OptimizerInputs) -> OptimizerSpec:
    """Under `install()`, transformers' equivalent class, for scripts that compare classes; otherwise ours."""
    if transformers_names.is_installed() and "transformers" in sys.modules:
        importlib.import_module("transformers.optimization")
    return transformers_names.current_value("transformers.optimization", "AdamW", AdamW), inputs.adam


def _adafactor(inputs: OptimizerInputs) -> OptimizerSpec:
    kind = libraries.import_from_transformers("optimization", "Adafactor", "optim='adafactor'")
    return kind, {**inputs.lr, "scale_parameter": False, "relative_step": False}


def _bitsandbytes(inputs: OptimizerInputs) -> OptimizerSpec:
    name = inputs.name
    kwargs = {"optim_bits": 8 if "8bit" in name else 32, "is_paged": "paged" in name}
    if "rmsprop" in name:
        del kwargs["is_paged"]
        return _load_class(name, "bitsandbytes.optim", "RMSprop"), {**inputs.lr, **inputs.read(**_RMSPROP), **kwargs}
    if "lion" in name:
        options = {**inputs.lr, "betas": inputs.adam["betas"]}
        return _load_class(name, "bitsandbytes.optim", "Lion"), {**options, **kwargs}
    if "ademamix" in name:
        beta1, beta2 = inputs.adam["betas"]
        epsilon = inputs.args.adam_epsilon
        options = inputs.read(
            beta1=(float, beta1), beta2=(float, beta2), beta3=(float, 0.9999), alpha=(float, 5.0), eps=(float, epsilon)
        )
        options |= {"betas": tuple(options.pop(f"beta{number}") for number in (1, 2, 3))}
        options |= inputs.read(t_alpha=int, t_beta3=int)
        return _load_class(name, "bitsandbytes.optim", "AdEMAMix"), {**inputs.lr, **options, **kwargs}
    return _load_class(name, "bitsandbytes.optim", "AdamW"), {**inputs.adam, **kwargs}


def _galore(inputs: OptimizerInputs) -> OptimizerSpec:
    class_name = "GaLoreAdafactor" if "adafactor" in inputs.name else "GaLoreAdamW"
    class_name += "8bit" if "8bit" in inputs.name else ""
    options = inputs.read(rank=(int, 128), update_proj_gap=(int, 200), scale=(float, 0.25), proj_type=(str, "std"))
    kwargs = inputs.lr
    if "adafactor" in inputs.name:
        kwargs |= {"scale_parameter": False, "relative_step": False}
    optimizer_class = _load_class(inputs.name, "galore_torch", class_name)
    return low_rank.make_arguments(inputs.name, inputs.args, inputs.model, optimizer_class, options, kwargs)


def _apollo(inputs: OptimizerInputs) -> OptimizerSpec:
    options = inputs.read(
        rank=(int, 128),
        proj=(str, "random"),
        scale_type=(str, "channel"),
        update_proj_gap=(int, 200),
        scale=(float, 1.0),
        proj_type=(str, "std"),
    )
    options |= {name: inputs.adam[name] for name in ("betas", "eps")}
    optimizer_class = _load_class(inputs.name, "apollo_torch", "APOLLOAdamW")
    return low_rank.make_arguments(inputs.name, inputs.args, inputs.model, optimizer_class, options, inputs.lr)


def _lomo(inputs: OptimizerInputs) -> OptimizerSpec:
    optimizer_class = _load_class(inputs.name, "lomo_optim", "AdaLomo" if inputs.name == "adalomo" else "Lomo")
    if inputs.model is None:
        raise InvalidArgument(f"optim={inputs.name!r} needs the model, not its parameters: pass model=.")
    return optimizer_class, {**inputs.lr, "model": inputs.model}


def _schedule_free(inputs: OptimizerInputs) -> OptimizerSpec:
    class_names = {"radam": "RAdamScheduleFree", "adamw": "AdamWScheduleFree", "sgd": "SGDScheduleFree"}
    algorithm = inputs.name.removeprefix("schedule_free_")
    kwargs = inputs.lr if algorithm == "sgd" else inputs.adam
    kwargs["weight_decay"] = inputs.args.weight_decay
    if algorithm != "radam":
        warmup = inputs.args.warmup_steps
        if 0 < warmup < 1:
            raise InvalidArgument(
                f"optim={inputs.name!r} has a built-in warm-up: set warmup_steps to a number of steps, not {warmup}."
            )
        kwargs["warmup_steps"] = warmup
    kwargs |= inputs.read(weight_lr_power=(float, 2.0), r=(float, 0.0))
    return _load_class(inputs.name, "schedulefree", class_names[algorithm]), kwargs


def _stable_adamw(inputs: OptimizerInputs) -> OptimizerSpec:
    options = inputs.read(decouple_lr=(bool, False), max_lr=(float, None), kahan_sum=(bool, None))
    kwargs = {**inputs.adam, "weight_decay": inputs.args.weight_decay, **options}
    return _load_class(inputs.name, "optimi", "StableAdamW"), kwargs


_RMSPROP: dict[str, Any] = {"momentum": float, "alpha": float, "eps": float, "weight_decay": float, "centered": bool}
_TORCHAO: dict[str, Any] = {"block_size": (int, 256), "bf16_stochastic_round": (bool, False)}

#: Optimizer name → function that returns its class and keyword arguments. Each name is also a member of
#: `OptimizerNames` in `arguments/choices.py`.
OPTIMIZERS: dict[str, OptimizerBuilder] = {
    "adamw_hf": _adamw_hf,
    "adamw_torch": _make_builder("torch.optim", "AdamW"),
    "adamw_torch_fused": _adamw_torch_fused,
    "adamw_torch_xla": _make_builder("torch_xla.amp.syncfree", "AdamW"),
    "adamw_torch_npu_fused": _make_builder("torch_npu.optim", "NpuFusedAdamW"),
    "adamw_apex_fused": _make_builder("apex.optimizers", "FusedAdam"),
    "adafactor": _adafactor,
    "adamw_anyprecision": _make_builder(
        "torchdistx.optimizers",
        "AnyPrecisionAdamW",
        use_kahan_summation=(bool, False),
        momentum_dtype=(dtype, torch.float32),
        variance_dtype=(dtype, torch.float32),
        compensation_buffer_dtype=(dtype, torch.bfloat16),
    ),
    "adamw_torch_4bit": _make_builder("torchao.optim", "AdamW4bit", **_TORCHAO),
    "adamw_torch_8bit": _make_builder("torchao.optim", "AdamW8bit", **_TORCHAO),
    "sgd": _make_builder(
        "torch.optim", "SGD", has_betas=False, momentum=float, dampening=float, weight_decay=float, nesterov=bool
    ),
    "adagrad": _make_builder("torch.optim", "Adagrad", has_betas=False, lr_decay=float, weight_decay=float, eps=float),
    "rmsprop": _make_builder("torch.optim", "RMSprop", has_betas=False, **_RMSPROP),
    **dict.fromkeys(
        """
        ademamix adamw_bnb_8bit adamw_8bit ademamix_8bit lion_8bit lion_32bit paged_adamw_32bit paged_adamw_8bit
        paged_ademamix_32bit paged_ademamix_8bit paged_lion_32bit paged_lion_8bit rmsprop_bnb rmsprop_bnb_8bit
        rmsprop_bnb_32bit
        """.split(),
        _bitsandbytes,
    ),
    **dict.fromkeys(
        """
        galore_adamw galore_adamw_8bit galore_adafactor galore_adamw_layerwise galore_adamw_8bit_layerwise
        galore_adafactor_layerwise
        """.split(),
        _galore,
    ),
    **dict.fromkeys(("lomo", "adalomo"), _lomo),
    "grokadamw": _make_builder(
        "grokadamw",
        "GrokAdamW",
        has_betas=False,
        alpha_init=(float, 0.98),
        lamb=(float, 2.0),
        gamma=(float, 0.1),
        grokking_signal_decay_rate=(float, 0.1),
        gradient_clipping=(float, 1.0),
    ),
    **dict.fromkeys(("schedule_free_radam", "schedule_free_adamw", "schedule_free_sgd"), _schedule_free),
    **dict.fromkeys(("apollo_adamw", "apollo_adamw_layerwise"), _apollo),
    "stable_adamw": _stable_adamw,
}


def parse_optim_args(text: str | None) -> dict[str, str]:
    """Parse `optim_args`, 'name=value,name=value', into a dict.

    Raises:
        InvalidArgument: for any other form.
    """
    pairs = [pair for pair in str(text or "").replace(" ", "").split(",") if pair]
    if invalid := [pair for pair in pairs if "=" not in pair]:
        raise InvalidArgument(f"optim_args={text!r}: {invalid[0]!r} is not name=value; use 'name=value,name=value'.")
    return dict(pair.split("=", 1) for pair in pairs)


def optimizer_cls_and_kwargs(args: TrainingArguments, model: nn.Module | None = None) -> OptimizerSpec:
    """The class and keyword arguments of the optimizer that `args.optim` selects.

    Raises:
        InvalidArgument: for an unknown name or unknown options.
        MissingPackage: if the optimizer's library is not installed.
    """
    name = OptimizerNames(args.optim).value
    inputs = OptimizerInputs(name, args, model, parse_optim_args(args.optim_args))
    spec = OPTIMIZERS[name](inputs)
    if unknown := sorted(inputs.options.keys() - inputs.read_options):
        names = ", ".join(sorted(inputs.read_options))
        hint = f"allowed: {names}" if names else "it has no options"
        raise InvalidArgument(
            f"optim_args of optim={name!r}: unknown {', '.join(unknown)}; {hint}. For other arguments of the class, "
            "pass optimizer_cls_and_kwargs to Trainer."
        )
    if not inputs.uses_adam and (ignored := changed_arguments(args, _ADAM_ARGUMENTS)):
        arguments = ", ".join(f"{argument}={value}" for argument, value in ignored.items())
        logger.warning("%s has no effect: optim=%r lacks this setting, or reads it from optim_args.", arguments, name)
    return spec


def use_32bit_embedding_moments(model: nn.Module, kind: Any, kwargs: dict[str, Any]) -> None:
    """Use 32-bit moments for embeddings in 8-bit bitsandbytes optimizers; no effect on others."""
    if "bitsandbytes" not in str(kind) or kwargs.get("optim_bits") != 8:
        return
    manager = importlib.import_module("bitsandbytes.optim").GlobalOptimManager.get_instance()
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            manager.register_module_override(module, "weight", {"optim_bits": 32})
