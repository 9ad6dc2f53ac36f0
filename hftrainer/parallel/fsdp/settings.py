"""Settings of FSDP, from `fsdp` and `fsdp_config` or from `accelerate launch --use_fsdp`."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hftrainer.errors import WrongConfig, suggest
from hftrainer.parallel.config_files import env_flag, parse_bool, read_config

#: Strategies for `fsdp` and `reshard_after_forward`, in the order of accelerate's numbers, from 1.
STRATEGIES = ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2")
#: Strategy of FSDP2 → whether parameters are resharded after the forward pass.
_RESHARDS = {"full_shard": True, "shard_grad_op": False}
POLICIES = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
STATE_DICTS = ("FULL_STATE_DICT", "SHARDED_STATE_DICT")
PREFETCHES = ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH")
#: Keys that only FSDP1 has.
_ONLY_FSDP1 = ("backward_prefetch", "forward_prefetch", "use_orig_params", "limit_all_gathers")
#: Names in accelerate's files and environment → those of `fsdp_config`.
_ALIASES = {
    "offload_params": "cpu_offload",
    "transformer_cls_to_wrap": "transformer_layer_cls_to_wrap",
    "transformer_cls_names_to_wrap": "transformer_layer_cls_to_wrap",
    "backward_prefetch_policy": "backward_prefetch",
    "sharding_strategy": "reshard_after_forward",
}
_OF_XLA = ("xla", "xla_fsdp_settings", "xla_fsdp_grad_ckpt", "xla_fsdp_v2")
#: Defaults of the launcher, which differ from those of `fsdp_config`.
_OF_LAUNCHER = {
    "version": "1",
    "auto_wrap_policy": "NO_WRAP",
    "use_orig_params": "false",
    "sync_module_states": "false",
}


@dataclass(frozen=True)
class XlaSettings:
    """How a model is sharded over TPU cores.

    Attributes:
        spmd: one process drives all cores, with tensors sharded over them; otherwise one process per core.
        grad_ckpt: recompute the activations of each unit in the backward pass.
        settings: keywords of torch_xla's `XlaFullyShardedDataParallel`; dtypes by name.
    """

    spmd: bool = False
    grad_ckpt: bool = False
    settings: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class FsdpSettings:
    """How a model is sharded.

    Attributes:
        version: 1 for torch's FullyShardedDataParallel, 2 for `fully_shard`.
        strategy: one of `STRATEGIES`; FSDP2 has the first two.
        cpu_offload: keep parameters, and therefore optimizer states, in CPU memory.
        auto_wrap_policy: how units are chosen: 'TRANSFORMER_BASED_WRAP', 'SIZE_BASED_WRAP' or 'NO_WRAP'.
        wrap_classes: names of the classes that become units; None for the model's `_no_split_modules`.
        min_num_params: number of parameters from which a module becomes a unit.
        activation_checkpointing: recompute the activations within the units in the backward pass.
        activation_checkpointing_offload: keep the inputs of the units in CPU memory.
        state_dict_type: format of weights and optimizer states in checkpoints, one of `STATE_DICTS`.
        sync_module_states: broadcast the weights of rank 0 at the start.
        cpu_ram_efficient_loading: only rank 0 loads weights, and the others receive them from it.
        use_orig_params: whether the optimizer gets the original parameters or flat ones (FSDP1).
        limit_all_gathers: limit concurrent all-gathers, to save memory (FSDP1).
        forward_prefetch: gather the next unit's parameters early in the forward pass (FSDP1).
        backward_prefetch: the same in the backward pass, one of `PREFETCHES` (FSDP1).
        xla: settings for TPUs; None for torch's FSDP.
    """

    version: int = 2
    strategy: str = "full_shard"
    cpu_offload: bool = False
    auto_wrap_policy: str = "TRANSFORMER_BASED_WRAP"
    wrap_classes: tuple[str, ...] | None = None
    min_num_params: int = 0
    activation_checkpointing: bool = False
    activation_checkpointing_offload: bool = False
    state_dict_type: str = "FULL_STATE_DICT"
    sync_module_states: bool = True
    cpu_ram_efficient_loading: bool = False
    use_orig_params: bool = True
    limit_all_gathers: bool = True
    forward_prefetch: bool = False
    backward_prefetch: str = "NO_PREFETCH"
    xla: XlaSettings | None = None


class FsdpPlugin:
    """`accelerator.state.fsdp_plugin`: the settings under accelerate's names, and the format of checkpoints.

    Args:
        settings: how the model is sharded.

    Attributes:
        state_dict_type: torch's `StateDictType`; change it with `set_state_dict_type`.
    """

    def __init__(self, settings: FsdpSettings) -> None:
        self._settings = settings
        self.fsdp_version = settings.version
        self.sharding_strategy = settings.strategy.upper()
        self.reshard_after_forward = settings.strategy == "full_shard" if settings.version == 2 else settings.strategy
        self.transformer_cls_names_to_wrap = list(settings.wrap_classes or ()) or None
        self.set_state_dict_type(settings.state_dict_type)

    def set_state_dict_type(self, state_dict_type: str) -> None:
        """Set the format of checkpoints: 'FULL_STATE_DICT' or 'SHARDED_STATE_DICT'.

        Raises:
            WrongConfig: for anything else.
        """
        from torch.distributed.fsdp import StateDictType

        name = str(getattr(state_dict_type, "name", state_dict_type))
        self.state_dict_type = StateDictType[_one_of("state_dict_type", name, STATE_DICTS)]

    @property
    def whole(self) -> bool:
        """Whether checkpoints hold whole states instead of shards."""
        return self.state_dict_type.name == STATE_DICTS[0]

    def __getattr__(self, name: str) -> Any:
        """The other settings, which have the same names in accelerate."""
        if name == "_settings":
            raise AttributeError(name)
        return getattr(self._settings, name)


def read_fsdp(fsdp: Any, fsdp_config: Any, environment: Mapping[str, str] = os.environ) -> FsdpSettings | None:
    """The settings from the arguments, or else from the launcher; None without FSDP.

    Args:
        fsdp: True, or words: a strategy, 'offload', 'auto_wrap'.
        fsdp_config: a dict, or the path of a JSON or YAML file; keys with or without the prefix `fsdp_`.
        environment: the environment variables, which hold the settings of `accelerate launch`.

    Raises:
        WrongConfig: for unknown words, keys or values; the message suggests the nearest.
    """
    if not fsdp or fsdp in ("no", "false", "False"):
        if not env_flag("ACCELERATE_USE_FSDP", environment=environment):
            return None
        given = {name[5:].lower(): value for name, value in environment.items() if name.startswith("FSDP_")}
        version = given.get("version", _OF_LAUNCHER["version"])
        given.pop("sharding_strategy" if version == "2" else "reshard_after_forward", None)  # it sets both
        keys = _named({**_OF_LAUNCHER, **given}, "the launcher's FSDP_")
        if version == "2":
            keys = {name: value for name, value in keys.items() if name not in _ONLY_FSDP1}
            keys.setdefault("state_dict_type", "SHARDED_STATE_DICT")
        return _settings(keys)
    keys = _named(read_config(fsdp_config, "fsdp_config"), "fsdp_config")
    for name, value in _of_words(fsdp).items():
        if name == "reshard_after_forward" and _strategy_name(keys.get(name, value)) != value:
            raise WrongConfig(
                f"fsdp={fsdp!r} and fsdp_config[{name!r}]={keys[name]!r} are two strategies: give only one."
            )
        keys.setdefault(name, value)
    return _settings(keys)


def _of_words(fsdp: Any) -> dict[str, Any]:
    """The keys that the words in `fsdp` set; 'auto_wrap' sets none, since it is the default."""
    if parse_bool(fsdp):
        return {}
    if isinstance(fsdp, str):
        fsdp = fsdp.replace("full shard", "full_shard")  # as the documents of v4.48 write it
    words = fsdp.replace(",", " ").split() if isinstance(fsdp, str) else [str(getattr(w, "value", w)) for w in fsdp]
    allowed = (*STRATEGIES, "offload", "auto_wrap")
    for word in words:
        if word not in allowed:
            raise WrongConfig(f"fsdp={fsdp!r}: {word!r} is unknown{nearest(word, allowed)}")
    chosen = [word for word in words if word in STRATEGIES]
    if len(chosen) > 1:
        raise WrongConfig(f"fsdp={fsdp!r}: {' and '.join(chosen)} are two strategies: give one of them.")
    keys: dict[str, Any] = {"reshard_after_forward": chosen[0]} if chosen else {}
    return {**keys, **({"cpu_offload": True} if "offload" in words else {})}


def _named(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The values by the names of the settings; unknown names raise."""
    known = {field.name for field in dataclasses.fields(FsdpSettings)} - {"strategy", "wrap_classes", "xla"}
    known |= {"transformer_layer_cls_to_wrap", "reshard_after_forward", *_OF_XLA}
    keys: dict[str, Any] = {}
    for given_name, value in given.items():
        bare = given_name.removeprefix("fsdp_")
        name = _ALIASES.get(bare, bare)
        if name not in known:
            raise WrongConfig(f"{where}: {given_name!r} is not a valid key{nearest(bare, [*known, *_ALIASES])}")
        if name not in keys or bare == name:  # the name itself overrides its aliases
            keys[name] = value
    return keys


