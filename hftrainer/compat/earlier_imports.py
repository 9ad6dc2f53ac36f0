"""Finds modules that imported or changed transformers' Trainer before `install()`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

#: Module of transformers → the class in it that is swapped.
_TRAINERS = {"transformers.trainer": "Trainer", "transformers.trainer_seq2seq": "Seq2SeqTrainer"}
#: Packages to ignore: transformers itself, and packages whose decorators wrap its methods.
_OWN = ("transformers", "hftrainer", "torch", "contextlib", "functools", "huggingface_hub")
_SHOWN = 5


def check_earlier_imports() -> Iterator[str]:
    """Warnings about modules that still use transformers' Trainer, and about its replaced methods."""
    loaded = [(sys.modules.get(module), name) for module, name in _TRAINERS.items()]
    originals = [vars(module)[name] for module, name in loaded if module is not None and name in vars(module)]
    if not originals:
        return
    derived = sorted({kind for original in originals for kind in _subclasses(original)}, key=_full_name)
    modules = {kind.__module__ for kind in derived}
    holders = sorted(
        modules | {name for name, module in list(sys.modules.items()) if _refers_to(name, module, originals)}
    )
    if holders:
        yield (
            f"{_listed(holders)} imported transformers.Trainer before hftrainer.install(), and will continue to use it"
            + (f" ({_listed([_full_name(kind) for kind in derived])})" if derived else "")
            + ": call install() before that import, or run the script with `python -m hftrainer run`."
        )
    changed = {name: module for original in originals for name, module in _find_replaced_methods(original)}
    if changed:
        named = [f"{name} by {module}" for name, module in sorted(changed.items())]
        yield (
            f"Methods of transformers.Trainer were replaced before hftrainer.install(), which has no effect now: "
            f"{_listed(named)}. To replace hftrainer's, call install() before that import."
        )


def _root(module: str) -> str:
    return module.partition(".")[0]


def _full_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _listed(names: list[str]) -> str:
    shown, more = names[:_SHOWN], len(names) - _SHOWN
    return ", ".join(shown) + (f" and {more} more" if more > 0 else "")


def _subclasses(kind: type) -> Iterator[type]:
    """The classes outside `_OWN` that derive from `kind`."""
    subclasses: list[type] = type.__subclasses__(kind)
    for each in subclasses:
        if _root(each.__module__) not in _OWN:
            yield each
        yield from _subclasses(each)


def _refers_to(name: str, module: Any, originals: list[type]) -> bool:
    """Whether a module outside `_OWN` refers to one of `originals`. Compares identity: some objects warn on access."""
    # `__mp_main__` is a second copy of `__main__`.
    if module is None or _root(name) in _OWN or name == "__mp_main__":
        return False
    return any(value is original for value in list(vars(module).values()) for original in originals)


def _find_replaced_methods(kind: type) -> Iterator[tuple[str, str]]:
    """The replaced methods of a class, each with the module that replaced it."""
    for name, value in vars(kind).items():
        module = getattr(getattr(value, "__func__", value), "__globals__", {}).get("__name__")
        if module is not None and _root(module) not in _OWN:
            yield name, module
