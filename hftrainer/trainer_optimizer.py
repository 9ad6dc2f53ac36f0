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
from hftrainer.arguments.field import changed_arguments
from hftrainer.compat import peers, swap
from hftrainer.errors import InvalidArgument, MissingPackage, unless_absent
from hftrainer.optimizers import low_rank
from hftrainer.optimizers.adamw_hf import AdamW
from hftrainer.parallel.config_files import parse_bool
from hftrainer.training_args import TrainingArguments

logger = logging.getLogger(__name__)

_OF_ADAM = ("adam_beta1", "adam_beta2", "adam_epsilon")
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
    model: nn.Module, decayed: list[str], weight_decay: float, selected: list[dict[str, Any]] | None = None
) -> list[dict[str, Any]]:
    """Two groups of the trainable parameters: with weight decay and without; then those that are `selected`.

    If only some layers of a model are sharded over processes, each group is split by device mesh: a fused step cannot
    take tensors of different meshes.
    """
    names = set(decayed)
    trainable = [(name in names, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    taken = {id(parameter) for group in selected or () for parameter in group["params"]}
    rest = [(decays, parameter) for decays, parameter in trainable if id(parameter) not in taken]
    groups: list[dict[str, Any]] = [
        {"params": [parameter for decays, parameter in rest if decays], "weight_decay": weight_decay},
        {"params": [parameter for decays, parameter in rest if not decays], "weight_decay": 0.0},
    ]
    if selected is not None:
        named = [{**groups[0], "name": "decay"}, {**groups[1], "name": "no decay"}, *selected]
        groups = [group for group in named if group["params"]]  # torch cannot load several empty groups under FSDP
    meshes = list(dict.fromkeys(_mesh_of(parameter) for _, parameter in trainable))
    if len(meshes) < 2:
        return groups
    split = [
        {**group, "params": [parameter for parameter in group["params"] if _mesh_of(parameter) == mesh]}
        for group in groups
        for mesh in meshes
    ]
    return [group for group in split if group["params"]]


def _mesh_of(parameter: nn.Parameter) -> Any:
    """The device mesh that a parameter is sharded over; None for a parameter that is not sharded."""
    return getattr(parameter, "device_mesh", None)


@dataclass
class Request:
    """The inputs for making an optimizer.

    Attributes:
        name: the optimizer's name.
        args: the training arguments.
        model: the model, for optimizers that select parameters from it.
        options: the options in `optim_args`, by name.
        asked: the options that were read, so that all others can be rejected.
        uses_adam: whether the betas and epsilon of the arguments were read.
    """

    name: str
    args: TrainingArguments
    model: nn.Module | None
    options: dict[str, str]
    asked: set[str] = field(default_factory=set)
    uses_adam: bool = False

    @property
    def lr(self) -> dict[str, Any]:
        """The learning rate."""
        return {"lr": self.args.learning_rate}

    @property
    def adam(self) -> dict[str, Any]:
        """Learning rate, betas and epsilon."""
        self.uses_adam = True
        betas = (self.args.adam_beta1, self.args.adam_beta2)
        return {**self.lr, "betas": betas, "eps": self.args.adam_epsilon}

    def read(self, **kinds: Any) -> dict[str, Any]:
        """The options given in `optim_args`, and those with a default, each converted to its type.

        Args:
            kinds: option → a function that converts its text; or that function, and a default.

        Raises:
            InvalidArgument: for a text that cannot be converted.
        """
        self.asked.update(kinds)
        values: dict[str, Any] = {}
        for name, kind in kinds.items():
            convert, *default = kind if isinstance(kind, tuple) else (kind,)
            if name in self.options:
                values[name] = self._converted(name, convert)
            elif default:
                (values[name],) = default
        return values

    def _converted(self, name: str, convert: Callable[[str], Any]) -> Any:
        text, value = self.options[name], None
        with contextlib.suppress(ValueError):
            value = parse_bool(text) if convert is bool else convert(text)
        if value is None:
            expected = "flag" if convert is bool else convert.__name__
            raise InvalidArgument(f"optim_args: {name}={text!r} is not a valid {expected}.")
        return value


OptimizerSpec = tuple[Any, dict[str, Any]]


def _load(name: str, module: str, attribute: str) -> Any:
    """A class of another library.

    Raises:
        MissingPackage: when the library is not installed; names the command that installs it.
    """
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise MissingPackage(
            f"optim={name!r} needs {module}.{attribute} ({error}): {INSTALL[module]}"
        ) from unless_absent(error)


def _builder(
    module: str, attribute: str, *, has_betas: bool = True, **kinds: Any
) -> Callable[[Request], OptimizerSpec]:
    """A function that returns a class of torch or another library, and its keywords.

    Args:
        module: its module.
        attribute: its name.
        has_betas: whether it takes Adam's betas and epsilon, beside the learning rate.
        kinds: the options in `optim_args`, as `Request.read` takes them.
    """

    def make(request: Request) -> OptimizerSpec:
        keywords = request.adam if has_betas else request.lr
        return _load(request.name, module, attribute), {**keywords, **request.read(**kinds)}

    return make


def dtype(name: str) -> torch.dtype | None:
    """The torch dtype with that name, or None."""
    found = getattr(torch, name, None)
    return found if isinstance(found, torch.dtype) else None


def _adamw_torch_fused(request: Request) -> OptimizerSpec:
    # For XLA torch has no fused kernel; XLA fuses the whole step.
    fused = {} if request.args.device.type == "xla" else {"fused": True}
    return torch.optim.AdamW, {**request.adam, **fused}


def _adamw_hf(request: Request) -> OptimizerSpec:
    """The installed transformers' class under `install()`, for scripts that compare classes; same computation."""
    if swap.is_installed() and "transformers" in sys.modules:
        importlib.import_module("transformers.optimization")
    return swap.current_value("transformers.optimization", "AdamW", AdamW), request.adam


def _adafactor(request: Request) -> OptimizerSpec:
    kind = peers.import_from_transformers("optimization", "Adafactor", "optim='adafactor'")
    return kind, {**request.lr, "scale_parameter": False, "relative_step": False}


def _bitsandbytes(request: Request) -> OptimizerSpec:
    name = request.name
    kwargs = {"optim_bits": 8 if "8bit" in name else 32, "is_paged": "paged" in name}
    if "rmsprop" in name:
        del kwargs["is_paged"]
        return _load(name, "bitsandbytes.optim", "RMSprop"), {**request.lr, **request.read(**_RMSPROP), **kwargs}
    if "lion" in name:
        own = {**request.lr, "betas": request.adam["betas"]}
        return _load(name, "bitsandbytes.optim", "Lion"), {**own, **kwargs}
    if "ademamix" in name:
        beta1, beta2 = request.adam["betas"]
        epsilon = request.args.adam_epsilon
        own = request.read(
            beta1=(float, beta1), beta2=(float, beta2), beta3=(float, 0.9999), alpha=(float, 5.0), eps=(float, epsilon)
        )
        own |= {"betas": tuple(own.pop(f"beta{number}") for number in (1, 2, 3))}
        own |= request.read(t_alpha=int, t_beta3=int)
        return _load(name, "bitsandbytes.optim", "AdEMAMix"), {**request.lr, **own, **kwargs}
    return _load(name, "bitsandbytes.optim", "AdamW"), {**request.adam, **kwargs}


def _galore(request: Request) -> OptimizerSpec:
    kind = "GaLoreAdafactor" if "adafactor" in request.name else "GaLoreAdamW"
    kind += "8bit" if "8bit" in request.name else ""
    own = request.read(rank=(int, 128), update_proj_gap=(int, 200), scale=(float, 0.25), proj_type=(str, "std"))
    kwargs = request.lr
    if "adafactor" in request.name:
        kwargs |= {"scale_parameter": False, "relative_step": False}
    made = _load(request.name, "galore_torch", kind)
    return low_rank.build(request.name, request.args, request.model, made, own, kwargs)


def _apollo(request: Request) -> OptimizerSpec:
    own = request.read(
        rank=(int, 128),
        proj=(str, "random"),
        scale_type=(str, "channel"),
        update_proj_gap=(int, 200),
        scale=(float, 1.0),
        proj_type=(str, "std"),
    )
    own |= {name: request.adam[name] for name in ("betas", "eps")}
    made = _load(request.name, "apollo_torch", "APOLLOAdamW")
    return low_rank.build(request.name, request.args, request.model, made, own, request.lr)


def _lomo(request: Request) -> OptimizerSpec:
    kind = _load(request.name, "lomo_optim", "AdaLomo" if request.name == "adalomo" else "Lomo")
    if request.model is None:
        raise InvalidArgument(f"optim={request.name!r} needs the model, not its parameters: pass model=.")
    return kind, {**request.lr, "model": request.model}


def _schedule_free(request: Request) -> OptimizerSpec:
    kinds = {"radam": "RAdamScheduleFree", "adamw": "AdamWScheduleFree", "sgd": "SGDScheduleFree"}
    which = request.name.removeprefix("schedule_free_")
    kwargs = request.lr if which == "sgd" else request.adam
    kwargs["weight_decay"] = request.args.weight_decay
    if which != "radam":
        warmup = request.args.warmup_steps
        if 0 < warmup < 1:
            raise InvalidArgument(
                f"optim={request.name!r} does its own warm-up: set warmup_steps to a number of steps, not {warmup}."
            )
        kwargs["warmup_steps"] = warmup
    kwargs |= request.read(weight_lr_power=(float, 2.0), r=(float, 0.0))
    return _load(request.name, "schedulefree", kinds[which]), kwargs


def _stable_adamw(request: Request) -> OptimizerSpec:
    options = request.read(decouple_lr=(bool, False), max_lr=(float, None), kahan_sum=(bool, None))
    keywords = {**request.adam, "weight_decay": request.args.weight_decay, **options}
    return _load(request.name, "optimi", "StableAdamW"), keywords


_RMSPROP: dict[str, Any] = {"momentum": float, "alpha": float, "eps": float, "weight_decay": float, "centered": bool}
_TORCHAO: dict[str, Any] = {"block_size": (int, 256), "bf16_stochastic_round": (bool, False)}

#: Optimizer name → function that returns its class and keywords.
OPTIMIZERS: dict[str, Callable[[Request], OptimizerSpec]] = {
    "adamw_hf": _adamw_hf,
    "adamw_torch": _builder("torch.optim", "AdamW"),
    "adamw_torch_fused": _adamw_torch_fused,
    "adamw_torch_xla": _builder("torch_xla.amp.syncfree", "AdamW"),
    "adamw_torch_npu_fused": _builder("torch_npu.optim", "NpuFusedAdamW"),
    "adamw_apex_fused": _builder("apex.optimizers", "FusedAdam"),
    "adafactor": _adafactor,
    "adamw_anyprecision": _builder(
        "torchdistx.optimizers",
        "AnyPrecisionAdamW",
        use_kahan_summation=(bool, False),
        momentum_dtype=(dtype, torch.float32),
        variance_dtype=(dtype, torch.float32),
        compensation_buffer_dtype=(dtype, torch.bfloat16),
    ),
    "adamw_torch_4bit": _builder("torchao.optim", "AdamW4bit", **_TORCHAO),
    "adamw_torch_8bit": _builder("torchao.optim", "AdamW8bit", **_TORCHAO),
    "sgd": _builder(
        "torch.optim", "SGD", has_betas=False, momentum=float, dampening=float, weight_decay=float, nesterov=bool
    ),
    "adagrad": _builder("torch.optim", "Adagrad", has_betas=False, lr_decay=float, weight_decay=float, eps=float),
    "rmsprop": _builder("torch.optim", "RMSprop", has_betas=False, **_RMSPROP),
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
    "lomo": _lomo,
    "adalomo": _lomo,
    "grokadamw": _builder(
        "grokadamw",
        "GrokAdamW",
        has_betas=False,
        alpha_init=(float, 0.98),
        lamb=(float, 2.0),
        gamma=(float, 0.1),
        grokking_signal_decay_rate=(float, 0.1),
        gradient_clipping=(float, 1.0),
    ),
    "schedule_free_radam": _schedule_free,
    "schedule_free_adamw": _schedule_free,
    "schedule_free_sgd": _schedule_free,
    "apollo_adamw": _apollo,
    "apollo_adamw_layerwise": _apollo,
    "stable_adamw": _stable_adamw,
}


def parse_optim_args(text: str | None) -> dict[str, str]:
    """Parse `optim_args`, 'name=value,name=value', into a dict.

    Raises:
        InvalidArgument: for any other form.
    """
    pairs = [pair for pair in (text or "").replace(" ", "").split(",") if pair]
    if wrong := [pair for pair in pairs if "=" not in pair]:
        raise InvalidArgument(f"optim_args={text!r}: {wrong[0]!r} is not name=value; write 'name=value,name=value'.")
    return dict(pair.split("=", 1) for pair in pairs)


def optimizer_cls_and_kwargs(args: TrainingArguments, model: nn.Module | None = None) -> OptimizerSpec:
    """Class and keywords of the optimizer that `args.optim` names.

    Raises:
        InvalidArgument: for an unknown name, and for unknown options.
        MissingPackage: when the optimizer's library is not installed.
    """
    name = OptimizerNames(args.optim).value
    request = Request(name, args, model, parse_optim_args(args.optim_args))
    made = OPTIMIZERS[name](request)
    if unknown := sorted(request.options.keys() - request.asked):
        takes = f"it takes {', '.join(sorted(request.asked))}" if request.asked else "it takes none"
        raise InvalidArgument(
            f"optim_args of optim={name!r}: {', '.join(unknown)} unknown, {takes}. For other keywords of its class, "
            "pass optimizer_cls_and_kwargs to Trainer."
        )
    if not request.uses_adam and (ignored := changed_arguments(args, _OF_ADAM)):
        shown = ", ".join(f"{argument}={value}" for argument, value in ignored.items())
        logger.warning("%s has no effect: optim=%r has no such setting, or takes it in optim_args.", shown, name)
    return made


def use_32bit_embedding_moments(model: nn.Module, kind: Any, kwargs: dict[str, Any]) -> None:
    """Let bitsandbytes keep 32-bit moments for embeddings, where 8 bits are too few; no effect on other optimizers."""
    if "bitsandbytes" not in str(kind) or kwargs.get("optim_bits") != 8:
        return
    manager = importlib.import_module("bitsandbytes.optim").GlobalOptimManager.get_instance()
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            manager.register_module_override(module, "weight", {"optim_bits": 32})
