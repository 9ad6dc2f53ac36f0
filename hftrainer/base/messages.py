"""Connects our loggers to the level and the handlers of transformers' logger.

Scripts configure logging with transformers' switches (`set_verbosity_info`, `TRANSFORMERS_VERBOSITY`, `add_handler`,
`enable_explicit_format`, ...), and with their own handlers on the root logger. Both work: a message goes to the root
logger's handlers, or else to those of transformers' logger. A terminal shows it once.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import re
import shutil
import signal
import sys
import textwrap
from collections.abc import Mapping
from typing import Any

#: Values of `TRANSFORMERS_VERBOSITY`; in transformers 'detail' also has its own format.
LEVELS = {"detail": logging.DEBUG, "debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING}
LEVELS |= {"error": logging.ERROR, "critical": logging.CRITICAL}
#: Environment variable that is "full" for tracebacks with all frames.
TRACEBACK_VARIABLE = "HFTRAINER_TRACEBACK"
_PACKAGES = ("hftrainer", "hftrainer_lightning")
#: Logs the messages about a run that a user should see by default.
run_logger = logging.getLogger("hftrainer.run")
#: The loggers of transformers' modules that our modules replace.
_MODULES = ("transformers.trainer", "transformers.trainer_callback", "transformers.training_args")
#: The format of transformers' own handler since v5.0; earlier releases set no format.
_TRANSFORMERS_FORMAT = "[transformers] %(message)s"


#: Styles of text in a terminal, as parameters of the escape sequence.
BOLD, DIM, RED, YELLOW = "1", "2", "1;31", "33"


def is_terminal(stream: Any) -> bool:
    """Whether a stream, which may be an object of a script without `isatty`, writes to a terminal."""
    return hasattr(stream, "isatty") and stream.isatty()


def paint(text: str, style: str, stream: Any) -> str:
    """The text in a style if the stream is a terminal or FORCE_COLOR is set, unless NO_COLOR is set."""
    has_colours = (is_terminal(stream) and os.environ.get("TERM") != "dumb") or os.environ.get("FORCE_COLOR")
    return f"\033[{style}m{text}\033[0m" if text and has_colours and not os.environ.get("NO_COLOR") else text


class _Format(logging.Formatter):
    """Prefixes messages with our name; in a terminal wraps them between words, and paints warnings and errors."""

    def __init__(self, stream: Any) -> None:
        super().__init__()
        self.stream = stream

    def format(self, record: logging.LogRecord) -> str:
        text = wrap_text(f"[hftrainer] {super().format(record)}", self.stream)
        style = RED if record.levelno >= logging.ERROR else YELLOW if record.levelno >= logging.WARNING else ""
        return paint(text, style, self.stream) if style else text


def _transformers_logger() -> logging.Logger | None:
    """The logger of transformers, or None if it is not set up."""
    if "transformers.utils.logging" not in sys.modules:
        return None
    transformers_logger = logging.getLogger("transformers")
    return transformers_logger if transformers_logger.level else None


class _ParentLogger(logging.Logger):
    """The parent of our loggers, with the current `level` and `propagate` of transformers' logger.

    `logging` reads both from a logger's parents for each message. Setting any level clears its cache of levels.
    """

    @property
    def level(self) -> int:
        """The level of transformers' logger, else that of `TRANSFORMERS_VERBOSITY`, else its default."""
        if (transformers_logger := _transformers_logger()) is not None:
            return transformers_logger.level
        return LEVELS.get(os.environ.get("TRANSFORMERS_VERBOSITY", ""), logging.WARNING)

    @level.setter
    def level(self, value: int) -> None:
        """Ignore the value that `logging` sets when it creates a logger."""

    @property
    def propagate(self) -> bool:
        """False if a script has removed transformers' handler to silence it, or has not set up logging."""
        if _is_set_up_by_itself(logging.getLogger()):
            return False
        transformers_logger = _transformers_logger()
        return transformers_logger is None or bool(transformers_logger.handlers) or transformers_logger.propagate

    @propagate.setter
    def propagate(self, value: bool) -> None:
        """Ignore the value that `logging` sets when it creates a logger."""

    def is_shown_by_root(self, record: logging.LogRecord) -> bool:
        """Whether a handler of the root logger displays a message. Handlers that write to a file do not count."""
        hidden_kinds = (logging.FileHandler, logging.NullHandler)
        handlers = (handler for handler in logging.getLogger().handlers if not isinstance(handler, hidden_kinds))
        return self.propagate and any(record.levelno >= handler.level for handler in handlers)


