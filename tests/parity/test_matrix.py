"""The matrix: models x accumulation x length x precision x evaluation, each exactly as transformers does it."""

from tests.support.matrix import check_run, over_the_matrix
from tests.support.parity import compare


@over_the_matrix
def test_same_run(tmp_path, model, accumulation, length, precision, evaluation):
    case = {"model": model, "accumulation": accumulation, "length": length}
    check_run(compare, tmp_path, **case, precision=precision, evaluation=evaluation)
