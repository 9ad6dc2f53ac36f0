"""The fields of `TrainingArguments`, grouped by subject: one module, one dataclass per subject."""

from hftrainer.arguments.data import DataArguments
from hftrainer.arguments.debugging import DebuggingArguments
from hftrainer.arguments.distribution import DistributionArguments
from hftrainer.arguments.evaluation import EvaluationArguments
from hftrainer.arguments.hub import HubArguments
from hftrainer.arguments.legacy import LegacyArguments
from hftrainer.arguments.logging import LoggingArguments
from hftrainer.arguments.optimizer import OptimizerArguments
from hftrainer.arguments.precision import PrecisionArguments
from hftrainer.arguments.saving import OutputArguments, SavingArguments
from hftrainer.arguments.schedule import ScheduleArguments

__all__ = [
    "DataArguments",
    "DebuggingArguments",
    "DistributionArguments",
    "EvaluationArguments",
    "HubArguments",
    "LegacyArguments",
    "LoggingArguments",
    "OptimizerArguments",
    "OutputArguments",
    "PrecisionArguments",
    "SavingArguments",
    "ScheduleArguments",
]
