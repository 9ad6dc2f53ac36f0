"""PEFT's adapters in a plain Trainer: trained, evaluated, saved, resumed by both libraries, with the same results."""

import pytest

from tests.adapters.downstream import peft_cases, support

pytestmark = pytest.mark.slow
LIBRARY = "peft"
MODULE = peft_cases.__name__


@pytest.mark.parametrize("name", peft_cases.CASES)
def test_same_record(records, name):
    support.assert_same(records, name)


def test_the_page_says_so(is_on_page):
    assert is_on_page(peft_cases.CASES)
