"""The progress display in notebooks."""

from typing import Any

from hftrainer.callbacks.progress_bar import ProgressCallback


def _find_callback() -> type[Any]:
    """Transformers' callback with a table of metrics, or our bar if it cannot be imported."""
    try:
        from transformers.utils.notebook import NotebookProgressCallback
    except ImportError:
        return ProgressCallback
    return NotebookProgressCallback


NotebookProgressCallback: type[Any] = _find_callback()
