import pytest

import hftrainer


@pytest.fixture(autouse=True)
def _run_in_temporary_folder(tmp_path, monkeypatch):
    """Code of documents and pages writes into the current folder, and may call `install()`."""
    monkeypatch.chdir(tmp_path)
    yield
    hftrainer.uninstall()
