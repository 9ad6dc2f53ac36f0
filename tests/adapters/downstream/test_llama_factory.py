"""LLaMA-Factory's runs: trained, evaluated, saved and resumed, by both libraries, with the same results."""

import pytest

from tests.adapters.downstream import llama_factory_cases, support

pytestmark = pytest.mark.slow
LIBRARY = "llamafactory"
MODULE = llama_factory_cases.__name__


@pytest.mark.parametrize("name", llama_factory_cases.CASES)
def test_same_record(records, name):
    support.assert_same(records, name)


def test_the_page_says_so(is_on_page):
    assert is_on_page(llama_factory_cases.CASES)
