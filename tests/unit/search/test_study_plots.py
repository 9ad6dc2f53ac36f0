"""`python -m hftrainer plot --study` draws the trials of a search, or says why there is nothing to draw."""

import math
import os
import re
import sys
from pathlib import Path

import optuna
import pytest

from hftrainer.__main__ import main
from hftrainer.errors import InvalidArgument, MissingPackage
from hftrainer.search.study_plots import best_trials, plot_study


def make_study(storage, name="a", trials=6, directions=("minimize",)):
    sampler = optuna.samplers.RandomSampler(seed=1)
    study = optuna.create_study(storage=storage, study_name=name, directions=directions, sampler=sampler)

    def objective(trial):
        rate = trial.suggest_float("learning_rate", 1e-4, 1e-1, log=True)
        kind = trial.suggest_categorical("one_of_many_kinds_of_model", "ab")
        return [rate + (kind == "a")] * len(directions)

    study.optimize(objective, n_trials=trials)
    return study


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    url = f"sqlite:///{tmp_path_factory.mktemp('study')}/search.db"
    make_study(url)
    return url


NAMES = ("history", "importance", "parallel_coordinates")


def test_command_writes_pictures_and_pages_of_a_study(url, tmp_path, capsys):
    main(["plot", "--study", url, "--output", str(tmp_path / "new"), "--html"])
    expected = [str(tmp_path / "new" / name) for name in (*(f"{name}.png" for name in NAMES), "search.html")]
    *printed, empty, header, best, _, _, _, _, last = capsys.readouterr().out.splitlines()
    assert [line.partition(" (")[0] for line in printed] == expected and not empty
    assert header.split() == ["trial", "objective", "learning_rate", "one_of_many_kinds_of_model"]
    assert best.split()[3] == "b" != last.split()[3]
    assert all(os.path.getsize(path) > 10_000 for path in expected)
    page = (tmp_path / "new" / "search.html").read_text()
    assert r"many_\u003cbr\u003ekinds" in page and os.path.getsize(expected[-1]) < 8e6  # not truncated; plotly once
    assert "learning_rate" in page and "a rough guess: only 6 trials" in page
    assert "<h1>Search a</h1>\n<pre>trial  objective" in page and page.count("height:480px") == 3
    assert "<script src=" not in page  # nothing to fetch


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("folder", "--study", "x"), "folder and --study cannot go together"),
        (("--study", "x", "--x", "epoch"), "--x is for runs"),
        (("--study", "sqlite:///nowhere/a.db"), "sqlite:///nowhere/a.db: the file does not exist"),
    ],
)
def test_wrong_study_options_are_refused(words, said, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["plot", *words])
    assert ended.value.code == 2 and said in capsys.readouterr().err


def test_study_must_be_chosen_and_each_objective_is_drawn(tmp_path):
    url = f"sqlite:///{tmp_path}/search.db"
    for name in ("a", "b"):
        make_study(url, name, directions=("minimize", "maximize"))
    for name in (None, "c"):
        with pytest.raises(InvalidArgument, match="has the studies a, b: choose one of them with --study-name"):
            plot_study(url, name, out=str(tmp_path))
    written = plot_study(url, "b", out=str(tmp_path))
    pictures = [f"b_{name}_{number}.png" for name in NAMES[1:] for number in (0, 1)]
    assert written == [str(tmp_path / name) for name in ("b_pareto_front.png", *pictures)]
    assert len(plot_study(*make_study_of_three(tmp_path), out=str(tmp_path))) == 9


def make_study_of_three(folder):
    make_study(url := f"sqlite:///{folder}/three.db", directions=("minimize",) * 3)
    return url, "a"


