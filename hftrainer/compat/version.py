"""The version of this package, from the tag that it was built from."""

import importlib

__all__ = ["__version__"]

try:
    __version__: str = importlib.import_module("hftrainer.compat._version").__version__
except ModuleNotFoundError:
    # A checkout that was never built or installed has no version.
    __version__ = "0+clone.not.installed"
