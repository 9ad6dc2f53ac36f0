"""The Hugging Face `Trainer` API, v4.0 to v5.x, with PyTorch Lightning as its engine."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hftrainer.compat.messages import connect as _connect_messages
from hftrainer.compat.version import __version__ as __version__

#: Public name → the module that defines it. Names are imported when first used, so that `import hftrainer` is cheap.
_EXPORTS = {
    name: module
    for module, exported in {
        "hftrainer.trainer": "Trainer",
        "hftrainer.trainer_seq2seq": "Seq2SeqTrainer",
        "hftrainer.trainer_tf": "TFTrainer",
        "hftrainer.training_args": "TrainingArguments",
        "hftrainer.training_args_seq2seq": "Seq2SeqTrainingArguments",
        "hftrainer.training_args_tf": "TFTrainingArguments",
        "hftrainer.trainer_callback": (
            "CallbackHandler DefaultFlowCallback EarlyStoppingCallback ExportableState TrainerCallback TrainerControl "
            "TrainerState"
        ),
        "hftrainer.callbacks.progress": "PrinterCallback ProgressCallback",
        "hftrainer.callbacks.notebook": "NotebookProgressCallback",
        "hftrainer.reporting.plot": "PlotCallback",
        "hftrainer.trainer_utils": (
            "EvalLoopOutput EvalPrediction IntervalStrategy PredictionOutput SaveStrategy SchedulerType TrainOutput "
            "enable_full_determinism get_last_checkpoint set_seed"
        ),
        "hftrainer.data.collators": "DataCollatorWithPadding default_data_collator",
        "hftrainer.evaluation.metrics": "TorchMetrics",
        "hftrainer.hf_argparser": "HfArgumentParser",
        "hftrainer.modelcard": "TrainingSummary",
        "hftrainer.optimization": "get_scheduler",
        "hftrainer.optimization_tf": "AdamWeightDecay WarmUp create_optimizer",
        "hftrainer.cli.install": "install uninstall",
    }.items()
    for name in exported.split()
}
__all__ = sorted(_EXPORTS)

if TYPE_CHECKING:
    from hftrainer.callbacks.notebook import NotebookProgressCallback
    from hftrainer.callbacks.progress import PrinterCallback, ProgressCallback
    from hftrainer.cli.install import install, uninstall
    from hftrainer.data.collators import DataCollatorWithPadding, default_data_collator
    from hftrainer.evaluation.metrics import TorchMetrics
    from hftrainer.hf_argparser import HfArgumentParser
    from hftrainer.modelcard import TrainingSummary
    from hftrainer.optimization import get_scheduler
    from hftrainer.optimization_tf import AdamWeightDecay, WarmUp, create_optimizer
    from hftrainer.reporting.plot import PlotCallback
    from hftrainer.trainer import Trainer
    from hftrainer.trainer_callback import (
        CallbackHandler,
        DefaultFlowCallback,
        EarlyStoppingCallback,
        ExportableState,
        TrainerCallback,
        TrainerControl,
        TrainerState,
    )
    from hftrainer.trainer_seq2seq import Seq2SeqTrainer
    from hftrainer.trainer_tf import TFTrainer
    from hftrainer.trainer_utils import (
        EvalLoopOutput,
        EvalPrediction,
        IntervalStrategy,
        PredictionOutput,
        SaveStrategy,
        SchedulerType,
        TrainOutput,
        enable_full_determinism,
        get_last_checkpoint,
        set_seed,
    )
    from hftrainer.training_args import TrainingArguments
    from hftrainer.training_args_seq2seq import Seq2SeqTrainingArguments
    from hftrainer.training_args_tf import TFTrainingArguments


_connect_messages()


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_EXPORTS[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*globals(), *_EXPORTS]
