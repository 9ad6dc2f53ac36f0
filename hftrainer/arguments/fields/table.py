"""The table of all training arguments, of the newest release, of earlier ones and our own."""

from __future__ import annotations

from hftrainer.arguments.fields.argument import arguments_of
from hftrainer.arguments.fields.old import OldArguments

#: Name → its `Argument`.
ARGUMENTS = arguments_of(OldArguments)
