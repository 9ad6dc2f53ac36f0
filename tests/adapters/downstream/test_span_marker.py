"""SpanMarker's trainer: trained, evaluated, saved and resumed, by both libraries, with the same results."""

import pytest

from tests.adapters.downstream import span_marker_cases, support

pytestmark = pytest.mark.slow
LIBRARY = "span-marker"
MODULE = span_marker_cases.__name__


@pytest.mark.parametrize("name", span_marker_cases.CASES)
def test_same_record(records, name):
    support.assert_same(records, name)


def test_the_page_says_so(is_on_page):
    assert is_on_page(span_marker_cases.CASES)
