"""Interactive pages of runs."""

import json
import re

import pytest

from hftrainer.reporting.plot import plot
from tests.support.run_logs import write_log, write_observed_run


def test_runs_without_speeds_are_named_and_the_mean_of_a_page_can_be_chosen(tmp_path):
    log = [{"step": step, "loss": 0.01 ** (step / 99)} for step in range(100)]
    runs = [write_log(tmp_path / run, log) for run in "bcd"] + [write_observed_run(tmp_path / "a")]
    plot(runs, html=True)
    page = (tmp_path / "b" / "comparison.html").read_text()
    assert "b, c, d ran without observe=True: no speed, time or memory" in page and '"opacity":0.35' in page
    assert '"parts": {"light": 30, "strong": 8}, "level": "light"' in page
    counts = [page.count(f'"meta":"{choice}"') for choice in ("off", "light", "strong", "light strong")]
    assert counts == [3, 5, 3, 3]
    plot(runs[:1], html=True)
    page = (tmp_path / "b" / "training.html").read_text()
    assert '"opacity":0.5' in page and "no speed, time" not in page


def test_light_smoothing_is_of_curves_of_which_a_run_has_30_points(tmp_path):
    runs = [write_log(tmp_path / str(n), [{"step": step, "loss": 1.0} for step in range(n)]) for n in (29, 30)]
    for folders, parts, counts in ((runs[:1], {"strong": 8}, [1, 0]), (runs, {"light": 30, "strong": 8}, [0, 3])):
        plot(folders, html=True, out=str(tmp_path / "a.svg"))
        assert read_settings(tmp_path / "a.html")["parts"] == parts
        page = (tmp_path / "a.html").read_text()
        assert [page.count(f'"meta":"{choice}"') for choice in ("off light", "light")] == counts


def test_page_in_a_narrow_window_has_one_column(tmp_path):
    losses = dict.fromkeys(("loss", "eval_a_loss", "eval_b_loss"), 1.0)
    plot([write_log(tmp_path / "run", [{"step": 1, **losses, "eval_f1": 0.5}])], html=True)
    _, (_, wide), *_, (_, narrow) = read_settings(tmp_path / "run" / "training.html")["layouts"]["step"]
    assert [layout["xaxis3.domain"] for layout in (wide, narrow)] == [[pytest.approx(0.56), 1.0], [0.0, 1.0]]
    assert narrow["yaxis3.domain"][1] < narrow["yaxis2.domain"][0] and narrow["height"] > wide["height"]
    # plotly would write a legend with several rows over the next panel.
    assert [layout["legend2.orientation"] for layout in (wide, narrow)] == ["v", "h"]
    runs = [write_log(tmp_path / (run * 30), [{"step": 1, "loss": ord(run)}]) for run in "abc"]
    plot(runs, html=True, out=str(tmp_path / "a.svg"))
    layouts = read_settings(tmp_path / "a.html")["layouts"]["step"]
    # Rows of the legend of runs.
    assert [layout["margin.t"] for _, layout in layouts] == [30, 30, 50, 90]


def read_settings(page):
    """What a page tells its script."""
    return json.JSONDecoder().raw_decode(page.read_text().split("notes} = ")[1])[0]


def test_page_has_a_choice_of_the_axes_that_all_runs_have(tmp_path):
    """The one of `--x` is shown first."""
    observed, page = write_observed_run(tmp_path / "a"), tmp_path / "a" / "training.html"
    plot([observed], x="time", html=True)
    assert "<option>time<option>step<option>epoch</select>" in page.read_text()
    settings = read_settings(page)
    losses = {
        x: each["x"] for x, chart in settings["others"].items() for each in chart["data"] if each["name"] == "loss"
    }
    assert (settings["shown"], losses) == ("time", {"step": [10, 20], "epoch": [0.1, 0.2]})
    other = write_log(tmp_path / "b", [{"step": 1, "epoch": 0.5, "loss": 1.0}])
    plot([observed, other], html=True)
    assert "<option>step<option>epoch</select>" in page.with_name("comparison.html").read_text()
    plot([write_log(tmp_path / "c", [{"step": step, "loss": 1.0} for step in range(10)])], html=True, table="<loss>")
    page = (tmp_path / "c" / "training.html").read_text()
    assert "<option>step</select>" in page and "<pre>&lt;loss&gt;</pre>" in page
    assert '"strong": 8}, "level": "off"' in page and page.count('"type":"scatter","visible":false') == 2


def test_names_cannot_end_the_script_of_a_page(tmp_path):
    plot([write_log(tmp_path, [{"step": 1, "epoch": 1, "eval_</script>": 1.0}])], html=True)
    assert "eval_</script>" not in (tmp_path / "training.html").read_text()


def test_spikes_have_marks_and_one_entry_of_the_legend(tmp_path):
    losses = [90.0 if step in (50, 60) else 1 + step % 5 / 10 for step in range(100)]
    losses.append(float("nan"))
    plot([write_log(tmp_path, [{"step": step, "loss": loss} for step, loss in enumerate(losses)])], html=True)
    page = (tmp_path / "training.html").read_text()
    assert re.findall(r'"name":"2 spikes, max 90 at step 50"[^]]*"x":\[([^]]+)\]', page) == ["50.0,60.0"]
    assert page.count('"yaxis":"y1002"') == 3 and re.search(r'"yaxis1002":\{[^}]*"range":\[0,1\]', page)
    scales = read_settings(tmp_path / "training.html")["scales"]["step"]
    ends = [scales[scale]["yaxis2"]["range"][1] for scale in ("automatic", "linear", "log")]
    assert ends == pytest.approx([1.42, 1.42, 2.05], 0.01)
