"""`python -m hftrainer plot --study sqlite:///x.db`: plots of a study's trials and results."""

from __future__ import annotations

import logging
import math
import os
import textwrap
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

from hftrainer.base.messages import format_number
from hftrainer.errors import InvalidArgument
from hftrainer.reporting.curves import COLOURS
from hftrainer.reporting.panels import axis_range, import_plotting, log_axis
from hftrainer.reporting.plot import format_ticks
from hftrainer.search.studies import open_journal

if TYPE_CHECKING:
    from optuna import Study

logger = logging.getLogger(__name__)

#: File name → Optuna's plot function, the minimum number of completed trials, and a title.
PLOTS = {
    "history": ("plot_optimization_history", 1, "History of {}: each trial, and the best so far"),
    "importance": ("plot_param_importances", 2, "Importance of hyperparameters for {} (the shares sum to 1{})"),
    "parallel_coordinates": ("plot_parallel_coordinate", 2, "Hyperparameters and {}: a line per trial"),
}
#: Number of completed trials below which importances are uncertain, and have pale bars without digits.
MANY_TRIALS = 20
PALE = "#99c7e0"
#: Optuna's state of a trial → a word, if it is another.
STATES = {"complete": "completed", "fail": "failed"}
#: Optuna's state of a trial that is not drawn as the others → why, in the order of a legend.
REASONS = {"PRUNED": "pruned", "FAIL": "failed", "COMPLETE": "far worse", "RUNNING": "running", "WAITING": "waiting"}
#: The same in a legend, where it is longer.
LEGEND = {"pruned": "pruned, at its last report"}
#: What a trial is, if it is not as the others, or where it is beyond the axis → its mark, matplotlib's and plotly's.
REASON_MARKS = {
    **{"best trial": ("*", "star"), "pruned": ("P", "cross"), "failed": ("x", "x"), "running": ("s", "square")},
    **{"waiting": ("D", "diamond"), "up": ("^", "triangle-up"), "down": ("v", "triangle-down")},
}
#: The colours of completed trials; others are grey.
REASON_COLOURS = {"best trial": COLOURS[1], "far worse": COLOURS[0]}


def plot_study(
    storage: str, study_name: str | None = None, *, out: str = ".", html: bool | str = False, table: str = ""
) -> list[str]:
    """Plot a study's objectives, hyperparameter importances, and trials in parallel coordinates.

    Args:
        storage: a database URL such as `sqlite:///search.db`, or a journal file.
        study_name: name of the study; optional if the storage has only one.
        out: output folder.
        html: also write a page of all plots; "cdn" for one that fetches plotly's script, of 5 MB, from the network.
        table: the best trials as text, for the page.

    Returns:
        The paths of the files. A study with several objectives has one plot of each kind per objective, but of two a
        Pareto front in place of their histories.

    Raises:
        InvalidArgument: if the study does not exist, or has no completed trial.
        MissingPackage: if matplotlib is not installed, or plotly for the page.
    """
    import_plotting("matplotlib").use("agg")
    study = _load_study(storage, study_name)
    count = sum(trial.state.name == "COMPLETE" for trial in study.get_trials(deepcopy=False))
    if not count:
        raise InvalidArgument(f"{storage}: the study {study.study_name!r} has no completed trial yet to plot.")
    os.makedirs(out, exist_ok=True)
    prefix = f"{study_name.replace('/', '_')}_" if study_name else ""
    paths: list[str] = []
    parts: list[str] = []
    for name, plot in _plots_of(study, count):
        paths.append(str(Path(out) / f"{prefix}{name}.png"))
        _draw_png(plot, paths[-1])
        if html:
            script = False if parts else html
            page = _make_page(plot).to_html(full_html=False, include_plotlyjs=script, default_height="480px")
            parts.append(f'<div class="{name.rstrip("_0123456789")}">{page}</div>')
    if parts:
        fields = {"title": escape(f"Search {study.study_name}"), "table": escape(table), "plots": "\n".join(parts)}
        template = Template(Path(__file__).with_name("search.html").read_text("utf-8"))
        paths.append(str(Path(out) / f"{prefix}search.html"))
        Path(paths[-1]).write_text(template.substitute(fields), "utf-8")
    return paths


