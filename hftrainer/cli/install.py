"""`install()`: scripts that import from `transformers` get what is here."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from typing import Any

from hftrainer.arguments import behaviours
from hftrainer.compat import swap
from hftrainer.compat.earlier_imports import warnings_of_earlier_imports
from hftrainer.training_args import TrainingArguments
from hftrainer.training_args_seq2seq import Seq2SeqTrainingArguments

#: Argument → the default that `install()` has taken away.
_todays_defaults: dict[str, Any] = {}


def install() -> None:
    """Make `Trainer`, `TrainingArguments`, the callbacks and their helpers in `transformers` ours.

    Trainers then behave as those of the installed release (`hftrainer.arguments.behaviours`), and arguments have its
    defaults.

    Works before and after `import transformers`. A module that took the original `Trainer` before, or derived a class
    from it, keeps it: a warning names it, and the line to move. So does one for methods that were replaced before.
    """
    if swap.is_installed():
        return
    for sentence in warnings_of_earlier_imports(sys._getframe(1)):
        warnings.warn(sentence, stacklevel=2)
    release = behaviours.installed_release()
    behaviours.follow(release)
    _set_defaults(behaviours.earlier_defaults(release))
    swap.begin()


def uninstall() -> None:
    """Undo `install()`."""
    swap.end()
    behaviours.follow(behaviours.NEWEST)
    _set_defaults(_todays_defaults)
    _todays_defaults.clear()


def _set_defaults(values: Mapping[str, Any]) -> None:
    """Give arguments other defaults, for scripts that say nothing about them."""
    for name, value in values.items():
        _todays_defaults.setdefault(name, TrainingArguments.__dataclass_fields__[name].default)
        for kind in (TrainingArguments, Seq2SeqTrainingArguments):
            kind.__dataclass_fields__[name].default = value
            setattr(kind, name, value)
            initialize: Any = kind.__init__
            initialize.__kwdefaults__[name] = value
        if name == "optim":
            TrainingArguments.default_optim = value
