"""Re-exports `hftrainer.model_card` under the name of transformers' module."""

from hftrainer.model_card.card import TrainingSummary as TrainingSummary