@dataclass
class _Plot:
    """One of Optuna's plots.

    Attributes:
        function: the name of Optuna's function.
        study: the study, or a copy with one objective.
        objective: the function's argument with the names of objectives.
        title: the title.
        marked: trials that are drawn otherwise, as `_one_objective` returns them.
        limits: the ends of the objective's axis.
    """

    function: str
    study: Study
    objective: dict[str, Any]
    title: str
    marked: dict[int, tuple[str, float]] = field(default_factory=dict)
    limits: tuple[float, float] = (0, 1)


def _plots_of(study: Study, count: int) -> Iterator[tuple[str, _Plot]]:
    """The file names and the plots of a study with so many completed trials."""
    names = _objective_names(study)
    labels = [f"{name} ({way.name.lower()})" for name, way in zip(names, study.directions, strict=True)]
    if has_front := len(names) == 2:
        title = f"Pareto front of {names[0]} and {names[1]}"
        yield "pareto_front", _Plot("plot_pareto_front", study, {"target_names": labels}, title)
    for name, (function, min_trials, title) in PLOTS.items():
        if has_front and name == "history":
            continue
        if count < min_trials:
            logger.warning("Skipping %s: it needs %d completed trials, but the study has %d.", name, min_trials, count)
            continue
        for number, label in enumerate(labels):
            copy, marked, limits = _one_objective(study, number, can_be_log=name == "history")
            doubt = f"; a rough guess: only {count} trials" if _is_guess(study) else ""
            heading = title.format(names[number], doubt)
            if name == "parallel_coordinates":
                heading += _describe_lines(marked)
            suffix = f"_{number}" if len(names) > 1 else ""
            yield name + suffix, _Plot(function, copy, {"target_name": label}, heading, marked, limits)


def _describe_lines(marked: dict[int, tuple[str, float]]) -> str:
    """Which line of parallel coordinates is the best, and which trials have none or are at the end of the axis."""
    best = next(trial for trial, (why, _) in marked.items() if why == "best trial")
    counts = Counter(why for why, _ in marked.values())
    far = counts.pop("far worse", 0)
    left_out = [f"{counts[why]} {why}" for why in REASONS.values() if counts[why]]
    text = f" (best: trial {best})"
    text += f", without {', '.join(left_out)}" if left_out else ""
    return f"{text}; {far} far worse at the end" if far else text


def best_trials(storage: str, study_name: str | None = None) -> tuple[list[dict[str, Any]], str]:
    """Number, objectives and hyperparameters of the five best trials, or all six; else of the Pareto front.

    Returns:
        The trials, and in words how many others there are.
    """
    study = _load_study(storage, study_name)
    trials = study.best_trials
    every = study.get_trials(deepcopy=False)
    if len(study.directions) == 1:
        complete = [trial for trial in every if trial.state.name == "COMPLETE"]
        trials = sorted(complete, key=lambda trial: trial.values[0], reverse=study.direction.name == "MAXIMIZE")
        trials = trials[: 5 if len(trials) > 6 else 6]
    states = Counter(trial.state.name.lower() for trial in every)
    counts = ", ".join(f"{count} {STATES.get(state, state)}" for state, count in states.most_common())
    note = f"{len(trials)} best of {len(every)} trials: {counts}" if len(every) > len(trials) else ""
    names = _objective_names(study)
    return [{"trial": t.number, **dict(zip(names, t.values, strict=True)), **t.params} for t in trials], note


def _objective_names(study: Study) -> list[str]:
    """The names of the objectives."""
    count = len(study.directions)
    return study.metric_names or (["objective"] if count == 1 else [f"objective {n}" for n in range(count)])


def _history_marks(marked: dict[int, tuple[str, float]], limits: tuple[float, float]) -> Iterator[tuple[Any, ...]]:
    """The kinds of marks, their colours, entries of the legend, trials and heights; beyond the axis at its edge."""
    low, high = limits
    groups: dict[tuple[str, str], dict[int, float]] = {}
    for number, (why, value) in marked.items():
        kind = "up" if value > high else "down" if value < low else why
        groups.setdefault((kind, REASON_COLOURS.get(why, "grey")), {})[number] = value
    for kind, colour in sorted(groups, key=lambda group: [*REASON_MARKS].index(group[0])):
        found = groups[kind, colour]
        farthest = format_number((max if kind == "up" else min)(found.values()))
        text = f"beyond the axis ({kind} to {farthest})" if kind in ("up", "down") else LEGEND.get(kind, kind)
        yield kind, colour, text, list(found), [min(high, max(low, value)) for value in found.values()]


