"""For functions that `processes.run_ranks` calls."""

import logging

import pytest


def error_of(kinds, call, *args, **named):
    """The message of the error, one of `kinds`, that a call raises."""
    with pytest.raises(kinds) as caught:
        call(*args, **named)
    return str(caught.value)


class Messages(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []
        logging.getLogger("hftrainer").addHandler(self)

    def emit(self, record):
        self.lines.append(record.getMessage())
