"""`python -m hftrainer plot --study sqlite:///x.db`: what a search has tried, and what came of it."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hftrainer.errors import InvalidArgument
from hftrainer.reporting.plot import load

if TYPE_CHECKING:
    from optuna import Study

logger = logging.getLogger(__name__)

#: File → Optuna's function that draws it, and how many trials with different values it needs.
PICTURES = {
    "history": ("plot_optimization_history", 1),
    "importance": ("plot_param_importances", 2),
    "parallel_coordinates": ("plot_parallel_coordinate", 2),
}


def plot_study(storage: str, study_name: str | None = None, *, out: str = ".", html: bool = False) -> list[str]:
    """Draw the objective over the trials, the importance of each hyperparameter, and which values went together.

    Args:
        storage: a URL such as `sqlite:///search.db`, or the file of a journal.
        study_name: which study; not needed where there is one only.
        out: the folder to write into.
        html: write pages too, which can be zoomed and hovered over.

    Returns:
        The paths that were written; with several objectives there are pictures of each.

    Raises:
        InvalidArgument: when there is no such study, or it has no finished trial.
        MissingPackage: without matplotlib, or plotly for the pages.
    """
    load("matplotlib").use("agg")
    study = _load_study(storage, study_name)
    finished = sum(trial.state.name == "COMPLETE" for trial in study.get_trials(deepcopy=False))
    if not finished:
        raise InvalidArgument(f"{storage}: the study {study.study_name!r} has no finished trial to draw.")
    os.makedirs(out, exist_ok=True)
    written = []
    for name, (function, needed) in PICTURES.items():
        if finished < needed:
            logger.warning("%s needs %d finished trials, and there is %d: it is not drawn.", name, needed, finished)
            continue
        for suffix, target in _objectives(study):
            path = Path(out) / f"{name}{suffix}.png"
            _draw_png(function, study, target, path)
            written.append(str(path))
            if html:
                page = path.with_suffix(".html")
                figure = getattr(load("optuna.visualization"), function)(study, **target)
                figure.write_html(page, include_plotlyjs=True)
                written.append(str(page))
    return written


def _objectives(study: Study) -> Iterator[tuple[str, dict[str, Any]]]:
    """What the files of an objective end in, and what Optuna is told to draw it."""
    if len(study.directions) == 1:
        yield "", {}
        return
    for number in range(len(study.directions)):
        yield f"_{number}", {"target": _value(number), "target_name": f"Objective {number}"}


def _value(number: int) -> Callable[[Any], float]:
    return lambda trial: trial.values[number]


def _draw_png(function: str, study: Study, target: dict[str, Any], path: Path) -> None:
    plt, drawing = load("matplotlib.pyplot"), load("optuna.visualization.matplotlib")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Optuna calls its pictures by matplotlib experimental
        axes = getattr(drawing, function)(study, **target)
    figure = axes.figure
    figure.set_size_inches(10, 6)
    if function == "plot_parallel_coordinate":  # the grid of each axis would cut through the lines
        for axis in figure.axes:
            axis.grid(False)
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)


def _load_study(storage: str, study_name: str | None) -> Study:
    optuna = load("optuna")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    held: Any = storage
    if "://" not in storage:
        _check_file(storage, storage)
        held = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(storage))
    elif storage.startswith("sqlite:///"):
        _check_file(storage, storage.removeprefix("sqlite:///").partition("?")[0])
    names = optuna.get_all_study_names(held)
    if not names:
        raise InvalidArgument(f"{storage}: there is no study in it.")
    if (study_name is None and len(names) > 1) or (study_name is not None and study_name not in names):
        raise InvalidArgument(f"{storage} holds the studies {', '.join(names)}: give one of them as --study-name.")
    return optuna.load_study(study_name=study_name or names[0], storage=held)


def _check_file(storage: str, path: str) -> None:
    """Databases that are not there would be made."""
    if not Path(path).is_file():
        raise InvalidArgument(f"{storage}: there is no such file.")
