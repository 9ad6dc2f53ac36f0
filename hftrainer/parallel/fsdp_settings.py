"""Settings of FSDP, from `fsdp` and `fsdp_config` or from `accelerate launch --use_fsdp`."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hftrainer.base.config_files import env_flag, parse_bool, read_config
from hftrainer.errors import InvalidConfig, suggest_nearest

#: Strategies for `fsdp` and `reshard_after_forward`, in the order of accelerate's numbers, from 1.
STRATEGIES = ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2")
_FSDP2_STRATEGIES = STRATEGIES[:2]
POLICIES = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
STATE_DICTS = ("FULL_STATE_DICT", "SHARDED_STATE_DICT")
PREFETCHES = ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH")
#: Keys that only FSDP1 has.
_FSDP1_KEYS = ("backward_prefetch", "forward_prefetch", "use_orig_params", "limit_all_gathers")
#: Names in accelerate's files and environment → those of `fsdp_config`.
_ALIASES = {
    "offload_params": "cpu_offload",
    "transformer_cls_to_wrap": "transformer_layer_cls_to_wrap",
    "transformer_cls_names_to_wrap": "transformer_layer_cls_to_wrap",
    "backward_prefetch_policy": "backward_prefetch",
    "sharding_strategy": "reshard_after_forward",
}
#: Defaults of the launcher, which differ from those of `fsdp_config`.
_LAUNCHER_DEFAULTS = {
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
        settings: keyword arguments of torch_xla's `XlaFullyShardedDataParallel`; dtypes by name.
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
        min_num_params: minimum number of parameters of a unit.
        activation_checkpointing: recompute the activations within the units in the backward pass.
        activation_checkpointing_offload: keep the inputs of the units in CPU memory.
        state_dict_type: format of weights and optimizer states in checkpoints, one of `STATE_DICTS`.
        sync_module_states: broadcast the weights of rank 0 at the start.
        cpu_ram_efficient_loading: only rank 0 loads the weights, and broadcasts them.
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
            InvalidConfig: for any other format.
        """
        from torch.distributed.fsdp import StateDictType

        name = str(getattr(state_dict_type, "name", state_dict_type))
        self.state_dict_type = StateDictType[_PARSERS["state_dict_type"]("state_dict_type", name)]

    @property
    def has_full_states(self) -> bool:
        """Whether checkpoints hold full states instead of shards."""
        return self.state_dict_type.name == STATE_DICTS[0]

    def __getattr__(self, name: str) -> Any:
        """Look up the other settings, which have the same names in accelerate."""
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
        InvalidConfig: for unknown words, keys or values; the message suggests the nearest valid one.
    """
    if not fsdp or fsdp in ("no", "false", "False"):
        if not env_flag("ACCELERATE_USE_FSDP", environment=environment):
            return None
        launcher_values = {name[5:].lower(): value for name, value in environment.items() if name.startswith("FSDP_")}
        version = launcher_values.get("version", _LAUNCHER_DEFAULTS["version"])
        # The launcher sets both keys; drop the one of the other version.
        launcher_values.pop("sharding_strategy" if version == "2" else "reshard_after_forward", None)
        keys = _rename_keys({**_LAUNCHER_DEFAULTS, **launcher_values}, "the launcher's FSDP_")
        if version == "2":
            keys = {name: value for name, value in keys.items() if name not in _FSDP1_KEYS}
            keys.setdefault("state_dict_type", "SHARDED_STATE_DICT")
        return _make_settings(keys)
    keys = _rename_keys(read_config(fsdp_config, "fsdp_config"), "fsdp_config")
    for name, value in _parse_words(fsdp).items():
        if name == "reshard_after_forward" and _parse_strategy(name, keys.get(name, value)) != value:
            raise InvalidConfig(
                f"fsdp={fsdp!r} and fsdp_config[{name!r}]={keys[name]!r} are two strategies: use only one."
            )
        keys.setdefault(name, value)
    return _make_settings(keys)


def _parse_words(fsdp: Any) -> dict[str, Any]:
    """The keys that the words in `fsdp` set; 'auto_wrap' sets none, since it is the default."""
    if parse_bool(fsdp):
        return {}
    # The documents of v4.48 write "full shard".
    text = fsdp.replace("full shard", "full_shard").replace(",", " ") if isinstance(fsdp, str) else None
    words = [str(getattr(word, "value", word)) for word in fsdp] if text is None else text.split()
    allowed = (*STRATEGIES, "offload", "auto_wrap")
    if unknown := [word for word in words if word not in allowed]:
        raise InvalidConfig(f"fsdp={fsdp!r}: {unknown[0]!r} is unknown{suggest_nearest(unknown[0], allowed)}")
    strategies = [word for word in words if word in STRATEGIES]
    if len(strategies) > 1:
        raise InvalidConfig(f"fsdp={fsdp!r}: {' and '.join(strategies)} are two strategies: use one of them.")
    keys: dict[str, Any] = {"reshard_after_forward": strategies[0]} if strategies else {}
    return {**keys, "cpu_offload": True} if "offload" in words else keys


def _rename_keys(values: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Rename keys to the names of the settings. Unknown keys raise `InvalidConfig`."""
    keys: dict[str, Any] = {}
    for key, value in values.items():
        bare_key = key.removeprefix("fsdp_")
        name = _ALIASES.get(bare_key, bare_key)
        if name not in _PARSERS:
            suggestion = suggest_nearest(bare_key, [*_PARSERS, *_ALIASES])
            raise InvalidConfig(f"{source}: {key!r} is not a valid key{suggestion}")
        # The name itself overrides its aliases.
        if name not in keys or bare_key == name:
            keys[name] = value
    return keys