class _ForwardingHandler(logging.Handler):
    """Passes messages to transformers' handlers, unless the root logger displays them.

    Handlers that a script adds to transformers' loggers get all messages, except those shown on a terminal already.
    """

    def __init__(self, parent_logger: _ParentLogger) -> None:
        super().__init__()
        self._parent_logger = parent_logger

    def emit(self, record: logging.LogRecord) -> None:
        """Pass the message on, and redraw open progress bars below it."""
        tqdm = getattr(sys.modules.get("tqdm"), "tqdm", None)
        with tqdm.external_write_mode() if tqdm is not None else contextlib.nullcontext():
            self._pass_on(record)

    def _pass_on(self, record: logging.LogRecord) -> None:
        is_shown = self._parent_logger.is_shown_by_root(record)
        transformers_logger = _transformers_logger()
        if transformers_logger is None:
            if not is_shown:
                # A new handler writes to the current sys.stderr.
                to_stderr = logging.StreamHandler()
                to_stderr.setFormatter(_Format(to_stderr.stream))
                to_stderr.handle(record)
            return
        root_handlers = logging.getLogger().handlers if self._parent_logger.propagate else []
        handlers = [handler for name in _MODULES for handler in logging.getLogger(name).handlers]
        for handler in transformers_logger.handlers + handlers:
            is_duplicate = handler in root_handlers or (is_shown and _writes_to_terminal(handler))
            if record.levelno >= handler.level and not is_duplicate:
                _pass_to_handler(handler, record)
        last_resort = logging.lastResort
        is_lost = not (is_shown or transformers_logger.handlers)
        if is_lost and last_resort is not None and record.levelno >= last_resort.level:
            last_resort.handle(record)


def _is_set_up_by_itself(root: logging.Logger) -> bool:
    """Whether the root logger has only the handler that `logging.warning` adds, and its default level."""
    format_of = {getattr(each, "stream", None): getattr(each.formatter, "_fmt", "") for each in root.handlers}
    return root.level == logging.WARNING and format_of == {sys.stderr: logging.BASIC_FORMAT}


def _writes_to_terminal(handler: logging.Handler) -> bool:
    return getattr(handler, "stream", None) in (sys.stderr, sys.stdout, sys.__stderr__, sys.__stdout__)


def _pass_to_handler(handler: logging.Handler, record: logging.LogRecord) -> None:
    """Pass a message to a handler of transformers, with our prefix instead of transformers'."""
    formatter = handler.formatter
    needs_prefix = (
        _writes_to_terminal(handler) if formatter is None else getattr(formatter, "_fmt", None) == _TRANSFORMERS_FORMAT
    )
    if not needs_prefix:
        handler.handle(record)
        return
    with handler.lock or contextlib.nullcontext():
        handler.setFormatter(_Format(getattr(handler, "stream", None)))
        try:
            handler.handle(record)
        finally:
            handler.setFormatter(formatter)


def wrap_text(text: str, stream: Any, margin: int = 0) -> str:
    """Wrap text between words for a terminal, which would break lines within words; `margin` columns stay free."""
    if not is_terminal(stream):
        return text
    width = max(shutil.get_terminal_size().columns - margin, 1)
    options: dict[str, Any] = {"subsequent_indent": "    ", "break_long_words": False, "break_on_hyphens": False}
    # Keep a key and its value on one line, and a number and its unit.
    unbroken_text = re.sub(r"(\d%?) (?=[A-Za-z])", "\\1\xa0", text.replace("': ", "':\xa0"))
    return "\n".join(textwrap.fill(line, width, **options) for line in unbroken_text.splitlines()).replace("\xa0", " ")