def _one_objective(study: Study, number: int, *, can_be_log: bool) -> tuple[Study, dict[int, tuple[str, float]], Any]:
    """A copy with one objective, for which Optuna's plots need no function that gives its values.

    Results so far beyond the third quarter that they would squeeze the others are at the end of the axis, unless its
    scale is logarithmic.

    Returns:
        The copy; by number why a trial is drawn otherwise, and the best trial, with their values: of unfinished trials
        the last, or if it is unknown the worst end of the axis; and the ends of the axis, which unfinished trials
        extend to up to three times the range of the others.
    """
    optuna = import_plotting("optuna")
    direction = study.directions[number]
    copy = optuna.create_study(direction=direction)
    trials = study.get_trials(deepcopy=True)
    complete = {trial.number: trial.values[number] for trial in trials if trial.state.name == "COMPLETE"}
    is_maximized = direction.name == "MAXIMIZE"
    ranked = sorted(complete.values(), reverse=is_maximized)
    best = next(trial for trial, value in complete.items() if value == ranked[0])
    limit = 4 * abs(ranked[len(ranked) * 3 // 4] - ranked[0]) or math.inf
    is_log = _axis_of(ranked, can_be_log=can_be_log)[0] == "log"
    near = [value for value in ranked if is_log or abs(value - ranked[0]) <= limit]
    # The last report of a failed trial is no result.
    unfinished = [trial for trial in trials if trial.state.name not in ("COMPLETE", "FAIL")]
    last = {trial.number: trial.intermediate_values.get(trial.last_step or 0, math.nan) for trial in unfinished}
    reach = 3 * abs(near[-1] - near[0])
    least = 0 if is_log else -math.inf
    shown = [*near, *(value for value in last.values() if value > least and abs(value - ranked[0]) <= reach)]
    limits = _axis_of(shown, can_be_log=is_log)[1]
    marked: dict[int, tuple[str, float]] = {}
    for trial in trials:
        worst = limits[0 if is_maximized else 1]
        value = complete.get(trial.number, last.get(trial.number, math.nan))
        if value not in near or trial.number not in complete:
            marked[trial.number] = REASONS[trial.state.name], worst if math.isnan(value) else value
        elif trial.number == best:
            marked[trial.number] = "best trial", value
        trial.values = [value if value in near else worst]
        if trial.number not in complete:
            trial.state, trial.values = optuna.trial.TrialState.PRUNED, None
        copy.add_trial(trial)
    return copy, marked, limits


def _axis_of(values: Sequence[float], *, can_be_log: bool = True) -> tuple[str, tuple[float, float]]:
    """The scale and the range; that of positive values over two orders of magnitude is logarithmic."""
    low, high = min(values), max(values)
    return log_axis(low, high) if can_be_log and high >= 100 * low > 0 else ("linear", axis_range([*values]))


def _draw_png(plot: _Plot, path: str) -> None:
    """Draw one of Optuna's plots in the style of the plots of runs."""
    plt = import_plotting("matplotlib.pyplot")
    visualization = import_plotting("optuna.visualization.matplotlib")
    # Optuna sets a global style, and warns that its matplotlib plots are experimental.
    with plt.rc_context(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        axes = getattr(visualization, plot.function)(plot.study, **plot.objective)
    figure = axes.figure
    figure.set_size_inches(10, 6)
    # Optuna's own title may be in the center.
    axes.set_title("")
    axes.set_title(plot.title, loc="left", y=1.06, fontsize=12)
    if plot.function == "plot_parallel_coordinate":
        _restyle_lines(axes, plot)
    else:
        axes.set_facecolor("white")
        axes.grid(color="#e0e0e0")
        for marks in (*axes.collections[:1], *axes.patches, *axes.lines):
            marks.set(color=COLOURS[marks in axes.lines], alpha=1)
    if plot.function == "plot_optimization_history":
        _restyle_history(axes, plot)
    if plot.function == "plot_param_importances":
        # The legend would name the objective, as the title does.
        axes.get_legend().remove()
        is_guess = _is_guess(plot.study)
        for text in axes.texts:
            text.set_text("" if is_guess else f" {text.get_text()}")
        plt.setp(axes.patches, color=PALE if is_guess else COLOURS[0])
        axes.set(xlabel="", ylabel="")
    else:
        # The history has more entries than fit above.
        place = (-0.01, -0.1) if plot.function == "plot_optimization_history" else (-0.01, 1.07)
        axes.legend(loc="upper left", bbox_to_anchor=place, ncols=3, frameon=False, fontsize=9)
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)


def _restyle_history(axes: Any, plot: _Plot) -> None:
    """Name the line of the best values, and mark the best trial and those that are unfinished or beyond the axis."""
    import_plotting("matplotlib.pyplot").setp(axes.lines, drawstyle="steps-post", label="best so far")
    for kind, colour, text, x, y in _history_marks(plot.marked, plot.limits):
        size = 200 if kind == "best trial" else 60
        axes.scatter(x, y, s=size, zorder=3, marker=REASON_MARKS[kind][0], color=colour, label=text)
    axes.xaxis.get_major_locator().set_params(integer=True)
    scale, ends = _axis_of(plot.limits)
    axes.set(yscale=scale, ylim=ends)
    format_ticks(axes.yaxis, scale, ends, is_share=False)


def _restyle_lines(axes: Any, plot: _Plot) -> None:
    """Draw parallel coordinates in colours that hide no trial, with whole names, whole numbers, and the best trial."""
    # Optuna's colour map would hide the worst trials, as would the yellow end of this one.
    (lines,) = axes.collections
    colours = import_plotting("matplotlib").colormaps["viridis"](range(220))
    colours = colours if lines.get_cmap().name.endswith("_r") else colours[::-1]
    lines.set_cmap(import_plotting("matplotlib.colors").ListedColormap(colours))
    ticker = import_plotting("matplotlib.ticker")
    for place in _whole_places(plot.study):
        # After the objective's and the scale of colours.
        locator = axes.figure.axes[place + 1].yaxis.get_major_locator()
        if isinstance(locator, ticker.MaxNLocator):
            locator.set_params(integer=True)
    _label_parameters(axes.figure, [plot.objective["target_name"], *_parameters(plot.study)])
    best = next(value for why, value in plot.marked.values() if why == "best trial")
    # Optuna 4 leaves out trials without one of the hyperparameters.
    segments = zip(lines.get_segments(), lines.get_array(), strict=True)
    for segment in [points for points, value in segments if value == best][:1]:
        axes.plot(*segment.T, color=COLOURS[1], linewidth=3, label="best trial")


def _make_page(plot: _Plot) -> Any:
    """The same plot as plotly's figure."""
    figure = getattr(import_plotting("optuna.visualization"), plot.function)(plot.study, **plot.objective)
    figure.update_layout(title=plot.title, template="plotly_white", font_size=13, colorway=COLOURS)
    if plot.function == "plot_parallel_coordinate":
        _colour_page(figure, is_maximized=plot.study.direction.name == "MAXIMIZE")
        _label_page(figure, [plot.objective["target_name"], *_parameters(plot.study)], _whole_places(plot.study))
    figure.update_traces(opacity=1, selector={"type": "scatter"})
    figure.update_traces(line_shape="hv", name="best so far", selector={"name": "Best Value"})
    if plot.function == "plot_param_importances":
        figure.update_layout(xaxis_title="", yaxis_title="")
        figure.for_each_trace(lambda bars: bars.update(y=[_wrap(name, "<br>") for name in bars.y]))
        if _is_guess(plot.study):
            figure.update_traces(marker_color=PALE, text=None, texttemplate=None)
    elif plot.function == "plot_optimization_history":
        # Of few trials, plotly would have fractions.
        scale, ends = _axis_of(plot.limits)
        places = [*map(math.log10, ends)] if scale == "log" else ends
        y_axis = {"type": scale, "range": places, "tickformat": ","}
        figure.update_layout(yaxis=y_axis, xaxis_dtick=1 if len(plot.study.trials) < 10 else None)
        for kind, colour, text, x, y in _history_marks(plot.marked, plot.limits):
            size = 16 if kind == "best trial" else 9
            marker = {"symbol": REASON_MARKS[kind][1], "color": colour, "size": size}
            figure.add_scatter(x=x, y=y, mode="markers", marker=marker, name=text)
    return figure


def _is_guess(study: Study) -> bool:
    """Whether there are too few completed trials for importances."""
    return sum(trial.state.name == "COMPLETE" for trial in study.get_trials(deepcopy=False)) < MANY_TRIALS


def _parameters(study: Study) -> list[str]:
    """The hyperparameters of completed trials, in Optuna's order."""
    trials = study.get_trials(deepcopy=False)
    return sorted({name for trial in trials if trial.state.name == "COMPLETE" for name in trial.params})


def _whole_places(study: Study) -> list[int]:
    """The places of the vertical axes with whole numbers. The first axis is the objective's."""
    kinds = {name: kind for trial in study.get_trials(deepcopy=False) for name, kind in trial.distributions.items()}
    named = enumerate((kinds[name] for name in _parameters(study)), 1)
    return [place for place, kind in named if type(kind).__name__ == "IntDistribution"]


def _label_parameters(figure: Any, names: list[str]) -> None:
    """Write the whole names, which Optuna truncates, and values that can be read over lines."""
    figure.set_size_inches(max(10, 2.2 * len(names)), 6)
    figure.axes[0].set_xticks(range(len(names)), list(map(_wrap, names)), rotation=0)
    fixed = import_plotting("matplotlib.ticker").FixedLocator
    objective, scale, *parameters = figure.axes
    # The labels of the last axis need space.
    scale.set_position(scale.get_position().translated(0.03, 0))
    # Categories have their places.
    for axis in (axis for axis in (objective, *parameters) if not isinstance(axis.yaxis.get_major_locator(), fixed)):
        # Its ends, which are rarely round, and those between them that leave space.
        low, high = axis.get_ylim()
        height = axis.transScale + axis.transLimits
        between = [tick for tick in axis.get_yticks() if 0.05 < height.transform((0, tick))[1] < 0.95]
        axis.set_yticks([low, *between, high], list(map(format_number, [low, *between, high])))
        axis.minorticks_off()
    for label in (label for axis in figure.axes[1:] for label in axis.get_yticklabels(which="both")):
        label.set(fontsize=9, bbox={"facecolor": "white", "alpha": 0.8, "linewidth": 0, "pad": 1})


def _colour_page(figure: Any, *, is_maximized: bool) -> None:
    """Give lines the colours of the picture; Optuna's would hide the worst trials."""
    sample = import_plotting("plotly.colors").sample_colorscale
    scale = sample("Viridis", [0.086 * part for part in range(11)])[:: -1 if is_maximized else 1]
    colours = {"colorscale": scale, "reversescale": False}
    figure.update_traces(line=colours, selector={"type": "parcoords"})
    figure.update_traces(marker=colours, selector={"mode": "markers"})
    # Optuna 5 has a trace per trial, whose first height is that of its objective.
    lines = list(figure.select_traces({"type": "scatter", "mode": "lines"}))
    for trace in lines:
        trace.line.color = sample(scale, [trace.y[0]])[0]
    for trace in sorted(lines, key=lambda line: line.y[0], reverse=is_maximized)[:1]:
        trace.update(line={"color": COLOURS[1], "width": 4}, name="best trial", showlegend=True, zorder=1)


def _label_page(figure: Any, names: list[str], whole: list[int]) -> None:
    """The same on a page of Optuna 5; Optuna 4 has another kind of plot."""
    ticks = figure.layout.annotations
    figure.layout.annotations = [tick for tick in ticks if tick.x not in whole or "." not in tick.text]
    figure.update_xaxes(ticktext=[_wrap(name, "<br>") for name in names])
    figure.update_annotations(bgcolor="rgba(255, 255, 255, 0.8)")


def _wrap(name: str, line_end: str = "\n") -> str:
    """A name in lines of at most 18 letters."""
    return line_end.join(textwrap.wrap(name.replace("_", "_ "), 18)).replace("_ ", "_")


def _load_study(storage: str, study_name: str | None) -> Study:
    optuna = import_plotting("optuna")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    if Path(storage).is_file():
        with open(storage, "rb") as file:
            storage = f"sqlite:///{storage}" if file.read(6) == b"SQLite" else storage
    is_file = "://" not in storage
    path = storage if is_file else storage.removeprefix("sqlite:///").partition("?")[0]
    # Optuna would create the file.
    if (is_file or storage.startswith("sqlite:///")) and not Path(path).is_file():
        raise InvalidArgument(f"{storage}: the file does not exist: pass the storage of the search.")
    try:
        source = open_journal(storage) if is_file else storage
        names = optuna.get_all_study_names(source)
    # Errors of Optuna, SQLAlchemy or a parser.
    except Exception as error:
        raise InvalidArgument(f"{storage} is not the storage of a search ({error}): pass its file or URL.") from error
    if not names:
        raise InvalidArgument(f"{storage}: the storage has no study: pass the storage of the search.")
    if (study_name is None and len(names) > 1) or (study_name is not None and study_name not in names):
        raise InvalidArgument(f"{storage} has the studies {', '.join(names)}: choose one of them with --study-name.")
    return optuna.load_study(study_name=study_name or names[0], storage=source)
