"""Re-exports the callbacks of `hftrainer.trackers` under the name of transformers' package."""

from hftrainer.trackers.callbacks import (
    CometCallback as CometCallback,
    MLflowCallback as MLflowCallback,
    WandbCallback as WandbCallback,
    WandbLogModel as WandbLogModel,
)
from hftrainer.trackers.tensorboard import TensorBoardCallback as TensorBoardCallback
