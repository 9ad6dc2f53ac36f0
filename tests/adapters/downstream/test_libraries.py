"""Trainers of other libraries: trained, evaluated, saved and resumed by both libraries, with the same results."""

import functools

import pytest

from tests.adapters.downstream import libraries, support

pytestmark = pytest.mark.slow
CASES = {library: libraries.cases(library) for library in libraries.chosen()}


@pytest.fixture(scope="module")
def records(request, tmp_path_factory):
    """A function of a library: the folder of the records of its cases, those that were asked for, by both libraries."""
    asked = [item.callspec.params for item in request.session.items if item.module is request.module]

    @functools.cache
    def run(library):
        names = [case["name"] for case in asked if case["library"] == library and "name" in case]
        return support.run_both(libraries.module(library), names, tmp_path_factory.mktemp("records"))

    return run


@pytest.mark.parametrize(("library", "name"), [(library, name) for library in CASES for name in CASES[library]])
def test_case_leaves_the_same_record_with_both_libraries(records, library, name):
    support.assert_same(records(library), name)


@pytest.mark.parametrize("library", CASES)
def test_compatibility_page_has_the_results(records, library):
    """COMPATIBILITY.md says what the lane has found."""
    missing = [name for name in CASES[library] if not (records(library) / "hftrainer" / name).exists()]
    if missing:
        pytest.skip(f"the page is about all cases, and {', '.join(missing)} were not run")
    assert libraries.found(records(library), library, CASES[library]) in libraries.read()
