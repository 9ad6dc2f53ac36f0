"""The matrix: models x accumulation x length x precision x evaluation, each exactly as transformers does it."""

from tests.parity.matrix import check_run, over_the_matrix
from tests.parity.support import compare


@over_the_matrix
def test_same_run(tmp_path, model, accumulation, length, precision, evaluation):
    case = {"model": model, "accumulation": accumulation, "length": length}
    check_run(compare, tmp_path, **case, precision=precision, evaluation=evaluation)
