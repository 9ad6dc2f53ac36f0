"""Implements `report_to` and `loggers`: selects the trackers and loggers of a run."""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hftrainer.base.config_files import env_flag
from hftrainer.errors import InvalidArgument, MissingPackage, UnsupportedArgument, suggest
from hftrainer.plugins import lightning_engine_module
from hftrainer.trackers.base_callbacks import CSV_LOGGER, ReportingCallback
from hftrainer.trackers.callbacks import CometCallback, MLflowCallback, WandbCallback
from hftrainer.trackers.tensorboard import TensorBoardCallback
from hftrainer.training_args import TrainingArguments

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Tracker:
    """A tracker that `report_to` can select.

    Attributes:
        modules: modules that must be importable; '|' separates alternatives.
        install: the package to install.
        callback: our callback, which writes with a Lightning logger; without one, transformers' callback writes.
        in_all: whether `report_to='all'` includes the tracker if it is installed.
        switch: an environment variable that disables the tracker.
    """

    modules: tuple[str, ...]
    install: str
    callback: type[ReportingCallback] | None = None
    in_all: bool = True
    switch: str | None = None


#: In the order in which transformers uses them for 'all'.
TRACKERS = {
    "azure_ml": Tracker(("azureml.core.run",), "azureml-core"),
    "comet_ml": Tracker(("comet_ml",), "comet-ml", callback=CometCallback),
    "dagshub": Tracker(("dagshub", "mlflow"), "dagshub mlflow"),
    "dvclive": Tracker(("dvclive",), "dvclive"),
    "mlflow": Tracker(("mlflow",), "mlflow", callback=MLflowCallback, switch="DISABLE_MLFLOW_INTEGRATION"),
    "tensorboard": Tracker(("tensorboard|tensorboardX",), "tensorboard", callback=TensorBoardCallback),
    "wandb": Tracker(("wandb",), "wandb", callback=WandbCallback, switch="WANDB_DISABLED"),
    "codecarbon": Tracker(("codecarbon",), "codecarbon"),
    "clearml": Tracker(("clearml",), "clearml"),
    "swanlab": Tracker(("swanlab",), "swanlab"),
    "trackio": Tracker(("trackio",), "trackio"),
    "kubeflow": Tracker((), "", switch="DISABLE_KUBEFLOW_INTEGRATION"),
    "flyte": Tracker(("flytekit",), "flytekit", in_all=False),
    "csv": Tracker((), "", callback=ReportingCallback, in_all=False),
}
#: Kubeflow sets this variable in its jobs. Without it, we have no server to report to.
KUBEFLOW = "KUBEFLOW_TRAINER_SERVER_URL"
#: The values of COMET_MODE other than 'disabled'; '' means unset, and the last two are from v4.
COMET_MODES = ("", "get_or_create", "create", "get", "online", "offline")
_NEPTUNE = (
    "report_to='neptune' is not supported: Neptune's service has ended, and Lightning has removed its logger. "
    "Use 'tensorboard', 'wandb', 'mlflow', 'comet_ml' or 'csv'."
)


def select_trackers(report_to: str | Sequence[str] | None) -> list[str]:
    """The names of the trackers that `report_to` selects and the environment does not disable, in order.

    Raises:
        InvalidArgument: for an unknown name.
        UnsupportedArgument: for Neptune.
        MissingPackage: for a tracker whose package is not installed.
    """
    values = [report_to] if isinstance(report_to, str) else list(report_to or [])
    if invalid := [name for name in values if not isinstance(name, str)]:
        raise InvalidArgument(
            f"report_to={invalid[0]!r}: pass 'all', 'none', the name of a tracker, or a list of names."
        )
    if len(values) > 1 and (exclusive := {"all", "none"} & set(values)):
        raise InvalidArgument(f"report_to={values!r}: {min(exclusive)!r} cannot be combined with other names.")
    if values == ["all"]:
        return [name for name, tracker in TRACKERS.items() if tracker.in_all and _is_available(name)]
    names = [{"comet": "comet_ml"}.get(name, name) for name in values if name != "none"]
    for name in names:
        _check_tracker(name)
    return [name for name in dict.fromkeys(names) if not _is_disabled(name)]


def add_kubeflow_tracker(args: TrainingArguments) -> None:
    """Add Kubeflow to `args.report_to` in a Kubeflow job, which always reports to it."""
    trackers = list(args.report_to or [])
    if not {"kubeflow", "all"} & {*trackers} and _is_available("kubeflow"):
        args.report_to = [*trackers, "kubeflow"]


