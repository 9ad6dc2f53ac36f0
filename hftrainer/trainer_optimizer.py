"""THE TABLE of optimizers: name → how it is made; and their parameter groups."""

from __future__ import annotations

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
from hftrainer.compat import swap
from hftrainer.errors import InvalidArgument, MissingPackage
from hftrainer.optimizers import low_rank
from hftrainer.optimizers.per_parameter import Adafactor, AdamW
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


def parameter_groups(model: nn.Module, decayed: list[str], weight_decay: float) -> list[dict[str, Any]]:
    """Two groups of the trainable parameters: with weight decay and without.

    If only some layers of a model are sharded over processes, each group is split by device mesh: a fused step cannot
    take tensors of different meshes.
    """
    names = set(decayed)
    trainable = [(name in names, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [parameter for decays, parameter in trainable if decays], "weight_decay": weight_decay},
        {"params": [parameter for decays, parameter in trainable if not decays], "weight_decay": 0.0},
    ]
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
    """The device mesh that a parameter is sharded over; None for a whole one."""
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

    def option(self, name: str, kind: Callable[[str], Any], default: Any = None) -> Any:
        """One of `optim_args`, as a number, a bool or a string."""
        self.asked.add(name)
        if name not in self.options:
            return default
        try:
            return _flag(self.options[name]) if kind is bool else kind(self.options[name])
        except ValueError:
            raise InvalidArgument(
                f"optim_args: {name}={self.options[name]!r} is not a valid {'flag' if kind is bool else kind.__name__}."
            ) from None

    def given(self, **kinds: Callable[[str], Any]) -> dict[str, Any]:
        """Those of `optim_args` that were given, each converted to its type."""
        values = {name: self.option(name, kind) for name, kind in kinds.items()}
        return {name: value for name, value in values.items() if value is not None}


Made = tuple[Any, dict[str, Any]]


def _flag(text: str) -> bool:
    if (flag := parse_bool(text)) is None:
        raise ValueError(text)
    return flag


def _load(name: str, module: str, attribute: str) -> Any:
    """A class of another library.

    Raises:
        MissingPackage: when the library is not installed; names the command that installs it.
    """
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise MissingPackage(f"optim={name!r} needs {module}.{attribute} ({error}): {INSTALL[module]}") from error


def _adamw_torch(request: Request) -> Made:
    return torch.optim.AdamW, request.adam


def _adamw_torch_fused(request: Request) -> Made:
    if request.args.device.type == "xla":  # torch has no fused kernel for it; XLA fuses the whole step
        return _adamw_torch(request)
    return torch.optim.AdamW, {**request.adam, "fused": True}


def _of_transformers(name: str, ours: type) -> type:
    """The installed transformers' class under `install()`, for scripts that compare classes; same computation."""
    if swap.is_installed() and "transformers" in sys.modules:
        importlib.import_module("transformers.optimization")
    return swap.rebound("transformers.optimization", name, ours)


def _adamw_hf(request: Request) -> Made:
    return _of_transformers("AdamW", AdamW), request.adam


def _adafactor(request: Request) -> Made:
    return _of_transformers("Adafactor", Adafactor), {**request.lr, "scale_parameter": False, "relative_step": False}


def _sgd(request: Request) -> Made:
    kwargs = request.given(momentum=float, dampening=float, weight_decay=float, nesterov=bool)
    return torch.optim.SGD, {**request.lr, **kwargs}


def _adagrad(request: Request) -> Made:
    return torch.optim.Adagrad, {**request.lr, **request.given(lr_decay=float, weight_decay=float, eps=float)}


def _rmsprop(request: Request) -> Made:
    kwargs = request.given(momentum=float, alpha=float, eps=float, weight_decay=float, centered=bool)
    return torch.optim.RMSprop, {**request.lr, **kwargs}


def _of(module: str, attribute: str) -> Callable[[Request], Made]:
    """An Adam of another library, with only Adam's keywords."""
    return lambda request: (_load(request.name, module, attribute), request.adam)


def _anyprecision(request: Request) -> Made:
    def dtype(name: str) -> torch.dtype:
        found = getattr(torch, name, None)
        if not isinstance(found, torch.dtype):
            raise ValueError(name)
        return found

    return _load(request.name, "torchdistx.optimizers", "AnyPrecisionAdamW"), {
        **request.adam,
        "use_kahan_summation": request.option("use_kahan_summation", bool, False),
        "momentum_dtype": request.option("momentum_dtype", dtype, torch.float32),
        "variance_dtype": request.option("variance_dtype", dtype, torch.float32),
        "compensation_buffer_dtype": request.option("compensation_buffer_dtype", dtype, torch.bfloat16),
    }


def _torchao(request: Request) -> Made:
    kind = _load(request.name, "torchao.optim", "AdamW4bit" if "4bit" in request.name else "AdamW8bit")
    return kind, {
        **request.adam,
        "block_size": request.option("block_size", int, 256),
        "bf16_stochastic_round": request.option("bf16_stochastic_round", bool, False),
    }