def _make_settings(values: Mapping[str, Any]) -> FsdpSettings:
    keys = {name: _PARSERS[name](name, value) for name, value in values.items()}
    xla = _pop_xla(keys)
    strategy = keys.pop("reshard_after_forward", STRATEGIES[0])
    version = _choose_version(keys.pop("version", None), strategy, [name for name in _FSDP1_KEYS if name in keys])
    classes = keys.pop("transformer_layer_cls_to_wrap", None)
    # v4 had no policies: min_num_params selected size-based wrapping.
    keys.setdefault("auto_wrap_policy", POLICIES[keys.get("min_num_params", 0) > 0 and not classes])
    if keys.get("activation_checkpointing_offload") and not keys.get("activation_checkpointing"):
        raise InvalidConfig("fsdp_config['activation_checkpointing_offload'] needs 'activation_checkpointing' too.")
    if keys.get("cpu_ram_efficient_loading"):
        keys["sync_module_states"] = True
    return FsdpSettings(version=version, strategy=strategy, wrap_classes=classes, xla=xla, **keys)


def _pop_xla(keys: dict[str, Any]) -> XlaSettings | None:
    """Remove the keys for TPUs, and build their settings; None without `xla`."""
    is_on = keys.pop("xla", None)
    values = {name: keys.pop(name, None) for name in ("xla_fsdp_v2", "xla_fsdp_grad_ckpt", "xla_fsdp_settings")}
    spmd, grad_ckpt, settings = values.values()
    if not is_on:
        if set_names := [name for name, value in values.items() if value]:
            raise InvalidConfig(f"fsdp_config[{set_names[0]!r}] needs 'xla': True: set both, or neither.")
        return None
    if settings and spmd:
        raise InvalidConfig(
            "fsdp_config['xla_fsdp_settings'] is for torch_xla's FSDP with processes, but 'xla_fsdp_v2' uses SPMD: "
            "use one of them."
        )
    return XlaSettings(bool(spmd), bool(grad_ckpt), tuple((settings or {}).items()))


