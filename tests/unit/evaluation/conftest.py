import functools

import pytest

from tests.support.small_models import plain_data


@pytest.fixture
def make_trainer(make_trainer):
    return functools.partial(make_trainer, eval_dataset=plain_data(19))
