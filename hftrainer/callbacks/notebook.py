"""The progress display in notebooks."""

from typing import Any

from hftrainer.callbacks.progress import ProgressCallback


def _find_callback() -> type[Any]:
    """The class of transformers, which shows a table of losses and metrics; our bar without it or without IPython."""
    try:
        from transformers.utils.notebook import NotebookProgressCallback
    except ImportError:
        return ProgressCallback
    return NotebookProgressCallback


NotebookProgressCallback: type[Any] = _find_callback()
