"""TRL's trainers: trained, evaluated, saved and resumed by transformers and by hftrainer, with the same results."""

import pytest

from tests.adapters.downstream import support, trl_cases

pytestmark = pytest.mark.slow
LIBRARY = "trl"
MODULE = trl_cases.__name__


@pytest.mark.parametrize("name", trl_cases.CASES)
def test_same_record(records, name):
    support.assert_same(records, name)


def test_the_page_says_so(is_on_page):
    assert is_on_page(trl_cases.CASES)
