"""Finds modules that imported or changed transformers' Trainer before `install()`."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from typing import Any

#: Module of transformers → the class in it that is swapped.
_TRAINERS = {"transformers.trainer": "Trainer", "transformers.trainer_seq2seq": "Seq2SeqTrainer"}
#: Packages to ignore: transformers itself, and those whose decorators wrap its methods.
_IGNORED_PACKAGES = ("transformers", "hftrainer", "torch", "contextlib", "functools", "huggingface_hub")
#: Maximum number of names in a warning.
_MAX_NAMES = 5


def check_earlier_imports() -> Iterator[str]:
    """Warnings about modules that use transformers' Trainer, and about its replaced methods."""
    originals = []
    for module_name, name in _TRAINERS.items():
        module = sys.modules.get(module_name)
        if module is not None and name in vars(module):
            originals.append(vars(module)[name])
    if not originals:
        return
    subclasses = {kind for original in originals for kind in _subclasses(original)}
    users = {kind.__module__ for kind in subclasses}
    users |= {name for name, module in list(sys.modules.items()) if _refers_to(name, module, originals)}
    if users:
        class_names = [f"{kind.__module__}.{kind.__qualname__}" for kind in subclasses]
        classes = f" ({_join_names(class_names)})" if class_names else ""
        yield (
            f"{_join_names(users)} imported transformers.Trainer before hftrainer.install(), and will still use it"
            f"{classes}: call install() before that import, or run the script with `python -m hftrainer run`."
        )
    replaced_methods = {name: module for original in originals for name, module in _find_replaced_methods(original)}
    if replaced_methods:
        descriptions = [f"{name} by {module}" for name, module in replaced_methods.items()]
        yield (
            f"Methods of transformers.Trainer were replaced before hftrainer.install(), which has no effect now: "
            f"{_join_names(descriptions)}. To replace hftrainer's, call install() before that import."
        )


def _root_package(module: str) -> str:
    return module.partition(".")[0]


def _join_names(names: Collection[str]) -> str:
    first_names, rest = sorted(names)[:_MAX_NAMES], len(names) - _MAX_NAMES
    return ", ".join(first_names) + (f" and {rest} more" if rest > 0 else "")


def _subclasses(kind: type) -> Iterator[type]:
    """The classes outside `_IGNORED_PACKAGES` that derive from `kind`."""
    subclasses: list[type] = type.__subclasses__(kind)
    for subclass in subclasses:
        if _root_package(subclass.__module__) not in _IGNORED_PACKAGES:
            yield subclass
        yield from _subclasses(subclass)


def _refers_to(name: str, module: Any, originals: list[type]) -> bool:
    """Whether a module outside `_IGNORED_PACKAGES` refers to an original class.

    It compares identities, since some objects warn when they are accessed.
    """
    # `__mp_main__` is a second copy of `__main__`.
    if module is None or _root_package(name) in _IGNORED_PACKAGES or name == "__mp_main__":
        return False
    return any(value is original for value in list(vars(module).values()) for original in originals)


def _find_replaced_methods(kind: type) -> Iterator[tuple[str, str]]:
    """The replaced methods of a class, each with the module that replaced it."""
    for name, value in vars(kind).items():
        module = getattr(getattr(value, "__func__", value), "__globals__", {}).get("__name__")
        if module is not None and _root_package(module) not in _IGNORED_PACKAGES:
            yield name, module
