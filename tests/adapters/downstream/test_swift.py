"""ms-swift's pipelines: trained, evaluated, saved and resumed, by both libraries, with the same results."""

import pytest

from tests.adapters.downstream import support, swift_cases

pytestmark = pytest.mark.slow
LIBRARY = "ms-swift"
MODULE = swift_cases.__name__


@pytest.mark.parametrize("name", swift_cases.CASES)
def test_same_record(records, name):
    support.assert_same(records, name)


def test_the_page_says_so(is_on_page):
    assert is_on_page(swift_cases.CASES)