def _choose_version(version: int | None, strategy: str, only_fsdp1: list[str]) -> int:
    """FSDP's version: 2 unless a key or strategy exists only in FSDP1."""
    if version == 2 and strategy not in _FSDP2_STRATEGIES:
        raise InvalidConfig(f"fsdp: only FSDP1 has {strategy!r}; set fsdp_config['version']=1, or use 'full_shard'.")
    if version == 2 and only_fsdp1:
        raise InvalidConfig(
            f"fsdp_config: only FSDP1 has {' and '.join(only_fsdp1)}; remove that, or set fsdp_config['version']=1."
        )
    return version or (1 if only_fsdp1 or strategy not in _FSDP2_STRATEGIES else 2)


# ---- Values ---------------------------------------------------------------------------------------------------------


def _parse_strategy(name: str, value: Any) -> str:
    """A strategy from its name, accelerate's number, or a boolean: reshard parameters after the forward pass."""
    word = str(getattr(value, "name", value)).lower().lstrip("_")
    if word in ("true", "false"):
        return STRATEGIES[word == "false"]
    if word.isdigit() and 1 <= int(word) <= len(STRATEGIES):
        return STRATEGIES[int(word) - 1]
    if word not in STRATEGIES:
        raise InvalidConfig(f"fsdp_config[{name!r}]={value!r} is unknown{suggest_nearest(word, STRATEGIES)}")
    return word


def _parse_choice(name: str, value: Any, allowed: tuple[str, ...]) -> str:
    word = str(value).upper()
    if word not in allowed:
        raise InvalidConfig(f"fsdp_config[{name!r}]={value!r}: it must be {', '.join(allowed[:-1])} or {allowed[-1]}.")
    return word


def _parse_prefetch(name: str, value: Any) -> str:
    # The documents of v4.48 write "backward_pos".
    is_misspelt = str(value).lower() == "backward_pos"
    return _parse_choice(name, "BACKWARD_POST" if is_misspelt else value or "NO_PREFETCH", PREFETCHES)


def _parse_classes(name: str, value: Any) -> tuple[str, ...] | None:
    classes = value.split(",") if isinstance(value, str) else value
    if classes and not (isinstance(classes, (list, tuple)) and all(isinstance(name, str) for name in classes)):
        raise InvalidConfig(f"fsdp_config[{name!r}]={value!r}: use class names, in a list or separated by commas.")
    return tuple(name.strip() for name in classes) if classes else None


def _parse_count(name: str, value: Any) -> int:
    if not str(value or 0).isdecimal():
        raise InvalidConfig(f"fsdp_config[{name!r}]={value!r}: it must be a non-negative integer.")
    return int(value or 0)


def _parse_flag(name: str, value: Any) -> bool:
    if (flag := parse_bool(value)) is None:
        raise InvalidConfig(f"fsdp_config[{name!r}]={value!r} is not a boolean: use true or false.")
    return flag


def _parse_keywords(name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value or {}, Mapping):
        raise InvalidConfig(f"fsdp_config[{name!r}]={value!r}: use a dict of keyword arguments.")
    return value or {}


#: Key of `fsdp_config` → its parser, which gets the key and the value.
_PARSERS: Mapping[str, Callable[[str, Any], Any]] = {
    **{field.name: _parse_flag for field in dataclasses.fields(FsdpSettings) if field.type == "bool"},
    **dict.fromkeys(("xla", "xla_fsdp_grad_ckpt", "xla_fsdp_v2"), _parse_flag),
    "version": lambda name, value: int(_parse_choice(name, value, ("1", "2"))),
    "reshard_after_forward": _parse_strategy,
    "auto_wrap_policy": functools.partial(_parse_choice, allowed=POLICIES),
    "transformer_layer_cls_to_wrap": _parse_classes,
    "min_num_params": _parse_count,
    "state_dict_type": functools.partial(_parse_choice, allowed=STATE_DICTS),
    "backward_prefetch": _parse_prefetch,
    "xla_fsdp_settings": _parse_keywords,
}
