"""The notebooks of the gallery, each executed from its first cell to its last."""

from pathlib import Path

import pytest

from tests.docs.examples.support import EXAMPLES
from tests.support import warm

nbclient = pytest.importorskip("nbclient", reason="needs nbclient and ipykernel")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")

#: Notebook → what its last outputs say.
CLAIMS = {
    "quickstart": "checkpoint-1128",
    "callbacks_and_plots": "best accuracy 0.",
    "resume": "the same weights: True",
}


def execute(name: str, folder: Path) -> list:
    """The outputs of all cells; an error in a cell fails the test."""
    notebook = nbformat.read(EXAMPLES / "notebooks" / f"{name}.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "outputs are not kept in the repository"
    resources = {"metadata": {"path": str(folder)}}
    client = nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3", resources=resources)
    client.execute(env=warm.environment())
    return [output for cell in notebook.cells for output in cell.get("outputs", [])]


@pytest.mark.parametrize("name", CLAIMS)
def test_notebook(name, tmp_path):
    outputs = execute(name, tmp_path)
    assert CLAIMS[name] in "".join(output.get("text", "") for output in outputs)
    pictures = [output for output in outputs if "image/png" in output.get("data", {})]
    assert len(pictures) == (name == "callbacks_and_plots")


def test_every_notebook_is_executed():
    assert {path.stem for path in (EXAMPLES / "notebooks").glob("*.ipynb")} == set(CLAIMS)
