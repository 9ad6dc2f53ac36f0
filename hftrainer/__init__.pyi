# The public names; hftrainer/__init__.py imports each from here when it is first used.

from hftrainer.callbacks.notebook import NotebookProgressCallback as NotebookProgressCallback
from hftrainer.callbacks.progress_bar import (
    PrinterCallback as PrinterCallback,
    ProgressCallback as ProgressCallback,
)
from hftrainer.cli.install import (
    install as install,
    uninstall as uninstall,
)
from hftrainer.compat.version import __version__ as __version__
from hftrainer.data.collators import (
    DataCollatorWithPadding as DataCollatorWithPadding,
    default_data_collator as default_data_collator,
)
from hftrainer.evaluation.metrics import TorchMetrics as TorchMetrics
from hftrainer.hf_argparser import HfArgumentParser as HfArgumentParser
from hftrainer.model_card.card import TrainingSummary as TrainingSummary
from hftrainer.optimizers.schedules import get_scheduler as get_scheduler
from hftrainer.optimization_tf import (
    AdamWeightDecay as AdamWeightDecay,
    WarmUp as WarmUp,
    create_optimizer as create_optimizer,
)
from hftrainer.reporting.plot import PlotCallback as PlotCallback
from hftrainer.trainer import Trainer as Trainer
from hftrainer.trainer_callback import (
    CallbackHandler as CallbackHandler,
    DefaultFlowCallback as DefaultFlowCallback,
    EarlyStoppingCallback as EarlyStoppingCallback,
    ExportableState as ExportableState,
    TrainerCallback as TrainerCallback,
    TrainerControl as TrainerControl,
    TrainerState as TrainerState,
)
from hftrainer.trainer_seq2seq import Seq2SeqTrainer as Seq2SeqTrainer
from hftrainer.trainer_tf import TFTrainer as TFTrainer
from hftrainer.trainer_utils import (
    EvalLoopOutput as EvalLoopOutput,
    EvalPrediction as EvalPrediction,
    IntervalStrategy as IntervalStrategy,
    PredictionOutput as PredictionOutput,
    SaveStrategy as SaveStrategy,
    SchedulerType as SchedulerType,
    TrainOutput as TrainOutput,
    enable_full_determinism as enable_full_determinism,
    get_last_checkpoint as get_last_checkpoint,
    set_seed as set_seed,
)
from hftrainer.training_args import TrainingArguments as TrainingArguments
from hftrainer.training_args_seq2seq import Seq2SeqTrainingArguments as Seq2SeqTrainingArguments
from hftrainer.training_args_tf import TFTrainingArguments as TFTrainingArguments
