"""The callbacks of a Trainer, under the module's name in transformers; they are defined in `hftrainer.callbacks`."""

from hftrainer.callbacks.flow import (
    DEFAULT_CALLBACKS as DEFAULT_CALLBACKS,
    DefaultFlowCallback as DefaultFlowCallback,
    EarlyStoppingCallback as EarlyStoppingCallback,
)
from hftrainer.callbacks.handler import CallbackHandler as CallbackHandler
from hftrainer.callbacks.progress import PrinterCallback as PrinterCallback, ProgressCallback as ProgressCallback
from hftrainer.callbacks.state import (
    ExportableState as ExportableState,
    TrainerCallback as TrainerCallback,
    TrainerControl as TrainerControl,
    TrainerState as TrainerState,
)
