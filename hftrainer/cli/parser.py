"""The base class of the subcommands' parsers."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
    """A parser whose errors mention `--help`."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **kwargs})

    def error(self, message: str) -> NoReturn:
        """Exit with status 2 after an error in the command line."""
        super().error(f"{message}; see {self.prog} --help")

    def fail(self, error: BaseException | str, status: int = 2) -> NoReturn:
        """Exit with an error whose message says what to do."""
        self.exit(status, f"{self.prog}: error: {error}\n")
