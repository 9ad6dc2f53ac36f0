"""The callbacks of a Trainer, under the module's name in transformers; they are defined in `hftrainer.callbacks`."""

from hftrainer.callbacks.flow import DEFAULT_CALLBACKS, DefaultFlowCallback, EarlyStoppingCallback
from hftrainer.callbacks.handler import CallbackHandler
from hftrainer.callbacks.progress import PrinterCallback, ProgressCallback
from hftrainer.callbacks.state import ExportableState, TrainerCallback, TrainerControl, TrainerState

__all__ = [
    "DEFAULT_CALLBACKS",
    "CallbackHandler",
    "DefaultFlowCallback",
    "EarlyStoppingCallback",
    "ExportableState",
    "PrinterCallback",
    "ProgressCallback",
    "TrainerCallback",
    "TrainerControl",
    "TrainerState",
]