def _settings(keys: dict[str, Any]) -> FsdpSettings:
    xla = _xla({name: keys.pop(name) for name in _OF_XLA if name in keys})
    version, strategy = _strategy(keys)
    classes = keys.pop("transformer_layer_cls_to_wrap", None)
    classes = classes.split(",") if isinstance(classes, str) else classes
    if classes and not (isinstance(classes, (list, tuple)) and all(isinstance(name, str) for name in classes)):
        raise WrongConfig(
            f"fsdp_config['transformer_layer_cls_to_wrap']={classes!r}: give names of classes, as a list or words."
        )
    least = _count("min_num_params", keys.pop("min_num_params", None) or 0)
    by_size = least > 0 and not classes
    policy = _one_of(
        "auto_wrap_policy", keys.pop("auto_wrap_policy", POLICIES[by_size]), POLICIES
    )  # v4 had no policies: min_num_params meant size-based wrapping
    state_dicts = _one_of("state_dict_type", keys.pop("state_dict_type", STATE_DICTS[0]), STATE_DICTS)
    prefetch = str(keys.pop("backward_prefetch", None) or "NO_PREFETCH")
    prefetch = "BACKWARD_POST" if prefetch.lower() == "backward_pos" else prefetch  # as the documents of v4.48 write it
    prefetch = _one_of("backward_prefetch", prefetch, PREFETCHES)
    flags = {name: _truth(name, value) for name, value in keys.items()}
    if flags.get("activation_checkpointing_offload") and not flags.get("activation_checkpointing"):
        raise WrongConfig("fsdp_config['activation_checkpointing_offload'] needs 'activation_checkpointing' too.")
    if flags.get("cpu_ram_efficient_loading"):
        flags["sync_module_states"] = True
    return FsdpSettings(
        version=version,
        strategy=strategy,
        auto_wrap_policy=policy,
        wrap_classes=tuple(name.strip() for name in classes) if classes else None,
        min_num_params=least,
        state_dict_type=state_dicts,
        backward_prefetch=prefetch,
        xla=xla,
        **flags,
    )


