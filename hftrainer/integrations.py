"""`report_to` and `loggers`: the trackers that a run is written to."""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hftrainer.errors import InvalidArgument, MissingPackage, UnsupportedArgument, suggest
from hftrainer.parallel.config_files import env_flag
from hftrainer.plugins import adapter
from hftrainer.reporting import tracker_callbacks
from hftrainer.reporting.tracker_callbacks import (
    CometCallback as CometCallback,
    MLflowCallback as MLflowCallback,
    TensorBoardCallback as TensorBoardCallback,
    WandbCallback as WandbCallback,
)
from hftrainer.reporting.tracking import TABLE, ReportingCallback as ReportingCallback  # 'csv', the script's loggers
from hftrainer.training_args import TrainingArguments

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Integration:
    """A tracker that `report_to` may name.

    Attributes:
        modules: modules that must be importable; alternatives are separated by '|'.
        install: the package to install.
        has_lightning_logger: whether a Lightning logger writes to it; otherwise transformers' callback does.
        in_all: whether `report_to='all'` includes it, when it is installed.
        switch: an environment variable that disables the tracker.
    """

    modules: tuple[str, ...]
    install: str
    has_lightning_logger: bool = False
    in_all: bool = True
    switch: str | None = None


#: In the order in which transformers uses them for 'all'.
INTEGRATIONS = {
    "azure_ml": Integration(("azureml.core.run",), "azureml-core"),
    "comet_ml": Integration(("comet_ml",), "comet-ml", has_lightning_logger=True),
    "dagshub": Integration(("dagshub", "mlflow"), "dagshub mlflow"),
    "dvclive": Integration(("dvclive",), "dvclive"),
    "mlflow": Integration(("mlflow",), "mlflow", has_lightning_logger=True, switch="DISABLE_MLFLOW_INTEGRATION"),
    "tensorboard": Integration(("tensorboard|tensorboardX",), "tensorboard", has_lightning_logger=True),
    "wandb": Integration(("wandb",), "wandb", has_lightning_logger=True, switch="WANDB_DISABLED"),
    "codecarbon": Integration(("codecarbon",), "codecarbon"),
    "clearml": Integration(("clearml",), "clearml"),
    "swanlab": Integration(("swanlab",), "swanlab"),
    "trackio": Integration(("trackio",), "trackio"),
    "kubeflow": Integration((), "", switch="DISABLE_KUBEFLOW_INTEGRATION"),
    "flyte": Integration(("flytekit",), "flytekit", in_all=False),
    "csv": Integration((), "", has_lightning_logger=True, in_all=False),
}
#: Set by Kubeflow in its jobs; without it there is no server to report to.
KUBEFLOW = "KUBEFLOW_TRAINER_SERVER_URL"
#: The values of COMET_MODE besides unset and 'disabled'; the last two are from v4.
COMET_MODES = ("", "get_or_create", "create", "get", "online", "offline")
_NEPTUNE = (
    "report_to='neptune' is not supported: Neptune's service has ended, and Lightning has removed its logger. "
    "Use 'tensorboard', 'wandb', 'mlflow', 'comet_ml' or 'csv'."
)


def chosen(report_to: str | Sequence[str] | None) -> list[str]:
    """The names of the trackers that `report_to` selects, in order, without those that the environment disables.

    Raises:
        InvalidArgument: for an unknown name.
        UnsupportedArgument: for Neptune.
        MissingPackage: for a tracker whose package is not installed.
    """
    given = [report_to] if isinstance(report_to, str) else list(report_to or [])
    if wrong := [name for name in given if not isinstance(name, str)]:
        raise InvalidArgument(f"report_to={wrong[0]!r}: give 'all', 'none', the name of a tracker, or a list of them.")
    if len(given) > 1 and (alone := {"all", "none"} & set(given)):
        raise InvalidArgument(f"report_to={given!r}: {min(alone)!r} cannot be combined with other names.")
    if given == ["all"]:
        return [name for name, kind in INTEGRATIONS.items() if kind.in_all and _is_available(name)]
    names = [{"comet": "comet_ml"}.get(name, name) for name in given if name != "none"]
    for name in names:
        _check(name)
    return [name for name in dict.fromkeys(names) if not _is_switched_off(name)]


def add_kubeflow_tracker(args: TrainingArguments) -> None:
    """Add Kubeflow to the trackers in `args.report_to`: its jobs always report to it."""
    given = list(args.report_to or [])
    if not {"kubeflow", "all"} & {*given} and _is_available("kubeflow"):
        args.report_to = [*given, "kubeflow"]


