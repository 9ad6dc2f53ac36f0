import importlib.util
import os

import pytest

from tests.adapters.downstream import driver, libraries, support

#: Test modules → the library that only the environments of `make test-downstream` and `make test-libraries` have.
NEEDS = {
    "test_trl*.py": "trl",
    "test_sentence_transformers.py": "sentence_transformers",
    "test_gallery.py": "trl",
    "test_setfit.py": "setfit",
    "test_peft.py": "setfit",  # peft itself is in other environments too
    "test_adapters.py": "adapters",
    "test_gliner.py": "gliner",
    "test_span_marker.py": "span_marker",
    "test_pylate.py": "pylate",
    "test_flag_embedding.py": "FlagEmbedding",
    "test_chronos.py": "chronos",
    "test_colpali.py": "colpali_engine",
    "test_swift.py": "swift",
    "test_llama_factory.py": "llamafactory",
}


driver.declare_operators()


def is_installed(library: str) -> bool:
    """Whether there is such a library. A folder of that name, as ours in the root, has no origin."""
    spec = importlib.util.find_spec(library)
    return spec is not None and spec.origin is not None


collect_ignore_glob = [modules for modules, library in NEEDS.items() if not is_installed(library)]


@pytest.fixture(scope="module")
def records(request, tmp_path_factory):
    """The folder of the records of this module's cases, those that were asked for, by both libraries.

    The test module has `MODULE`, the name of the module with the cases; its tests are parametrized by `name`.
    """
    here = [item for item in request.session.items if item.module is request.module and hasattr(item, "callspec")]
    names = dict.fromkeys(item.callspec.params["name"] for item in here if "name" in item.callspec.params)
    folder = tmp_path_factory.mktemp(request.module.MODULE.rpartition(".")[2])
    return support.run_both(request.module.MODULE, names, folder)


@pytest.fixture
def is_on_page(request, records):
    """Whether COMPATIBILITY.md says what the lane has found; with WRITE=1 in the environment it is noted first."""

    def check(cases):
        missing = [name for name in cases if not (records / "hftrainer" / name).exists()]
        if missing:
            pytest.skip(f"the page is about all cases, and {', '.join(missing)} were not run")
        result = libraries.found(records, request.module.LIBRARY, cases)
        if os.environ.get("WRITE"):
            libraries.write(result)
        return libraries.is_recorded(result)

    return check
