"""Training in the kernel of a notebook shows what transformers' Trainer shows in the same kernel."""

import re
import textwrap
from pathlib import Path

import pytest

from tests.support.processes import environment

nbclient = pytest.importorskip("nbclient", reason="needs nbclient and ipykernel")
pytest.importorskip("ipykernel")

ROOT = Path(__file__).parents[2]
SETUP = """
    import sys
    sys.path[:0] = {paths!r}
    import importlib
    from hftrainer.releases import followed
    from tests.support.small_models import make_plain, plain_data

    followed.follow(followed.installed_release())  # as after install(): it is compared with that release

    def make(name, *callbacks, two_sets=False, **settings):
        library = importlib.import_module(name)
        args = library.TrainingArguments({folder!r}, use_cpu=True, save_strategy="no", report_to="none", **settings)
        data = plain_data()
        sets = {{"a": data[:9], "b": data[9:14]}} if two_sets else data[:9]
        metrics = lambda prediction: {{"f1_macro": 0.25}}
        return library.Trainer(make_plain(), args, train_dataset=data, eval_dataset=sets, compute_metrics=metrics,
            callbacks=list(callbacks))
"""
RUNS = {
    "steps": {"max_steps": 6, "logging_steps": 3, "eval_strategy": "steps", "eval_steps": 2},
    "epochs": {"num_train_epochs": 2, "logging_strategy": "epoch", "eval_strategy": "epoch"},
    "no evaluation": {"max_steps": 6, "logging_steps": 2},
    "on start": {"max_steps": 4, "logging_steps": 2, "eval_strategy": "steps", "eval_steps": 4, "eval_on_start": True},
    "two sets": {"max_steps": 4, "eval_strategy": "steps", "eval_steps": 2, "two_sets": True},
}


def execute(folder, *cells):
    nbformat = pytest.importorskip("nbformat")
    setup = SETUP.format(paths=[str(ROOT), str(ROOT / "adapters")], folder=str(folder))
    sources = [textwrap.dedent(cell) for cell in (setup, *cells)]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    client = nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3")
    client.execute(env=environment())
    return [cell.outputs for cell in notebook.cells[1:]]


def pages(outputs):
    found = [output["data"]["text/html"] for output in outputs if "text/html" in output.get("data", {})]
    return [page for page in found if page.strip()]


def tables(outputs):
    """The tables shown, as lists of rows; a word for a missing value is the same in lower case."""
    found = []
    for page in pages(outputs):
        if "<table" in page:
            rows = re.findall(r"<tr.*?</tr>", page, re.DOTALL)
            found.append([[cell.lower() for cell in re.findall(r"<t[hd]>(.*?)</t[hd]>", row)] for row in rows])
    return found


#: Cells that only ours runs.
OTHERS = (
    "trainer = make('hftrainer', max_steps=2)\n_ = trainer.evaluate()\n_ = trainer.evaluate()",
    "_ = trainer.predict(plain_data())",
    """
    from transformers.utils.notebook import NotebookProgressCallback
    trainer.remove_callback(NotebookProgressCallback)
    print([type(callback).__name__ for callback in trainer.callback_handler.callbacks])
    _ = trainer.evaluate()
    """,
    """
    from hftrainer import PlotCallback, ProgressCallback
    _ = make("hftrainer", ProgressCallback, PlotCallback, max_steps=2, logging_steps=1).train()
    """,
)


@pytest.fixture(scope="module")
def outputs(tmp_path_factory, processes):
    cells = [
        f"trainer = make({name!r}, **{settings!r})\ntrainer.train()"
        for settings in RUNS.values()
        for name in ("hftrainer", "transformers")
    ]
    return execute(tmp_path_factory.mktemp("notebook"), *cells, *OTHERS)


@pytest.fixture(scope="module")
def shown(outputs):
    return {run: (outputs[2 * i], outputs[2 * i + 1]) for i, run in enumerate(RUNS)}


@pytest.mark.parametrize("run", RUNS)
def test_table_is_that_of_transformers(shown, run):
    ours, theirs = map(tables, shown[run])
    assert ours == theirs
    assert len(ours) == 1
    assert len(ours[0]) > 2


@pytest.mark.parametrize(("run", "steps"), [("steps", "6"), ("epochs", "10")])
def test_progress_bar_is_that_of_transformers(shown, run, steps):
    bar = re.compile(r"value='(\d+)' max='(\d+)'.*\[(\d+)/\d+.*(Epoch [\d./]+)\]", re.DOTALL)
    ours, theirs = (bar.search(pages(outputs)[0]).groups() for outputs in shown[run])
    assert ours == theirs and ours[1:3] == (steps, steps)


def test_evaluations_predictions_and_plots_outside_training(outputs):
    evaluation, prediction, removed, plotted = outputs[-len(OTHERS) :]
    head = ["training loss", "validation loss", "step", "f1 macro"]
    assert [(table[0], table[1][0], table[1][2]) for table in tables(evaluation)] == [(head, "no log", "0")] * 2
    assert not pages(prediction)  # its bar is taken away
    assert not pages(removed)
    assert "['DefaultFlowCallback']" in "".join(output.get("text", "") for output in removed)
    assert [output for output in plotted if "image/png" in output.get("data", {})]
    text = "".join(output.get("text", "") for output in plotted)
    assert "100%" in text  # the plain bar shows in a kernel, which is no terminal
    assert "'train_loss'" in text
