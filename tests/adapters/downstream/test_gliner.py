"""GLiNER's trainer: trained, evaluated, saved and resumed, by both libraries, with the same results."""

import pytest

from tests.adapters.downstream import gliner_cases, support

pytestmark = pytest.mark.slow
LIBRARY = "gliner"
MODULE = gliner_cases.__name__


@pytest.mark.parametrize("name", gliner_cases.CASES)
def test_same_record(records, name):
    support.assert_same(records, name)


def test_the_page_says_so(is_on_page):
    assert is_on_page(gliner_cases.CASES)
