"""`TFTrainer` under the name of its module in transformers 4.0 to 4.36."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hftrainer.plugins import import_adapter

if TYPE_CHECKING:
    from hftrainer_tensorflow.trainer import TFTrainer as TFTrainer
else:
    TFTrainer = import_adapter("tensorflow", "trainer").TFTrainer
