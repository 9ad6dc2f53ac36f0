"""Re-exports `hftrainer.callbacks` under the name of transformers' module."""

from hftrainer.callbacks.flow_callbacks import (
    DEFAULT_CALLBACKS as DEFAULT_CALLBACKS,
    DefaultFlowCallback as DefaultFlowCallback,
    EarlyStoppingCallback as EarlyStoppingCallback,
)
from hftrainer.callbacks.handler import CallbackHandler as CallbackHandler
from hftrainer.callbacks.progress_bar import PrinterCallback as PrinterCallback, ProgressCallback as ProgressCallback
from hftrainer.callbacks.state import (
    ExportableState as ExportableState,
    TrainerCallback as TrainerCallback,
    TrainerControl as TrainerControl,
    TrainerState as TrainerState,
)