@pytest.mark.filterwarnings("error:PedAnova")  # it warns that low values would be the best
def test_pareto_front_has_the_best_trials(tmp_path):
    study = optuna.create_study(storage=(url := f"sqlite:///{tmp_path}/a.db"), directions=("minimize", "maximize"))
    for values in ([3.0, 9.0], [1.0, 2.0], [2.0, 1.0]):
        kinds = {"x": optuna.distributions.FloatDistribution(0, 9)}
        study.add_trial(optuna.create_trial(values=values, params={"x": values[0]}, distributions=kinds))
    *_, page = plot_study(url, out=str(tmp_path), html="cdn")
    pattern = r'Best Trial\\u003c.*?"x":\[([^]]*)\],"y":\[([^]]*)\]'
    (front,) = re.findall(pattern, Path(page).read_text())
    assert sorted(zip(*(map(float, values.split(",")) for values in front), strict=True)) == [(1, 2), (3, 9)]


def test_axis_has_the_name_of_the_metric(tmp_path):
    study = make_study(f"sqlite:///{tmp_path}/search.db")
    with pytest.warns(optuna.exceptions.ExperimentalWarning):
        study.set_metric_names(["eval_loss"])
    plot_study(str(tmp_path / "search.db"), out=str(tmp_path), html=True)
    plots = (tmp_path / "search.html").read_text().split("Plotly.newPlot")[-3:]
    assert all("eval_loss" in plot for plot in plots)


def test_history_over_two_decades_has_a_log_scale_with_all_trials(tmp_path):
    study = optuna.create_study(storage=(url := f"sqlite:///{tmp_path}/search.db"))
    study.optimize(lambda trial: 10.0 ** (3 - trial.suggest_int("x", trial.number, trial.number)), n_trials=5)
    history = Path(plot_study(url, out=str(tmp_path), html="cdn")[-1]).read_text().split("Plotly.newPlot")[1]
    assert '"type":"log"' in history and '"y":[1000.0,100.0,10.0,1.0,0.1]' in history


def test_unfinished_and_far_trials_are_marked_at_the_edge(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, *args, **settings: figures.append(figure))
    study = optuna.create_study(storage=(url := f"sqlite:///{tmp_path}/search.db"))

    def objective(trial):
        trial.report(trial.suggest_float("x", 1e-3, 1, log=True) + (trial.number == 7), 1)
        if trial.number == 7:
            trial.report(4, 2)
            raise optuna.TrialPruned
        if trial.number == 8:
            return math.nan
        return 1e6 if trial.number == 5 else trial.number % 3

    study.optimize(objective, n_trials=10)
    plot_study(url, out=str(tmp_path), html=True)
    assert best_trials(url)[1] == "5 best of 10 trials: 8 completed, 1 pruned, 1 failed"
    page, _, lines = (tmp_path / "search.html").read_text().split("Plotly.newPlot")[-3:]
    assert "a line per trial (best: trial 0), without 1 pruned, 1 failed; 1 far worse at the end" in lines
    # The failed and the far one are at the end of the axis, not at their last reports; the pruned one is at its last.
    marks = re.findall(r'"symbol":"([\w-]+)"},"mode":"markers","name":"([^"]+)","x":\[(\d)\],"y":\[([\d.]+)\]', page)
    far = ("triangle-up", "beyond the axis (up to 1,000,000)", "5", "4.2")
    assert marks[-3:] == [("cross", "pruned, at its last report", "7", "4.0"), ("x", "failed", "8", "4.2"), far]
    assert '"text":"objective (minimize)"' in page
    assert ",4.42" in page and '"name":"best trial","x":[0]' in page and "1000000.0" not in page
    legend, none, lines = (figure.axes[0].get_legend() for figure in figures)
    words = [text.get_text() for text in legend.get_texts()]
    # The bars of importances have one colour, which needs no legend; and of so few trials no digits.
    assert words == ["objective (minimize)", "best so far", "best trial", *(name for _, name, *_ in marks[-3:])]
    assert none is None and not any(text.get_text() for text in figures[1].axes[0].texts)
    assert all(tick == int(tick) for tick in figures[0].axes[0].get_xticks())
    best, *others = figures[2].axes[0].lines
    assert [text.get_text() for text in lines.get_texts()] == ["best trial"] and not others
    assert best.get_ydata()[0] == 0
    # The ends of a linear and a log axis have labels.
    for axis in (figures[2].axes[0], figures[2].axes[-1]):
        assert (axis.get_yticks()[0], axis.get_yticks()[-1]) == axis.get_ylim()
    assert figures[1].axes[0].get_xlabel() == ""  # the title says what the shares are