def _check(name: str) -> None:
    if name == "neptune":
        raise UnsupportedArgument(_NEPTUNE)
    if name not in INTEGRATIONS:
        raise InvalidArgument(
            f"report_to={name!r} is not a tracker{suggest(name, INTEGRATIONS, '.')} Known are 'all', 'none', "
            f"{', '.join(map(repr, INTEGRATIONS))}."
        )
    if _is_switched_off(name):
        return
    if name == "comet_ml" and _comet_mode() not in COMET_MODES:
        raise InvalidArgument(f"COMET_MODE={_comet_mode()!r} must be one of {', '.join(map(repr, COMET_MODES[1:]))}.")
    missing = missing_packages(name)
    if missing:
        by = "" if INTEGRATIONS[name].has_lightning_logger else ", which uses transformers' own callback,"
        raise MissingPackage(f"report_to={name!r}{by} needs a package that is not installed: pip install {missing}")
    if name == "kubeflow" and KUBEFLOW not in os.environ:
        raise InvalidArgument(f"report_to='kubeflow' needs {KUBEFLOW}, which Kubeflow's training jobs set.")
    if not _is_written_to(name):
        raise MissingPackage(
            f"report_to={name!r} uses transformers' own callback, which the installed release does not "
            "have: pip install --upgrade transformers"
        )


def missing_packages(name: str) -> str:
    """The packages to install for a tracker; empty when all are installed."""
    kind = INTEGRATIONS[name]
    there = all(any(map(_is_installed, module.split("|"))) for module in kind.modules)
    needed = [] if there else [kind.install]
    if not kind.has_lightning_logger and not _is_installed("transformers"):
        needed.append("transformers")
    return " ".join(needed)


def _is_installed(module: str) -> bool:
    parent = module.rpartition(".")[0]
    return (not parent or _is_installed(parent)) and importlib.util.find_spec(module) is not None


def _is_switched_off(name: str) -> bool:
    switch = INTEGRATIONS[name].switch
    if name == "comet_ml" and _comet_mode() == "disabled":
        return True
    return switch is not None and env_flag(switch)


def _comet_mode() -> str:
    return os.environ.get("COMET_MODE", "").lower()


def _is_available(name: str) -> bool:
    """Whether 'all' includes a tracker."""
    if name == "kubeflow" and KUBEFLOW not in os.environ:
        return False
    if missing_packages(name) or _is_switched_off(name):
        return False
    if name == "azure_ml":  # skipped if MLflow is used, which writes to Azure too
        return not _is_available("mlflow")
    if name == "comet_ml":
        from comet_ml.config import get_config  # type: ignore[attr-defined]

        return get_config("comet.api_key") is not None  # without a key it would prompt for one
    return _is_written_to(name)


def _is_written_to(name: str) -> bool:
    """Whether a tracker has a callback, ours or that of the installed transformers."""
    if INTEGRATIONS[name].has_lightning_logger:
        return True
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

    return name in INTEGRATION_TO_CALLBACK


def callback_classes(names: Sequence[str]) -> list[Any]:
    """The callback classes for trackers, in order: ours where a Lightning logger writes, else transformers'."""
    ours = {kind.name: kind for kind in tracker_callbacks.CALLBACKS}
    found = []
    for name in names:
        if name in ours:
            found.append(ours[name])
        elif not INTEGRATIONS[name].has_lightning_logger:
            from transformers.integrations.integration_utils import get_reporting_integration_callbacks

            found += get_reporting_integration_callbacks([name])
    return found


def further_loggers(names: Sequence[str], loggers: Any, args: TrainingArguments) -> list[Any]:
    """The loggers for a `ReportingCallback`: the table of 'csv', and the script's loggers; on the main process only.

    Args:
        names: names of trackers.
        loggers: the script's `loggers`.
        args: the run's arguments.

    Raises:
        InvalidArgument: for an object in `loggers` that is not a Lightning logger.
    """
    if loggers is not None and not isinstance(loggers, (list, tuple)):
        raise InvalidArgument(f"loggers={loggers!r} ({type(loggers).__name__}): give a list of Lightning loggers.")
    for each in loggers or ():
        if isinstance(each, type) or not adapter().is_lightning_logger(each):
            raise InvalidArgument(
                f"loggers holds {each!r} ({type(each).__name__}): give instances of Lightning's loggers, such as "
                "lightning.pytorch.loggers.CSVLogger('logs'), or name a tracker in report_to."
            )
    tables = [name for name in names if name == TABLE]
    return [*tables, *(loggers or ())] if args.process_index == 0 else []
