"""Gives our loggers the level and the handlers of transformers' logger, if it is loaded.

Scripts configure logging with transformers' switches (`set_verbosity_info`, `TRANSFORMERS_VERBOSITY`, `add_handler`,
`enable_explicit_format`, ...), and with their own handlers on the root logger. Both work: a message goes to the root
logger's handlers, or else to those of transformers' logger. A terminal shows it once.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import shutil
import sys
import textwrap
from collections.abc import Mapping
from typing import Any

#: Values of `TRANSFORMERS_VERBOSITY`; in transformers 'detail' also has its own format.
LEVELS = {
    "detail": logging.DEBUG,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
}
_PACKAGES = ("hftrainer", "hftrainer_lightning")
#: Logs the messages about a run that a user should see by default.
run_logger = logging.getLogger("hftrainer.run")
#: The loggers of transformers' modules that our modules replace.
_MODULES = ("transformers.trainer", "transformers.trainer_callback", "transformers.training_args")
#: The format of transformers' own handler since v5.0; earlier releases set none.
_THEIR_FORMAT = "[transformers] %(message)s"


class _Format(logging.Formatter):
    """Prefixes messages with our name, and wraps them between words on a terminal."""

    def __init__(self, stream: Any) -> None:
        super().__init__()
        self.stream = stream

    def format(self, record: logging.LogRecord) -> str:
        return wrapped(f"[hftrainer] {super().format(record)}", self.stream)


def _transformers_logger() -> logging.Logger | None:
    """The logger of transformers, or None if it is not set up."""
    if "transformers.utils.logging" not in sys.modules:
        return None
    theirs = logging.getLogger("transformers")
    return theirs if theirs.level else None


class _ParentLogger(logging.Logger):
    """The parent of our loggers; its `level` and `propagate` are the current ones of transformers' logger.

    `logging` reads both from a logger's parents for each message; its cache of levels is cleared when any level is set.
    """

    @property
    def level(self) -> int:
        """The level of transformers' logger, else that of the environment variable, else the root logger's."""
        theirs = _transformers_logger()
        return LEVELS.get(os.environ.get("TRANSFORMERS_VERBOSITY", ""), 0) if theirs is None else theirs.level

    @level.setter
    def level(self, value: int) -> None:
        """Ignored; `logging` sets it when a logger is made."""

    @property
    def propagate(self) -> bool:
        """False if a script has removed transformers' handler, to silence it."""
        theirs = _transformers_logger()
        return theirs is None or bool(theirs.handlers) or theirs.propagate

    @propagate.setter
    def propagate(self, value: bool) -> None:
        """Ignored; `logging` sets it when a logger is made."""

    def shown_by_root(self, record: logging.LogRecord) -> bool:
        """Whether a handler of the root logger displays a message; writing to a file does not count."""
        unseen = (logging.FileHandler, logging.NullHandler)
        seen = (each for each in logging.getLogger().handlers if not isinstance(each, unseen))
        return self.propagate and any(record.levelno >= each.level for each in seen)


class _ForwardingHandler(logging.Handler):
    """Passes messages that no handler of the root logger displays to the handlers of transformers' logger.

    Handlers that the script has added to transformers' loggers get all messages, unless they write to a terminal too.
    """

    def __init__(self, switches: _ParentLogger) -> None:
        super().__init__()
        self._switches = switches

    def emit(self, record: logging.LogRecord) -> None:
        """Pass the message on; open progress bars are drawn again below it."""
        tqdm = getattr(sys.modules.get("tqdm"), "tqdm", None)
        with tqdm.external_write_mode() if tqdm is not None else contextlib.nullcontext():
            self._pass_on(record)

    def _pass_on(self, record: logging.LogRecord) -> None:
        shown = self._switches.shown_by_root(record)
        theirs = _transformers_logger()
        if theirs is None:
            if not shown:
                to_stderr = logging.StreamHandler()  # the current sys.stderr
                to_stderr.setFormatter(_Format(to_stderr.stream))
                to_stderr.handle(record)
            return
        of_root = logging.getLogger().handlers if self._switches.propagate else []
        handlers = [handler for name in _MODULES for handler in logging.getLogger(name).handlers]
        for handler in theirs.handlers + handlers:
            doubled = handler in of_root or (shown and _writes_to_terminal(handler))
            if record.levelno >= handler.level and not doubled:
                _handle(handler, record)
        last = logging.lastResort
        if not (shown or theirs.handlers) and last is not None and record.levelno >= last.level:
            last.handle(record)


def _writes_to_terminal(handler: logging.Handler) -> bool:
    return getattr(handler, "stream", None) in (sys.stderr, sys.stdout, sys.__stderr__, sys.__stdout__)


def _handle(handler: logging.Handler, record: logging.LogRecord) -> None:
    """Let a handler of transformers show a message, with our prefix in place of transformers' or of none."""
    own = handler.formatter
    is_theirs = _writes_to_terminal(handler) if own is None else getattr(own, "_fmt", None) == _THEIR_FORMAT
    if not is_theirs:
        handler.handle(record)
        return
    with handler.lock or contextlib.nullcontext():
        handler.setFormatter(_Format(getattr(handler, "stream", None)))
        try:
            handler.handle(record)
        finally:
            handler.setFormatter(own)


def wrapped(text: str, stream: Any) -> str:
    """Text for a stream. For a terminal it is wrapped between words, since terminals break lines within words."""
    if not (hasattr(stream, "isatty") and stream.isatty()):
        return text
    width = shutil.get_terminal_size().columns
    options: dict[str, Any] = {"subsequent_indent": "    ", "break_long_words": False, "break_on_hyphens": False}
    kept = text.replace("': ", "':\xa0")  # a key and its value stay together
    return "\n".join(textwrap.fill(line, width, **options) for line in kept.splitlines()).replace("\xa0", " ")


def tell(text: str) -> None:
    """Log a message about a run, at level info. It is hidden only where warnings are hidden."""
    seen = logging.getLogger("hftrainer").isEnabledFor(logging.WARNING)
    run_logger.setLevel(logging.INFO if seen else logging.CRITICAL)
    run_logger.info("%s", text)


def connect() -> None:
    """Make `_ParentLogger` the parent of our loggers, once."""
    ours = [logging.getLogger(name) for name in _PACKAGES]
    if any(isinstance(logger.parent, _ParentLogger) for logger in ours):
        return
    switches = _ParentLogger("hftrainer.switches")
    switches.parent = logging.getLogger()
    switches.addHandler(_ForwardingHandler(switches))
    ours[0].parent = switches
    # The adapters follow the level of the first logger.
    ours[1].parent = ours[0]
    # Setting a level clears the cache of `logging`.
    ours[0].setLevel(ours[0].level)


def log_facts(logger: logging.Logger, title: str, facts: Mapping[str, Any]) -> None:
    """Log a title and one line per fact at level info, integers with thousands separators.

    Args:
        logger: the logger of the calling module.
        title: the title line.
        facts: name → value.
    """
    if not logger.isEnabledFor(logging.INFO):
        return
    logger.info("%s", title, stacklevel=2)
    for name, value in facts.items():
        logger.info("  %s: %s", name, f"{value:,}" if isinstance(value, int) else value, stacklevel=2)


@functools.cache
def log_once(logger: logging.Logger, message: str, level: int = logging.WARNING) -> None:
    """Log a message, unless this process has logged the same before."""
    logger.log(level, message)
