"""`install()`: scripts that import from `transformers` get hftrainer's classes."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from hftrainer.arguments import old_names
from hftrainer.compat import transformers_names
from hftrainer.compat.earlier_imports import check_earlier_imports
from hftrainer.releases import followed
from hftrainer.releases.policy import NEWEST
from hftrainer.training_args import TrainingArguments
from hftrainer.training_args_seq2seq import Seq2SeqTrainingArguments

#: Argument → the original default that `install()` replaced.
_original_defaults: dict[str, Any] = {}


def install() -> None:
    """Replace Trainer, TrainingArguments, callbacks and their helpers in `transformers` with ours.

    Trainers then behave as in the installed release (`hftrainer.releases`), and arguments have its fields and
    defaults. Names of other releases are still accepted as keyword arguments and on the command line.

    Works before and after `import transformers`. A module that has already imported or subclassed the original
    `Trainer` keeps it, and a warning names the module. Another warning names methods that were already replaced.
    """
    if transformers_names.is_installed():
        return
    for sentence in check_earlier_imports():
        warnings.warn(sentence, stacklevel=2)
    followed.follow(followed.installed_release())
    _set_defaults(old_names.earlier_defaults())
    old_names.follow_fields(TrainingArguments, Seq2SeqTrainingArguments)
    transformers_names.replace_names()


def uninstall() -> None:
    """Undo `install()`."""
    transformers_names.restore_names()
    old_names.restore_fields()
    followed.follow(NEWEST)
    _set_defaults(_original_defaults)
    _original_defaults.clear()


def _set_defaults(values: Mapping[str, Any]) -> None:
    """Replace the defaults of arguments."""
    for name, value in values.items():
        _original_defaults.setdefault(name, TrainingArguments.__dataclass_fields__[name].default)
        for kind in (TrainingArguments, Seq2SeqTrainingArguments):
            kind.__dataclass_fields__[name].default = value
            setattr(kind, name, value)
            initialize: Any = kind.__init__
            initialize.__kwdefaults__[name] = value
        if name == "optim":
            TrainingArguments.default_optim = value