def print_interrupt_notes(error: BaseException) -> bool:
    """Print the notes of a Ctrl-C, which say what is saved; False for another error, and without notes.

    Another Ctrl-C may end the uploads that follow the first. On Python 3.10 `add_note` has logged the notes.
    """
    notes = [note for noted in (error.__context__, error) for note in getattr(noted, "__notes__", ())]
    if not (isinstance(error, KeyboardInterrupt) and notes):
        return False
    # A further Ctrl-C, while Python exits, ends the process without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.stderr.writelines(f"{note}\n" for note in notes if sys.version_info >= (3, 11))
    return True


def format_number(value: float | None) -> str:
    """A number of a table or a plot as short text, such as '94,038' or '0.4983'; empty for None."""
    if value is None:
        return ""
    is_long = math.isfinite(value) and abs(value) < 1e12 and (abs(value) >= 1000 or value == int(value))
    return f"{value:,.0f}" if is_long else f"{value:.4g}"


def format_span(first: float, last: float) -> str:
    """Two steps as text, such as '61-70'; or '61' if they are the same."""
    return f"{first:,.0f}" if first == last else f"{first:,.0f}-{last:,.0f}"


def format_bytes(size: float) -> str:
    """A number of bytes as text, such as '382 MB' or '1.23 GB'."""
    units = {"GB": 1e9, "MB": 1e6, "kB": 1e3}
    unit = next((unit for unit, scale in units.items() if size >= 0.9995 * scale), "kB")
    number = size / units[unit]
    return f"{number:,.0f} {unit}" if number >= 100 else f"{number:.3g} {unit}"


def format_duration(seconds: float) -> str:
    """A duration as text, such as '4.1 ms', '12.3 s', '16 min 40 s' or '1 h 7 min'."""
    if seconds < 100:
        return f"{1000 * seconds:.3g} ms" if 0 < seconds < 0.1 else f"{max(seconds, 0):.3g} s"
    unit, size, part, part_size = ("h", 3_600, "min", 60) if seconds >= 3_600 else ("min", 60, "s", 1)
    count, rest = divmod(round(seconds / part_size), size // part_size)
    return f"{count:,} {unit}" + (f" {rest} {part}" if rest else "")


def command_name() -> str:
    """Our command line as a user may type it: `hftrainer` if that is on the path, for this Python."""
    script = shutil.which("hftrainer") or ""
    return "hftrainer" if os.path.dirname(script) == os.path.dirname(sys.executable) else "python -m hftrainer"


def tell(text: str, level: int = logging.INFO) -> None:
    """Log a message about a run. Only settings that hide warnings hide it."""
    is_visible = logging.getLogger("hftrainer").isEnabledFor(logging.WARNING)
    run_logger.setLevel(logging.INFO if is_visible else logging.CRITICAL)
    run_logger.log(level, "%s", text)


def count_of(count: int, name: str) -> str:
    """A number of things, such as '1 step' or '2,000 steps'; `name` is the plural."""
    return f"{count:,} {name.removesuffix('s') if count == 1 else name}"


def follow_transformers_logging() -> None:
    """Make `_ParentLogger` the parent of our loggers, once."""
    loggers = [logging.getLogger(name) for name in _PACKAGES]
    if any(isinstance(logger.parent, _ParentLogger) for logger in loggers):
        return
    parent = _ParentLogger("hftrainer.switches")
    parent.parent = logging.getLogger()
    parent.addHandler(_ForwardingHandler(parent))
    loggers[0].parent = parent
    # The adapters follow the level of the first logger.
    loggers[1].parent = loggers[0]
    # Setting a level clears the cache of `logging`.
    loggers[0].setLevel(loggers[0].level)


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
    """Log a message, unless this process has logged the same one."""
    logger.log(level, message)