def _xla(keys: dict[str, Any]) -> XlaSettings | None:
    """The settings from the keys for TPUs; None without `xla`."""
    flags = {name: _truth(name, value) for name, value in keys.items() if name != "xla_fsdp_settings"}
    if not flags.get("xla"):
        asked = [name for name, given in flags.items() if given] + ["xla_fsdp_settings"] * bool(
            keys.get("xla_fsdp_settings")
        )
        if asked:
            raise WrongConfig(f"fsdp_config[{asked[0]!r}] needs 'xla': True too, or leave it out.")
        return None
    settings = keys.get("xla_fsdp_settings") or {}
    if not isinstance(settings, Mapping):
        raise WrongConfig(f"fsdp_config['xla_fsdp_settings']={settings!r}: give a dict of keywords.")
    if settings and flags.get("xla_fsdp_v2"):
        raise WrongConfig(
            "fsdp_config['xla_fsdp_settings'] are for torch_xla's FSDP with processes, but 'xla_fsdp_v2' uses SPMD: "
            "give one of them."
        )
    return XlaSettings(flags.get("xla_fsdp_v2", False), flags.get("xla_fsdp_grad_ckpt", False), tuple(settings.items()))


def _strategy(keys: dict[str, Any]) -> tuple[int, str]:
    """FSDP's version and the strategy; FSDP2 unless a key or strategy exists only in FSDP1."""
    given = keys.pop("reshard_after_forward", True)
    strategy = _strategy_name(given)
    asked = [name for name in _ONLY_FSDP1 if name in keys]
    version = str(keys.pop("version", 1 if asked or strategy not in _RESHARDS else 2))
    if version not in ("1", "2"):
        raise WrongConfig(f"fsdp_config['version']={version}: it must be 1 or 2.")
    if version == "2" and strategy not in _RESHARDS:
        raise WrongConfig(f"fsdp: only FSDP1 has {strategy!r}; set fsdp_config['version']=1, or use 'full_shard'.")
    if version == "2" and asked:
        raise WrongConfig(
            f"fsdp_config: only FSDP1 has {' and '.join(asked)}; leave that out, or set fsdp_config['version']=1."
        )
    return int(version), strategy


def _strategy_name(value: Any) -> str:
    """A strategy from its name, accelerate's number, or whether parameters are resharded after the forward pass."""
    word = str(getattr(value, "name", value)).lower().lstrip("_")
    if word in ("true", "false"):
        return STRATEGIES[word == "false"]
    if word.isdigit() and 1 <= int(word) <= len(STRATEGIES):
        return STRATEGIES[int(word) - 1]
    if word not in STRATEGIES:
        raise WrongConfig(f"fsdp_config['reshard_after_forward']={value!r} is unknown{nearest(word, STRATEGIES)}")
    return word


def _one_of(name: str, value: Any, allowed: tuple[str, ...]) -> str:
    word = str(value).upper()
    if word not in allowed:
        raise WrongConfig(f"fsdp_config[{name!r}]={value!r}: it must be {', '.join(allowed[:-1])} or {allowed[-1]}.")
    return word


def _count(name: str, value: Any) -> int:
    if not str(value).isdecimal():
        raise WrongConfig(f"fsdp_config[{name!r}]={value!r}: it must be a number from 0.")
    return int(value)


def _truth(name: str, value: Any) -> bool:
    if (flag := parse_bool(value)) is None:
        raise WrongConfig(f"fsdp_config[{name!r}]={value!r}: it must be true or false.")
    return flag


def nearest(word: str, allowed: Any) -> str:
    """The end of a sentence about an unknown word: the nearest allowed word, or all of them."""
    return suggest(word, allowed, f": it may be {', '.join(sorted(allowed))}.")
