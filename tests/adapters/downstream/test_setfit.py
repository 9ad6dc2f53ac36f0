"""setfit's trainers: trained, evaluated and saved by both libraries, with the same results."""

import pytest

from tests.adapters.downstream import setfit_cases, support

pytestmark = pytest.mark.slow
LIBRARY = "setfit"
MODULE = setfit_cases.__name__


@pytest.mark.parametrize("name", setfit_cases.CASES)
def test_same_record(records, name):
    support.assert_same(records, name)


def test_the_page_says_so(is_on_page):
    assert is_on_page(setfit_cases.CASES)
