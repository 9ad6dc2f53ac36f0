"""`TFTrainer` under the name of its module in transformers 4.0 to 4.36."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hftrainer.plugins import load

if TYPE_CHECKING:
    from hftrainer_tensorflow.trainer import TFTrainer as TFTrainer
else:
    TFTrainer = load("tensorflow", "trainer").TFTrainer