def _check_tracker(name: str) -> None:
    if name == "neptune":
        raise UnsupportedArgument(_NEPTUNE)
    if name not in TRACKERS:
        raise InvalidArgument(
            f"report_to={name!r} is not a tracker{suggest(name, TRACKERS, '.')} Valid names: 'all', 'none', "
            f"{', '.join(map(repr, TRACKERS))}."
        )
    if _is_disabled(name):
        return
    if name == "comet_ml" and _comet_mode() not in COMET_MODES:
        raise InvalidArgument(f"COMET_MODE={_comet_mode()!r} must be one of {', '.join(map(repr, COMET_MODES[1:]))}.")
    missing = missing_packages(name)
    if missing:
        reason = "" if TRACKERS[name].callback else ", which uses transformers' callback,"
        raise MissingPackage(f"report_to={name!r}{reason} needs a package that is not installed: pip install {missing}")
    if name == "kubeflow" and KUBEFLOW not in os.environ:
        raise InvalidArgument(f"report_to='kubeflow' needs {KUBEFLOW}, which Kubeflow's training jobs set.")
    if not _has_callback(name):
        raise MissingPackage(
            f"report_to={name!r} uses transformers' callback, which the installed release does not "
            "have: pip install --upgrade transformers"
        )


def missing_packages(name: str) -> str:
    """The missing packages of a tracker, separated by spaces; empty if none is missing."""
    tracker = TRACKERS[name]
    is_complete = all(any(map(_is_installed, module.split("|"))) for module in tracker.modules)
    packages = [] if is_complete else [tracker.install]
    if tracker.callback is None and not _is_installed("transformers"):
        packages.append("transformers")
    return " ".join(packages)


def _is_installed(module: str) -> bool:
    parent = module.rpartition(".")[0]
    return (not parent or _is_installed(parent)) and importlib.util.find_spec(module) is not None


def _is_disabled(name: str) -> bool:
    switch = TRACKERS[name].switch
    if name == "comet_ml" and _comet_mode() == "disabled":
        return True
    return switch is not None and env_flag(switch)


def _comet_mode() -> str:
    return os.environ.get("COMET_MODE", "").lower()


def _is_available(name: str) -> bool:
    """Whether `report_to='all'` can use a tracker."""
    if name == "kubeflow" and KUBEFLOW not in os.environ:
        return False
    if missing_packages(name) or _is_disabled(name):
        return False
    # MLflow also writes to Azure.
    if name == "azure_ml":
        return not _is_available("mlflow")
    if name == "comet_ml":
        from comet_ml.config import get_config  # type: ignore[attr-defined]

        # Without a key, Comet would prompt for one.
        return get_config("comet.api_key") is not None
    return _has_callback(name)


def _has_callback(name: str) -> bool:
    """Whether we or the installed transformers have a callback for a tracker."""
    if TRACKERS[name].callback is not None:
        return True
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

    return name in INTEGRATION_TO_CALLBACK


def callback_classes(names: Sequence[str]) -> list[Any]:
    """The callback classes of trackers, in order: ours for Lightning loggers, otherwise transformers'."""
    classes: list[Any] = []
    for name in names:
        if (callback := TRACKERS[name].callback) is None:
            from transformers.integrations.integration_utils import get_reporting_integration_callbacks

            classes += get_reporting_integration_callbacks([name])
        # The table of 'csv' is one of `further_loggers`.
        elif name != CSV_LOGGER:
            classes.append(callback)
    return classes


def further_loggers(names: Sequence[str], loggers: Any, args: TrainingArguments) -> list[Any]:
    """The loggers of `ReportingCallback`, in the main process: the table of 'csv', then the script's loggers.

    Args:
        names: the names of the trackers.
        loggers: the script's `loggers`.
        args: the training arguments.

    Raises:
        InvalidArgument: for an object in `loggers` that is not a Lightning logger.
    """
    if loggers is not None and not isinstance(loggers, (list, tuple)):
        raise InvalidArgument(f"loggers={loggers!r} ({type(loggers).__name__}): pass a list of Lightning loggers.")
    for item in loggers or ():
        if isinstance(item, type) or not lightning_engine_module().is_lightning_logger(item):
            raise InvalidArgument(
                f"loggers contains {item!r} ({type(item).__name__}): pass instances of Lightning's loggers, such as "
                "lightning.pytorch.loggers.CSVLogger('logs'), or name a tracker in report_to."
            )
    tables = [name for name in names if name == CSV_LOGGER]
    return [*tables, *(loggers or ())] if args.process_index == 0 else []
