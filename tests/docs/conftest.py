import pytest

import hftrainer


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    """Code of documents and pages writes beside itself, and may call `install()`."""
    monkeypatch.chdir(tmp_path)
    yield
    hftrainer.uninstall()