def test_table_has_hyphens_for_hyperparameters_of_other_trials(tmp_path, capsys):
    study = optuna.create_study(storage=(url := f"sqlite:///{tmp_path}/search.db"))
    study.optimize(lambda trial: trial.suggest_int("ab"[trial.number], 3, 3) + trial.number, n_trials=2)
    main(["plot", "--study", url, "--output", str(tmp_path)])
    table = capsys.readouterr().out.split("\n\n")[1]
    rows = [" ".join(row.split()) for row in table.splitlines()]
    assert rows == ["trial objective a b", "0 3 3 -", "1 4 - 3"]


def test_journal_storage_with_one_trial_draws_the_history(tmp_path, caplog):
    path = str(tmp_path / "search.log")
    make_study(optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(path)), trials=1)
    assert plot_study(path, out=str(tmp_path)) == [str(tmp_path / "history.png")]
    assert "Skipping importance: it needs 2 completed trials, but the study has 1" in caplog.text


@pytest.mark.parametrize("url", ["{}", "sqlite:///{}"])
@pytest.mark.parametrize("content", [b"\xb0\n\x01\n", b"a: [1\nb\n", b'{"a": 1}\n{}\n', b"[1]\n3\n"])
def test_file_that_is_no_storage_is_refused(tmp_path, capsys, url, content):
    path = tmp_path / "search"
    path.write_bytes(content)
    with pytest.raises(SystemExit):
        main(["plot", "--study", url.format(path), "--output", str(tmp_path)])
    assert "pass its file" in capsys.readouterr().err


def test_study_without_completed_trials_is_refused(tmp_path):
    url = f"sqlite:///{tmp_path}/search.db"
    make_study(url, trials=0)
    with pytest.raises(InvalidArgument, match="the study 'a' has no completed trial yet"):
        plot_study(url)
    optuna.delete_study(study_name="a", storage=url)
    with pytest.raises(InvalidArgument, match="the storage has no study"):
        plot_study(url)


@pytest.mark.parametrize(("package", "html"), [("matplotlib", False), ("optuna.visualization", True)])
def test_missing_plot_package_is_named(url, tmp_path, monkeypatch, package, html):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingPackage, match=r"pip install 'hftrainer\[plot\]'"):
        plot_study(url, out=str(tmp_path), html=html)


@pytest.mark.parametrize(("direction", "darkest"), [("minimize", 0), ("maximize", 3)])
def test_page_has_dark_lines_for_the_best_and_whole_ticks(tmp_path, direction, darkest):
    study = optuna.create_study(storage=(url := f"sqlite:///{tmp_path}/search.db"), direction=direction)
    study.optimize(lambda trial: trial.suggest_int("epochs", 1, 3) * 0 + trial.number, n_trials=5)
    plot_study(url, out=str(tmp_path), html=True)
    page = (tmp_path / "search.html").read_text().split("newPlot")[-1]
    colours = [sum(map(float, rgb.split(","))) for rgb in re.findall(r'"line":\{"color":"rgb\(([^)]+)\)"', page)]
    # The best line has another colour.
    assert len(colours) == 4 and colours.index(min(colours)) == darkest and max(colours) < 500
    assert '"line":{"color":"#d55e00","dash":"solid","width":4}' in page and '"name":"best trial"' in page
    assert '"text":"2"' in page and '"text":"1.5"' not in page