def _bitsandbytes(request: Request) -> Made:
    name = request.name
    kwargs = {"optim_bits": 8 if "8bit" in name else 32, "is_paged": "paged" in name}
    if "rmsprop" in name:
        del kwargs["is_paged"]
        own = request.given(momentum=float, alpha=float, eps=float, weight_decay=float, centered=bool)
        return _load(name, "bitsandbytes.optim", "RMSprop"), {**request.lr, **own, **kwargs}
    if "lion" in name:
        own = {**request.lr, "betas": request.adam["betas"]}
        return _load(name, "bitsandbytes.optim", "Lion"), {**own, **kwargs}
    if "ademamix" in name:
        beta1, beta2 = request.adam["betas"]
        own = {
            "betas": (
                request.option("beta1", float, beta1),
                request.option("beta2", float, beta2),
                request.option("beta3", float, 0.9999),
            ),
            "alpha": request.option("alpha", float, 5.0),
            "eps": request.option("eps", float, request.args.adam_epsilon),
            **request.given(t_alpha=int, t_beta3=int),
        }
        return _load(name, "bitsandbytes.optim", "AdEMAMix"), {**request.lr, **own, **kwargs}
    return _load(name, "bitsandbytes.optim", "AdamW"), {**request.adam, **kwargs}


def _galore(request: Request) -> Made:
    kind = "GaLoreAdafactor" if "adafactor" in request.name else "GaLoreAdamW"
    kind += "8bit" if "8bit" in request.name else ""
    own = {
        "rank": request.option("rank", int, 128),
        "update_proj_gap": request.option("update_proj_gap", int, 200),
        "scale": request.option("scale", float, 0.25),
        "proj_type": request.option("proj_type", str, "std"),
    }
    kwargs = request.lr
    if "adafactor" in request.name:
        kwargs |= {"scale_parameter": False, "relative_step": False}
    made = _load(request.name, "galore_torch", kind)
    return low_rank.build(request.name, request.args, request.model, made, own, kwargs)


def _apollo(request: Request) -> Made:
    own = {
        "rank": request.option("rank", int, 128),
        "proj": request.option("proj", str, "random"),
        "scale_type": request.option("scale_type", str, "channel"),
        "update_proj_gap": request.option("update_proj_gap", int, 200),
        "scale": request.option("scale", float, 1.0),
        "proj_type": request.option("proj_type", str, "std"),
        "betas": request.adam["betas"],
        "eps": request.adam["eps"],
    }
    made = _load(request.name, "apollo_torch", "APOLLOAdamW")
    return low_rank.build(request.name, request.args, request.model, made, own, request.lr)


def _lomo(request: Request) -> Made:
    kind = _load(request.name, "lomo_optim", "AdaLomo" if request.name == "adalomo" else "Lomo")
    if request.model is None:
        raise InvalidArgument(f"optim={request.name!r} needs the model, not its parameters: pass model=.")
    return kind, {**request.lr, "model": request.model}


def _grokadamw(request: Request) -> Made:
    defaults = {
        "alpha_init": 0.98,
        "lamb": 2.0,
        "gamma": 0.1,
        "grokking_signal_decay_rate": 0.1,
        "gradient_clipping": 1.0,
    }
    own = {name: request.option(name, float, default) for name, default in defaults.items()}
    return _load(request.name, "grokadamw", "GrokAdamW"), {**request.lr, **own}


def _schedule_free(request: Request) -> Made:
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
    kwargs |= {"weight_lr_power": request.option("weight_lr_power", float, 2.0), "r": request.option("r", float, 0.0)}
    return _load(request.name, "schedulefree", kinds[which]), kwargs


def _stable_adamw(request: Request) -> Made:
    return _load(request.name, "optimi", "StableAdamW"), {
        **request.adam,
        "weight_decay": request.args.weight_decay,
        "decouple_lr": request.option("decouple_lr", bool, False),
        "max_lr": request.option("max_lr", float),
        "kahan_sum": request.option("kahan_sum", bool),
    }


#: Optimizer name → function that returns its class and keywords.
OPTIMIZERS: dict[str, Callable[[Request], Made]] = {
    "adamw_hf": _adamw_hf,
    "adamw_torch": _adamw_torch,
    "adamw_torch_fused": _adamw_torch_fused,
    "adamw_torch_xla": _of("torch_xla.amp.syncfree", "AdamW"),
    "adamw_torch_npu_fused": _of("torch_npu.optim", "NpuFusedAdamW"),
    "adamw_apex_fused": _of("apex.optimizers", "FusedAdam"),
    "adafactor": _adafactor,
    "adamw_anyprecision": _anyprecision,
    "adamw_torch_4bit": _torchao,
    "adamw_torch_8bit": _torchao,
    "sgd": _sgd,
    "adagrad": _adagrad,
    "rmsprop": _rmsprop,
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
    "grokadamw": _grokadamw,
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


def optimizer_cls_and_kwargs(args: TrainingArguments, model: nn.Module | None = None) -> Made:
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


def keep_embeddings_precise(model: nn.Module, kind: Any, kwargs: dict[str, Any]) -> None:
    """Let bitsandbytes keep 32-bit moments for embeddings, where 8 bits are too few; no effect on other optimizers."""
    if "bitsandbytes" not in str(kind) or kwargs.get("optim_bits") != 8:
        return
    manager = importlib.import_module("bitsandbytes.optim").GlobalOptimManager.get_instance()
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            manager.register_module_override(module, "weight", {"optim_bits": 32})
